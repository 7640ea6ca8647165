"""One of two ranks on two GPUs: `python -m tests.gpu.parallel_ranks RANK WORLD FILE RECIPE`.

Trains Llama-shaped blocks with sequence parallelism over NCCL. Prints one line of JSON: how far it is from one GPU in low
precision, and what was said."""

import copy
import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks import llama_blocks, ranks_works
from benchmarks.llama_blocks import Shape

SHAPE = Shape(layers=2, batch=1, seq=2048, dim=4096, ffn=8192, heads=32, kv_heads=8)


def main(rank: int, world: int, file: str, recipe: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
    model = llama_blocks.build(SHAPE, torch.bfloat16, "cuda")
    one = copy.deepcopy(model)
    exact = copy.deepcopy(model)
    options = {"policy": {"*": recipe}, "fallback": "error"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = [
            (ranks_works.parallelized(model, mesh), torch.compile(model, backend="te", options=options)),
            (one, torch.compile(one, backend="te", options={**options, "amax_group": "none"})),
            (exact, exact),
        ]
        x, dy = llama_blocks.inputs(SHAPE, torch.bfloat16, "cuda")
        found = []
        for whole, run in runs:
            mine = [t.chunk(world, 1)[rank].contiguous() if whole is model else t.detach() for t in (x.detach(), dy)]
            for _ in range(3):
                whole.zero_grad()
                given = mine[0].clone().requires_grad_()
                y = run(given)
                y.backward(mine[1])
            parts = [y.detach(), given.grad]
            if whole is not model:
                parts = [part.chunk(world, 1)[rank] for part in parts]
            grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in whole.parameters()]
            found.append([part.float() for part in (*parts, *grads)])
    errors = [[((a - b).norm() / b.norm()).item() for a, b in zip(low, found[2], strict=True)] for low in found[:2]]
    said = [str(one.message) for one in caught if "te_inductor" in str(one.message)]
    print(json.dumps({"error": errors[0], "error of one": errors[1], "said": said}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
