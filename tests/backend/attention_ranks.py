"""Cases of attention on ranks whose batches have lengths and paddings of their own, for test_attention_ranks.py."""

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from te_inductor.passes.pre_grad.attention import inputs, sites
from tests import ranks
from tests.attention import as_on_a_gpu

WIDTH, HEADS, LAYERS = 64, 4, 2
PLAN = {f"layers.{at}.{name}": ColwiseParallel() for at in range(LAYERS) for name in "qkv"}
PLAN |= {f"layers.{at}.o": RowwiseParallel() for at in range(LAYERS)}


class Rank(ranks.Rank):
    def patches(self) -> list[Any]:
        return [_on_a_gpu()]


@contextmanager
def _on_a_gpu() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(inputs, "INPUT_QUERIES", 1)
    with as_on_a_gpu(patch):
        yield
    patch.undo()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without biases: the gradient of that of k is a sum of roundings.
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Makes the mask of a padded, causal batch once for all layers, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        row = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
        mask = (place[None, :] <= place[:, None]) & padding.bool()[row, place[None, :]]
        for layer in self.layers:
            x = layer(x, mask)
        return x


def _batch(number: int) -> tuple[Tensor, Tensor]:
    """Other lengths, and other paddings, of each number."""
    draw = torch.Generator().manual_seed(number)
    length = 17 + 5 * (number % 4)
    padding = torch.ones(2, length, dtype=torch.int64)
    padding[0, length - 1 - number % 3 :] = 0
    return torch.randn(2, length, WIDTH, generator=draw), padding


def program(rank: Rank, kind: str) -> Any:
    """Steps as they are in high precision without a compiler: how far off the output and the gradients are, and
    what ran."""
    torch.manual_seed(0)
    model = Model()
    exact = copy.deepcopy(model)
    wrapped = []
    for one in (model, exact):
        if kind == "ddp":
            one = DistributedDataParallel(one)
        elif kind == "fsdp":
            for layer in one.layers:
                fully_shard(layer, mesh=rank.mesh)
            fully_shard(one, mesh=rank.mesh)
        else:
            parallelize_module(one, rank.mesh, PLAN)
        wrapped.append(one)
    told, reported = list[Any](), sites._reported
    patch = pytest.MonkeyPatch()
    patch.setattr(sites, "_reported", lambda site: told.append(reported(site)) or told[-1])
    # With tensor parallelism AOTAutograd (torch 2.13) recurses without end over a symbolic length.
    dynamic = False if kind == "tp" else None
    run = torch.compile(wrapped[0], backend="te", options={"recipe": "none", "fallback": "silent"}, dynamic=dynamic)
    off = 0.0
    for step in range(4):
        x, padding = _batch(step if kind == "tp" else 2 * step + rank.rank)
        found = []
        for one, call in ((model, run), (exact, wrapped[1])):
            one.zero_grad()
            y = call(x, padding)
            y.square().mean().backward()
            found.append([y.detach(), *(_whole(each.grad) for each in one.parameters())])
        off = max(off, *(((a - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in zip(*found, strict=True)))
    patch.undo()
    return {"off": off, "kernels": sorted({site.kernel for site in told})}


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Plain(nn.Module):
    """Attention without a mask, by torch's function or by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.mT * (WIDTH // HEADS) ** -0.5 if self.by_hand else None
        y = F.scaled_dot_product_attention(q, k, v) if scores is None else scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


def of_dtensors(rank: Rank, kind: str) -> Any:
    """How far the output of attention between ranks is from that of one rank in high precision: "context" parallelism, or
    tensor parallelism whose layers leave DTensors, by torch's function ("heads") or "hand"; and its gradient's norm."""
    torch.manual_seed(0)
    model, x = Plain(kind == "hand"), torch.randn(2, 64, WIDTH)
    exact = model(x).detach()
    # None of the kernels that torch has for CPUs takes DTensors.
    with sdpa_kernel(SDPBackend.MATH):
        run = torch.compile(model, backend="te", options={"recipe": "current", "fallback": "error"})
        if kind == "context":
            with context_parallel(rank.mesh, buffers=[x], buffer_seq_dims=[1]):
                part = run(x.clone())
                part.square().sum().backward()
                (y,) = context_parallel_unshard(rank.mesh, [part.detach()], [1])
        else:
            plan: Any = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
            parallelize_module(model, rank.mesh, plan | {"o": RowwiseParallel()})
            y = run(x)
            y.square().sum().backward()
    return ((y - exact).norm() / exact.norm()).item(), _whole(model.q.weight.grad).norm().item()


def stays_local(rank: Rank) -> Any:
    """How far attention by hand, which context parallelism knows nothing of, is from itself without a compiler."""
    torch.manual_seed(0)
    model, x = Plain(by_hand=True), torch.randn(2, 64, WIDTH)
    run = torch.compile(model, backend="te", options={"recipe": "none", "fallback": "error"})
    with context_parallel(rank.mesh, buffers=[x], buffer_seq_dims=[1]):
        found, exact = run(x.clone()), model(x.clone())
    return ((found - exact).norm() / exact.norm()).item()
