"""Transformer blocks with experts of which each rank has some, shaped like Qwen3-30B-A3B's: plain `nn.Module`, nothing of
te_inductor. Rows go to the ranks of their experts and back by `all_to_all_single`."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from benchmarks import llama_blocks


@dataclass(frozen=True)
class ExpertShape:
    layers: int = 48
    batch: int = 4
    seq: int = 2048
    dim: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    each: int = 8  # experts of a token
    inner: int = 768

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Experts(nn.Module):
    """The experts of one rank: an equal part of all, in order."""

    def __init__(self, shape: ExpertShape, world: int) -> None:
        super().__init__()
        self.world, self.all, self.each = world, shape.experts, shape.each
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        own = shape.experts // world
        self.up = nn.Parameter(torch.empty(own, 2 * shape.inner, shape.dim))
        self.down = nn.Parameter(torch.empty(own, shape.dim, shape.inner))

    def forward(self, x: Tensor) -> Tensor:  # (rows, dim)
        scores, ids = self.router(x).float().softmax(-1).topk(self.each, dim=-1)
        scores = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        order = torch.argsort(ids.view(-1), stable=True)
        rows = x[order // self.each]
        counts = torch.histc(ids.view(-1).float(), bins=self.all, min=0, max=self.all - 1).long()
        rows = self.products(rows, counts.cumsum(0).int()) if self.world == 1 else self.exchanged(rows, counts)
        rows = rows * scores.view(-1)[order].reshape(-1, 1)
        return torch.zeros_like(x).index_add(0, order // self.each, rows)

    def products(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)

    def exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows come ordered by rank, and by expert within a rank; products want them by expert."""
        group = dist.group.WORLD
        with torch.no_grad():
            come = collectives.wait_tensor(collectives.all_to_all_single(counts, None, None, group))  # type: ignore[arg-type]
            sent = counts.view(self.world, -1).sum(1).tolist()
            received = come.view(self.world, -1).sum(1).tolist()
            for size in (*sent, *received):
                torch._check(size >= 0)
        rows = collectives.all_to_all_single_autograd(rows, received, sent, group)  # type: ignore[arg-type]
        table = come.view(self.world, -1)
        lengths, starts = table.t().reshape(-1), (come.cumsum(0) - come).view(self.world, -1).t().reshape(-1)
        places = torch.arange(lengths.shape[0], device=rows.device)
        segment = places.repeat_interleave(lengths, output_size=rows.shape[0])
        within = torch.arange(segment.shape[0], device=rows.device) - (lengths.cumsum(0) - lengths)[segment]
        order = starts[segment] + within
        y = self.products(rows[order, :], table.sum(0).cumsum(0).int())
        made = y.new_empty(rows.shape)
        made[order, :] = y
        return collectives.all_to_all_single_autograd(made, sent, received, group)  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self, shape: ExpertShape, world: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.attention = llama_blocks.Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.dim, eps=1e-6)
        self.experts = Experts(shape, world)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.experts(self.mlp_norm(x).flatten(0, 1)).view_as(x)


def build(
    shape: ExpertShape, dtype: torch.dtype, device: str, rank: int, world: int, seed: int = 0
) -> llama_blocks.Blocks:
    """The same model for any number of ranks: each rank draws all experts, and keeps its own."""
    with torch.device(device):
        model = llama_blocks.Blocks(shape, lambda shape: Block(shape, world), 1e6)
    model = model.to(device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 3:
                every = parameter.new_empty(shape.experts, *parameter.shape[1:]).normal_(std=0.02, generator=generator)
                parameter.copy_(every.chunk(world)[rank])
            elif "norm" not in name:
                parameter.normal_(std=0.02, generator=generator)
    return model
