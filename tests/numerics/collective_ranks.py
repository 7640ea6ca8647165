"""A case of the operations that exchange tensors, for test_operations.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_inductor.eager_layers import AllGather, AllReduce, ReduceScatter
from tests.ranks import Rank


def right(rank: Rank) -> Any:
    """Whether the output and the gradient are what they should be, of each operation."""
    name = dist.group.WORLD.group_name

    def is_right(operation, rows: int, dy: Tensor, y: Tensor, dx: Tensor) -> bool:
        x = (torch.arange(rows * 3.0).view(rows, 3) + 100 * rank.rank).requires_grad_()
        found = operation(x)
        found.backward(dy)
        return torch.equal(found, y) and torch.equal(x.grad, dx)

    one = torch.arange(6.0).view(2, 3)
    dy = torch.arange(12.0).view(4, 3) * (rank.rank + 1)
    mine = slice(2 * rank.rank, 2 * rank.rank + 2)
    whole = 2 * torch.arange(12.0).view(4, 3) + 100
    return {
        "AllReduce": is_right(AllReduce(name), 2, one, 2 * one + 100, one),
        "AllGather": is_right(AllGather(name), 2, dy, torch.cat([one, one + 100]), dy[mine] / (rank.rank + 1) * 3),
        "ReduceScatter": is_right(ReduceScatter(name), 4, one + rank.rank, whole[mine], torch.cat([one, one + 1])),
    }
