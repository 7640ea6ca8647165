"""Experts: layers of grouped products, stored ones too."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.offline.cases.common import Case


class Experts(nn.Module):
    """A router, rows sorted by expert, SwiGLU between two grouped products, and the way back."""

    def __init__(self, dim: int, hidden: int, experts: int, each: int) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.experts, self.each = experts, each
        self.router = nn.Linear(dim, experts, bias=False, **made)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, dim, **made))
        self.down = nn.Parameter(torch.randn(experts, dim, hidden, **made))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.each)
        ids, order = chosen.flatten().sort()
        ends = torch.histc(ids.int(), bins=self.experts, min=0, max=self.experts - 1).cumsum(0, dtype=torch.int32)
        rows = x[order // self.each]
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        y = y * weights.flatten()[order].to(y.dtype)[:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return y[back].view(x.shape[0], self.each, -1).sum(1)


def _experts(recipe: str) -> Case:
    x = torch.randn(16384, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model = Experts(2048, 768, 128, 8)
    return torch.compile(
        model, backend="te", fullgraph=True, options={"recipe": recipe, "policy": {"router": "none", "*": recipe}}
    ), (x,)


def experts_delayed() -> Case:
    return _experts("delayed")


def experts_current() -> Case:
    return _experts("current")


def experts_rowwise() -> Case:
    return _experts("rowwise")


def experts_block() -> Case:
    return _experts("block")


def experts_mxfp8() -> Case:
    return _experts("mxfp8")


def experts_mxfp4() -> Case:
    return _experts("mxfp4")


def experts_nvfp4() -> Case:
    return _experts("nvfp4")


class BiasedExperts(Experts):
    """Products with biases, and gate and up of which each has every other column, as gpt-oss has them."""

    def __init__(self, dim: int, hidden: int, experts: int, each: int) -> None:
        super().__init__(dim, hidden, experts, each)
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.gate_up_bias = nn.Parameter(torch.randn(experts, 2 * hidden, **made))
        self.down_bias = nn.Parameter(torch.randn(experts, dim, **made))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.each)
        ids, order = chosen.flatten().sort()
        ends = torch.histc(ids.int(), bins=self.experts, min=0, max=self.experts - 1).cumsum(0, dtype=torch.int32)
        rows = x[order // self.each]
        gate_up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=ends) + self.gate_up_bias[ids]
        gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
        activated = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        y = torch._grouped_mm(activated, self.down.transpose(-2, -1), offs=ends) + self.down_bias[ids]
        y = y * weights.flatten()[order].to(y.dtype)[:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return y[back].view(x.shape[0], self.each, -1).sum(1)


def experts_biased_delayed() -> Case:
    x = torch.randn(8192, 2880, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": "delayed", "policy": {"router": "none", "*": "delayed"}}
    return torch.compile(BiasedExperts(2880, 2880, 32, 4), backend="te", fullgraph=True, options=options), (x,)


def placed_rows(tokens: int = 6, columns: int = 1104) -> Case:
    """Gradients of experts' rows as passes/joint/token_order.py has them computed: a dot product a row, and the copy of
    the row times its weight, put where its expert has it; some rows are of no expert. And rows of a copy, likewise."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    def function(
        places: Tensor, dout: Tensor, ends: Tensor, w: Tensor, amax: Tensor, scale: Tensor, order: Tensor, y: Tensor
    ) -> Any:
        flat = places.view(-1)
        wide = dout[:, None].expand(-1, 2, -1).reshape(2 * tokens, columns)
        dy = torch.where((flat < ends[-1])[:, None], wide * w[:, None], 0.0)
        ops.record_amax([dy], amax)
        copy = ops.quantize_delayed(dy, scale, Quantizer("e5m2"))
        of_tokens = ops.quantize_delayed(dout, scale, Quantizer("e5m2"))
        rows = ops.place_rows(of_tokens, order // 2, places)
        return (wide * y[flat]).amax(1), ops.place_rows(copy, order, flat), rows, of_tokens, amax + 0.0

    made = {"device": "cuda", "dtype": torch.bfloat16}
    dout, y = torch.randn(tokens, columns, **made), torch.randn(2 * tokens, columns, **made)
    w, order = torch.rand(2 * tokens, **made), torch.arange(2 * tokens, device="cuda")
    numbers = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    ends = torch.zeros(2, dtype=torch.int32, device="cuda")
    given = (order.view(-1, 2), dout, ends, w, *numbers, order, y)  # as the function reads them
    return torch.compile(function, backend="te", fullgraph=True), given


class GroupedLinear(nn.Module):
    """One layer of experts, whose rows come sorted."""

    def __init__(self, experts: int, n: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


class PickedExperts(Experts):
    """The same with the matrices of each row picked, as transformers has it for a step of generation."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.each)
        ids, rows = chosen.flatten(), x.repeat_interleave(self.each, 0)
        gate, up = torch.bmm(self.gate_up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[ids], (nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weights.flatten().to(y.dtype)[:, None]).view(x.shape[0], self.each, -1).sum(1)


def _stored_experts(recipe: str, tokens: int, kind: type[Experts] = Experts, dynamic: bool | None = None) -> Case:
    from te_inductor.ops.stored_experts import Float8Experts, NVFP4Experts
    from te_inductor.recipes import Float8RowwiseScaling, NVFP4WeightOnly

    model = kind(256, 128, 16, 2)
    for name in ("gate_up", "down"):
        shape = getattr(model, name).shape
        e, n, k = shape
        if recipe == "nvfp4":
            scales = torch.empty(e, n, k // 16, device="cuda", dtype=torch.float8_e4m3fn)
            parts = torch.empty(e, n, k // 2, device="cuda", dtype=torch.uint8), scales, torch.empty(e, device="cuda")
            weight: Tensor = NVFP4Experts(parts, shape, torch.bfloat16, NVFP4WeightOnly())
        else:
            values = torch.empty(e, n, k, device="cuda", dtype=torch.float8_e4m3fn)
            weight = Float8Experts(
                (values, torch.empty(e, n, device="cuda")), shape, torch.bfloat16, Float8RowwiseScaling()
            )
        setattr(model, name, nn.Parameter(weight, requires_grad=False))
    options = {"recipe": "none", "fallback": "error"}
    run = torch.compile(model.requires_grad_(False), backend="te", fullgraph=True, dynamic=dynamic, options=options)
    return run, (torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16),)


def decode_experts_nvfp4() -> Case:
    return _stored_experts("nvfp4", 8)


def decode_picked_nvfp4() -> Case:
    return _stored_experts("nvfp4", 8, PickedExperts)


def decode_picked_fp8() -> Case:
    return _stored_experts("fp8", 8, PickedExperts)


def decode_experts_dynamic() -> Case:
    return _stored_experts("fp8", 8, dynamic=True)


def prompt_experts_nvfp4() -> Case:
    return _stored_experts("nvfp4", 512)


def prompt_experts_fp8() -> Case:
    return _stored_experts("fp8", 512)
