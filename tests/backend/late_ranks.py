"""Cases of ranks that reduce amaxes together and of which one does something else later on, for test_late_ranks.py."""

import contextlib
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import te_inductor
from te_inductor.distributed import agreement, call_order
from te_inductor.recipes import DelayedScaling
from tests.ranks import Rank, how


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(32, 48), nn.Linear(48, 32), False

    def forward(self, x):
        x = self.up(x).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(x)


def _late(rank: Rank, kind: str, steps: int) -> Any:
    """What each rank is told, of which the first one does something that a program without a compiler may do, behind some
    steps: a "forward" alone, as an evaluation under gradients, or a step with a graph "break", in another "region", under
    other "options". No number of the others is another one's."""
    torch.manual_seed(0)
    model, x = Model(), torch.ones(8, 32) + rank.rank
    options: Any = {"recipe": DelayedScaling(amax_history_len=4), "amax_group": dist.group.WORLD}
    run = torch.compile(model, backend="te", options=options)
    for _ in range(steps):
        run(x).sum().backward()
    if rank.rank:
        run(x).sum().backward()
        return [value.max().item() for key, value in te_inductor.state_dict(model).items() if "input.amax" in key]
    soon = mock.patch.object(agreement, "PATIENCE_OF_ANSWERS", 0.5), mock.patch.object(call_order, "STANDSTILL", 0.2)
    region = te_inductor.autocast(enabled=False) if kind == "region" else contextlib.nullcontext()
    sizes = [4, 2]  # of what the other rank reduces, forward and backward
    try:
        with soon[0], soon[1], region:
            if kind == "forward":
                sizes = [2]
                run(x)
            if kind == "options":
                run = torch.compile(model, backend="te", options={**options, "policy": {"up": "none"}})
            model.breaks = kind == "break"
            run(x)
    except Exception as error:
        for size in sizes:  # so that the other rank goes on
            dist.all_reduce(torch.zeros(size), dist.ReduceOp.MAX)
        return str(error)


@how(traced=True)
def forward(rank: Rank) -> Any:
    """What ranks are told behind more calls than they compare one by one."""
    return _late(rank, "forward", 20)


@how(traced=True)
def step(rank: Rank, kind: str) -> Any:
    return _late(rank, kind, 2)


@how(traced=True)
def alone(rank: Rank, kind: str) -> Any:
    """A step of which the first rank runs all without the backend, "eager", or leaves the "backward" out, while the other
    one waits for it; which makes up for it behind what that says. Returns the seconds that each has waited."""
    torch.manual_seed(0)
    model, x = Model(), torch.ones(8, 32) + rank.rank
    options: Any = {"recipe": DelayedScaling(amax_history_len=4), "amax_group": dist.group.WORLD}
    run = torch.compile(model, backend="te", options=options)
    soon = mock.patch.object(call_order, "PATIENCE", 1.0), mock.patch.object(call_order, "STANDSTILL", 0.2)
    with soon[0], soon[1]:
        for _ in range(3):
            run(x).sum().backward()
        begun = time.monotonic()
        if rank.rank:
            run(x).sum().backward()
        else:
            stance = torch.compiler.set_stance("force_eager") if kind == "eager" else contextlib.nullcontext()
            with stance:
                y = run(x)
                if kind == "eager":
                    y.sum().backward()
            time.sleep(4)
            for size in [4, 2] if kind == "eager" else [2]:  # of what the other rank reduces, forward and backward
                dist.all_reduce(torch.zeros(size), dist.ReduceOp.MAX)
        return time.monotonic() - begun
