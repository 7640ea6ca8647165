"""Cases of a guard that heals on two ranks, for test_guard.py: only the second one's data has a fault."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import te_inductor
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.state import misfits
from tests.ranks import Rank


def faulty(rank: Rank, kind: str) -> Any:
    """What each rank has counted and kept; the fault is an "outlier", or larger values from then on, a "change"."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    recipe = DelayedScaling(amax_history_len=8)
    options = {"recipe": recipe, "guard": "heal", "amax_group": dist.group.WORLD, "fallback": "silent"}
    run = torch.compile(layer, backend="te", options=options)
    found = []
    for step in range(8):
        fails = rank.rank == 1 and (step == 3 or (step > 3 and kind == "change"))
        run(x * (1000.0 if fails else 1.0)).square().mean().backward()
        found.append(te_inductor.statistics(layer).slots[0].counts)
    told = {"kept out": found[-1].kept_out, "own": found[-1].own, "own before": found[2].own}
    return told | {"history": te_inductor.state_dict(layer)["input.amax_history"].tolist()}


def moved(rank: Rank, kind: str) -> Any:
    """Whether each rank had moved the first of two layers before each of its steps, how many graphs it compiled, and the
    history of the other layer, which the ranks reduce in the new graph too. Decisions come sooner than in training. In a
    DistributedDataParallel, "ddp", the second rank has a microbatch more than the first in each step."""
    misfits._ROUND, misfits._FAILING = 8, 48
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(32, 64)
    with torch.no_grad():
        layers[0].weight[:, 0] = 0.0  # so that the outliers are in one tensor alone
    recipe, group = DelayedScaling(amax_history_len=8), {} if kind == "ddp" else {"amax_group": dist.group.WORLD}
    options = {"recipe": recipe, "guard": "heal", "fallback": "silent", **group}
    run, found = torch.compile(layers, backend="te", options=options), []
    run = DistributedDataParallel(run) if kind == "ddp" else run
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for step in range(20):
        found.append(bool(step) and te_inductor.statistics(layers).slots[0].moved is not None)
        batch = x * (1.0 + rank.rank + step)
        batch[:, 0] *= 1e6 if rank.rank == 1 and step % 3 else 1.0
        if kind == "ddp":
            with run.no_sync():
                for _ in range(1 + rank.rank):
                    run(batch).square().mean().backward()
        run(batch).square().mean().backward()
    history = te_inductor.state_dict(layers)["1.input.amax_history"].tolist()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    return {"moved": found, "graphs": graphs, "history": history}
