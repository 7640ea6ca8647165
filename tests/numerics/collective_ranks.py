"""One rank of two, with the operations that exchange tensors: `python -m tests.numerics.collective_ranks RANK WORLD
FILE`. Prints one line of JSON: of which operations the output and the gradient are what they should be."""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from te_inductor.eager_layers import AllGather, AllReduce, ReduceScatter


def main(rank: int, world: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    name = dist.group.WORLD.group_name

    def right(operation, rows: int, dy: Tensor, y: Tensor, dx: Tensor) -> bool:
        x = (torch.arange(rows * 3.0).view(rows, 3) + 100 * rank).requires_grad_()
        found = operation(x)
        found.backward(dy)
        return torch.equal(found, y) and torch.equal(x.grad, dx)

    one = torch.arange(6.0).view(2, 3)
    dy = torch.arange(12.0).view(4, 3) * (rank + 1)
    mine = slice(2 * rank, 2 * rank + 2)
    whole = 2 * torch.arange(12.0).view(4, 3) + 100
    told = {
        "AllReduce": right(AllReduce(name), 2, one, 2 * one + 100, one),
        "AllGather": right(AllGather(name), 2, dy, torch.cat([one, one + 100]), dy[mine] / (rank + 1) * 3),
        "ReduceScatter": right(ReduceScatter(name), 4, one + rank, whole[mine], torch.cat([one, one + 1])),
    }
    print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
