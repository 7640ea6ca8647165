"""Models that tensor parallelism deals out, and the plans by which it does."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, BATCH, LENGTH = 64, 128, 2, 32


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias), nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Outer(nn.Module):
    """A root, whose children plans name."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


PLAIN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


SEQUENCE = {
    "norm": SequenceParallel(),
    "gate": ColwiseParallel(input_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 96, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())


class OfPlacements(nn.Module):
    """A linear layer of a DTensor, whose placements are given."""

    def __init__(self, mesh: Any, weight: Any, rows: int = 64, bias: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(rows, 64), mesh, weight))
        self.bias = None if bias is None else nn.Parameter(distribute_tensor(torch.randn(rows), mesh, bias))

    def forward(self, x: DTensor) -> DTensor:
        return F.linear(x, self.weight, self.bias)


class OwnAndShared(nn.Module):
    """A layer that each rank has for itself, which reads rows of its own too, in front of two that the ranks have
    together."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.down(self.up(self.own(x)).relu()) + self.own(rows).mean()


OWN_AND_SHARED = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
