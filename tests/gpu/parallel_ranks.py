"""A case of sequence parallelism over NCCL, for test_parallel.py."""

import copy
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import llama_blocks, ranks_works
from benchmarks.llama_blocks import Shape
from tests.ranks import Rank

SHAPE = Shape(layers=2, batch=1, seq=2048, dim=4096, ffn=8192, heads=32, kv_heads=8)


def trains(rank: Rank, recipe: str) -> Any:
    """How far training of Llama-shaped blocks is from high precision, and how far it is from it on one GPU."""
    world, mesh = rank.world, init_device_mesh("cuda", (rank.world,), mesh_dim_names=("tp",))
    model = llama_blocks.build(SHAPE, torch.bfloat16, "cuda")
    one = copy.deepcopy(model)
    exact = copy.deepcopy(model)
    options = {"policy": {"*": recipe}, "fallback": "error"}
    runs = [
        (ranks_works.parallelized(model, mesh), torch.compile(model, backend="te", options=options)),
        (one, torch.compile(one, backend="te", options={**options, "amax_group": "none"})),
        (exact, exact),
    ]
    x, dy = llama_blocks.inputs(SHAPE, torch.bfloat16, "cuda")
    found = []
    for whole, run in runs:
        mine = [t.chunk(world, 1)[rank.rank].contiguous() if whole is model else t.detach() for t in (x.detach(), dy)]
        for _ in range(3):
            whole.zero_grad()
            given = mine[0].clone().requires_grad_()
            y = run(given)
            y.backward(mine[1])
        parts = [y.detach(), given.grad]
        if whole is not model:
            parts = [part.chunk(world, 1)[rank.rank] for part in parts]
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in whole.parameters()]
        found.append([part.float() for part in (*parts, *grads)])
    errors = [[((a - b).norm() / b.norm()).item() for a, b in zip(low, found[2], strict=True)] for low in found[:2]]
    return {"error": errors[0], "error of one": errors[1]}
