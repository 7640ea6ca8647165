"""Sums over columns: gradients of biases."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_inductor import ops, recipes
from tests.offline.cases.common import Case


def column_sums() -> Case:
    """An activation's gradient, its casts both ways and its sums over rows; sizes that no tile divides. What a kernel
    reads outside of them, zeros, would add to the sums."""
    quantizer = recipes.Quantizer("e4m3")

    def run(x: Tensor, dy: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        dx = torch.where(x > 0, dy, torch.where(x < 0, dy.abs(), 0.5))
        return (*ops.quantize_rowcol_delayed(dx, scale, quantizer), dx.sum(0, dtype=torch.float32))

    x, dy = (torch.randn(208, 144, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return torch.compile(run, backend="te", fullgraph=True), (x, dy, torch.ones((), device="cuda"))


def column_sums_padded() -> Case:
    """Rows that are no multiple of 16, and the amax: all of it of the tensor with rows of zeros."""
    quantizer = recipes.Quantizer("e4m3")

    def run(x: Tensor, dy: Tensor, amax: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        dx = torch.where(x > 0, dy, torch.where(x < 0, dy.abs(), 0.5))
        ops.record_amax([dx], amax)
        return (*ops.quantize_rowcol_delayed(dx, scale, quantizer), dx.sum(0, dtype=torch.float32), amax + 0.0)

    x, dy = (torch.randn(201, 144, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    return torch.compile(run, backend="te", fullgraph=True), (x, dy, amax, scale)


def column_sums_transposed() -> Case:
    """The sums of tensors that lie in columns, three of them: pairs of rows."""
    quantizer = recipes.Quantizer("e4m3")

    def run(x: Tensor, y: Tensor, dy: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        dx = torch.where(x > y, dy, dy.abs()).t()
        return (*ops.quantize_rowcol_delayed(dx, scale, quantizer), dx.sum(0, dtype=torch.float32))

    tensors = [torch.randn(144, 208, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return torch.compile(run, backend="te", fullgraph=True), (*tensors, torch.ones((), device="cuda"))


def column_sums_of_pieces() -> Case:
    """The sums as of q, k and v, each with a bias."""
    quantizer = recipes.Quantizer("e4m3")

    def run(q: Tensor, k: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        pieces = [q.abs(), k.abs()]
        sums = [piece.sum(0, dtype=torch.float32) for piece in pieces]
        return (*ops.quantize_pieces_delayed(pieces, 1, scale, quantizer), *sums)

    q, k = (torch.randn(208, 144, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return torch.compile(run, backend="te", fullgraph=True), (q, k, torch.ones((), device="cuda"))


def combined_column_sums() -> Case:
    """Kernels that cast and sum beside others, where the user has Inductor combine kernels that do not depend on each
    other."""
    quantizer = recipes.Quantizer("e4m3")

    def run(x: Tensor, y: Tensor, one: Tensor, other: Tensor, amax: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        found = []
        for dx in (x.abs(), y.neg()):
            ops.record_amax([dx], amax)
            found += [*ops.quantize_rowcol_delayed(dx, scale, quantizer), dx.sum(0, dtype=torch.float32)]
        return (*found, one.abs(), other.neg(), amax + 0.0)

    tensors = [
        torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((208, 144), (144, 208), (100,), (200,))
    ]
    scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    options = {"combo_kernels": True}
    return torch.compile(run, backend="te", fullgraph=True, options=options), (*tensors, amax, scale)


def column_sums_of_a_list() -> Case:
    """The same of tensors that one op over a list makes, which Inductor combines always."""
    quantizer = recipes.Quantizer("e4m3")

    def run(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        found = []
        for dx in torch._foreach_mul([x, y], 2.0):
            found += [*ops.quantize_rowcol_delayed(dx, scale, quantizer), dx.sum(0, dtype=torch.float32)]
        return tuple(found)

    tensors = [torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((208, 144), (144, 208))]
    return torch.compile(run, backend="te", fullgraph=True), (*tensors, torch.ones((), device="cuda"))


class Biased(nn.Module):
    """LayerNorm and an MLP with biases, as of GPT-NeoX and OPT."""

    def __init__(self, dim: int, hidden: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.norm, self.function = nn.LayerNorm(dim, **made), function
        self.up, self.down = nn.Linear(dim, hidden, **made), nn.Linear(hidden, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.up(self.norm(x))))


def _biased(recipe: str, function: Callable[[Tensor], Tensor]) -> Case:
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model = Biased(4096, 16384, function)
    return torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe}), (x,)


def biased_gelu_delayed() -> Case:
    return _biased("delayed", nn.functional.gelu)


def biased_gelu_current() -> Case:
    return _biased("current", nn.functional.gelu)


def biased_relu_delayed() -> Case:
    return _biased("delayed", nn.functional.relu)


class BiasedBlock(nn.Module):
    """LayerNorm, attention, and an MLP of ReLU with biases, as of OPT."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.norm, self.mlp = nn.LayerNorm(dim, **made), Biased(dim, 4 * dim, nn.functional.relu)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, **made) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim)
        h = self.norm(x)
        heads = [layer(h).unflatten(-1, (-1, 128)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        # Attention is called by name: without a device torch chooses the way that has all scores in memory.
        out = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True)[0]
        return self.mlp(x + self.o(out.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def _biased_blocks(**settings: Any) -> Case:
    x = torch.randn(4, 2048, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(nn.Sequential(BiasedBlock(4096), BiasedBlock(4096)), fullgraph=True, **settings), (x,)


def biased_blocks_bf16() -> Case:
    return _biased_blocks()


def biased_blocks_delayed() -> Case:
    return _biased_blocks(backend="te", options={"recipe": "delayed"})


def biased_blocks_current() -> Case:
    return _biased_blocks(backend="te", options={"recipe": "current"})
