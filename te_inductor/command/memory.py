"""`te-inductor memory`: the largest tensors that are alive at the peak of a training step, beside bf16's peak."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from te_inductor.api.peaks import KEEPERS, Held, Peak, peak_of
from te_inductor.command.factory import in_bf16, made, options_of
from te_inductor.presentation.paths import grouped, kind, named
from te_inductor.presentation.tables import Column, mib, tabulated

_SUMS = (Column(""), Column("bf16", right=True), Column("this", right=True))
_TENSORS = (
    Column("module"),
    Column("n", right=True),
    Column("shape", whole=True),
    Column("dtype"),
    Column("MiB", right=True),
    Column("kept by"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print the peaks, and what is alive at that of the options."""
    options = options_of(arguments.recipe, arguments.policy)
    if arguments.saved is not None:
        options["saved"] = arguments.saved
    bf16, this = (
        _peak(arguments, given) for given in ({"recipe": "none", "policy": {}, "saved": "high_precision"}, options)
    )
    if arguments.json:
        found = {name: {**asdict(one), "bytes": one.bytes} for name, one in (("bf16", bf16), ("this", this))}
        print(json.dumps(found, indent=1))
        return 0
    print(f"{arguments.model}: expected at the peak of a training step, in MiB, by what Inductor schedules")
    print()
    print(tabulated(_SUMS, _sums(bf16, this)))
    print()
    print(f"the {arguments.count} largest of {len(this.held)} tensors alive at its peak:")
    print(tabulated(_TENSORS, rows(this.held, arguments.count)))
    return 0


def _peak(arguments: argparse.Namespace, options: dict[str, Any]) -> Peak:
    torch._dynamo.reset()
    case, autocast = in_bf16(made(arguments.model, arguments.set), arguments.keep_dtype)
    with autocast:
        return peak_of(case.model, case.inputs, case.kwargs, options, arguments.optimizer)


def _sums(bf16: Peak, this: Peak) -> Iterator[tuple[str, ...]]:
    yield "peak in", bf16.when, this.when
    for keeper in KEEPERS:
        yield keeper, *(mib(one.of(keeper)) for one in (bf16, this))
    yield "peak", *(mib(one.bytes) for one in (bf16, this))


def rows(held: Sequence[Held], count: int) -> Iterator[tuple[str, ...]]:
    """Rows of tensors whose modules differ in a number of their paths alone, the largest first."""
    everyone = [one.module for one in held]
    groups = grouped(held, lambda one: (kind(one.module), one.shape, one.dtype, one.keeper)).values()
    for group in sorted(groups, key=lambda group: -sum(one.bytes for one in group))[:count]:
        first = group[0]
        shape = " x ".join(map(str, first.shape))
        size = mib(sum(one.bytes for one in group))
        name = named([one.module for one in group], everyone) if first.module else ""
        yield name, str(len(group)), shape, first.dtype, size, first.keeper
