"""Runs the kernels of delayed scaling's step in Triton's interpreter and compares them with plain torch, bit for bit,
with TRITON_INTERPRET=1: python -m tests.offline.scale_update_kernels."""

import itertools
import math
from unittest import mock

import torch

from te_inductor.recipes import DelayedScaling
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.runtime.eager import delayed
from te_inductor.runtime.state.misfits import COUNTS, Misfits
from te_inductor.templates.triton import scale_updates

CONTENTS = [0.0, 1.0, 3.0, 448.0, 2.0**-140, 2.0**120, math.inf, math.nan, 2.0**-126 * 1.5]


def state(length: int) -> list[torch.Tensor]:
    """One quantizer for each recorded amax, and for each a history without and with something that was loaded."""
    amaxes = [value for value in CONTENTS for _ in range(4)]
    states = [torch.rand(length + 1) * 2 for _ in amaxes]
    for i, one in enumerate(states):
        history = one[:-1]
        one[-1] = one[-1] / 2 + 0.5
        if i % 4 == 0:
            history.zero_()
        elif i % 4 > 1 and length > 1:
            history[-1] = (math.inf, math.nan)[i % 2]
        history[0] = amaxes[i]
    return states


def run(recipe: DelayedScaling, element: str, others: torch.Tensor | None, heals: bool = False) -> None:
    """Steps, some by own amaxes; `others` are the amaxes of another rank."""
    groups = () if others is None else ("ranks",)
    update = ScaleUpdate(recipe, element, groups, heals=heals)
    ours, theirs = (state(recipe.amax_history_len) for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        b.copy_(a)
    table = torch.tensor([tensor.data_ptr() for tensor in ours])
    reduce = mock.patch.object(delayed, "reduce", lambda amax, _: amax.copy_(torch.maximum(amax, others)))  # type: ignore[arg-type]
    counts = [torch.zeros(len(ours), COUNTS, dtype=torch.int32) for _ in range(2)]
    with reduce:
        for step, own in enumerate((False, True, False)):
            assert torch.equal(scale_updates.launch_read(ours[0], table), delayed.read_scales(theirs))
            scale_updates.launch(ours[0], table, update, counts[0], own)
            delayed.update_scales(theirs, update, misfits=counts[1], own=own)
            assert torch.equal(*counts), (recipe, step, heals)
            assert bool(counts[0][:, Misfits._fields.index("kept_out")].any()) == heals
            assert step or 0 < counts[0][:, 3].count_nonzero() < len(counts[0])
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a.view(-1).view(torch.int32), b.view(-1).view(torch.int32)), (recipe, step, a, b)
            for one in (*ours, *theirs):
                one[0] = 0.25 + step


if __name__ == "__main__":
    torch.manual_seed(0)
    for number, (length, algorithm) in enumerate(itertools.product((1, 2, 5), ("max", "most_recent"))):
        recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=length % 2)
        run(recipe, "e4m3", None, heals=number % 3 == 0)  # lengths of 1 and 2, by either algorithm
    run(DelayedScaling(amax_history_len=3), "e5m2", torch.rand(4 * len(CONTENTS)).mul(4).round())
