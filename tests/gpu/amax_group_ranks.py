"""A case of ranks on GPUs, for test_amax_groups.py. Rank r sees an input of magnitude 1 + r + 10 * step."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_inductor
from te_inductor.recipes import DelayedScaling
from tests.ranks import Rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.down(self.up(x).relu())


def trains(rank: Rank, mode: str, wrapper: str) -> Any:
    """The histories of the first layer's amaxes, and how many graphs were not recorded as CUDA graphs, and why. The wrapper
    is "ddp", "fsdp" or "none", which names the group of all ranks."""
    inner = Model().to(rank.device)
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
        x = torch.full((64, 256), 1.0 + rank.rank + 10.0 * step, device=rank.device)
        y = model(x)
        y.backward(torch.full_like(y, 2.0**-rank.rank * (step + 1)))
    state = te_inductor.state_dict(inner)
    told = {slot: state[f"up.{slot}.amax_history"].tolist() for slot in ("input", "weight", "grad_output")}
    skips = {str(why): number for why, number in counters["inductor"].items() if "cudagraph_skips" in str(why)}
    return {**told, "skips": skips}
