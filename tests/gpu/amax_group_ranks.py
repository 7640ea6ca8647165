"""One rank of a run on GPUs: `python -m tests.gpu.amax_group_ranks RANK WORLD FILE DEVICE MODE WRAPPER`. Rank r sees an
input of magnitude 1 + r + 10 * step. DEVICE is "cuda" (NCCL) or "cpu" (gloo), WRAPPER "ddp", "fsdp" or "none", which
names the group of all ranks. Prints one line of JSON: the histories of the first layer's amaxes, and how many graphs were
not recorded as CUDA graphs, and why."""

import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_inductor
from te_inductor.recipes import DelayedScaling


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.down(self.up(x).relu())


def main(rank: int, world: int, file: str, device: str, mode: str, wrapper: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    torch.manual_seed(0)
    inner = Model().to(device)
    policy = {"*": DelayedScaling(amax_history_len=16)}  # by name: these layers are small
    options: dict[str, Any] = {"policy": policy, "mode": mode, "fallback": "error"}
    model: nn.Module = inner
    if wrapper == "none":
        options["amax_group"] = dist.group.WORLD
    inner.compile(backend="te", options=options)
    if wrapper == "ddp":
        model = DistributedDataParallel(inner)
    elif wrapper == "fsdp":
        model = fully_shard(inner)
    for step in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()  # gradients lie in the graph's memory, which the next step writes
        x = torch.full((64, 256), 1.0 + rank + 10.0 * step, device=device)
        y = model(x)
        y.backward(torch.full_like(y, 2.0**-rank * (step + 1)))
    state = te_inductor.state_dict(inner)
    told = {slot: state[f"up.{slot}.amax_history"].tolist() for slot in ("input", "weight", "grad_output")}
    skips = {str(why): number for why, number in counters["inductor"].items() if "cudagraph_skips" in str(why)}
    print(json.dumps({**told, "skips": skips}))
    dist.barrier()
    del model, inner, y
    torch._dynamo.reset()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
