"""What `te_inductor.statistics` returns: figures of each tensor that is cast, as data and as a table."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_inductor.presentation.paths import grouped, kind, named, plain
from te_inductor.presentation.printed import Printed
from te_inductor.presentation.tables import Column


@dataclass(frozen=True)
class StepCounts:
    """The steps of one tensor under delayed scaling that were counted."""

    steps: int  # all of them
    cut: int  # those whose values were cut off
    coarse: int  # those whose values lost digits
    first: int  # the one in which scales began to do harm; 0: they have done none
    nonfinite: int  # those in which the tensor held an inf or NaN, on this rank
    jumps: int  # those that moved the scale by a factor of more than 16
    own: int  # those that cast by own amaxes: first ones, and those that a guard chose
    kept_out: int  # those whose amax a guard has kept out of the history
    excess: float  # the largest amax, in multiples of the largest value that its scale held; above 1 it was cut off

    @property
    def misfits(self) -> int:
        """The steps whose scale did not suit the tensor."""
        return self.cut + self.coarse


@dataclass(frozen=True)
class SampleLoss:
    """What the cast of one tensor of a sample loses."""

    relative_error: float  # the norm of the error over that of the tensor
    saturated: float  # share of values beyond the largest that their scale can hold
    flushed: float  # share of the values that are not 0 that became 0


@dataclass(frozen=True)
class SlotStatistics:
    """One of the tensors of one layer. What recipes do not keep, or was not counted or sampled, is None."""

    fqn: str  # module path from the root of the model
    slot: str  # "input", "weight", "grad_output"
    recipe: str
    element: str  # "e4m3", "e5m2", …
    amax: float | None = None  # the last one recorded, or that of the sample; of all ranks that reduce amaxes
    scale: float | None = None  # that the next step casts with
    headroom: float | None = (
        None  # log2 of the largest value that the scale can hold over the amax; below 0: too little
    )
    counts: StepCounts | None = None
    sample: SampleLoss | None = None
    moved: str | None = None  # the recipe to which a guard has moved the layer; scale and counts are of before

    @property
    def misfits(self) -> int:
        """The steps whose scale did not suit the tensor."""
        return 0 if self.counts is None else self.counts.misfits


@dataclass(frozen=True, repr=False)
class Statistics(Printed):
    """`print(statistics)` shows a table, `statistics.table(details=True)` one with every layer, `statistics.to_dict()` is
    for JSON, `statistics.scalars()` for boards."""

    slots: list[SlotStatistics] = field(default_factory=list)

    def scalars(self) -> dict[str, float]:
        """Each figure that there is, by a name such as ``layers.0.up/input/amax``."""
        return {
            f"{one.fqn or '(root)'}/{one.slot}/{name}": float(value)
            for one in self.slots
            for part in (one, one.counts, one.sample)
            for name, value in (vars(part) if part is not None else {}).items()
            if isinstance(value, int | float)
        }

    def _headline(self) -> str:
        return _headline(self.slots)

    def _cells(self, details: bool) -> tuple[Sequence[Column], Iterable[Sequence[str]]]:
        if not details:
            return _COLUMNS, _rows(self.slots, details)
        heads = _COLUMNS[0]._replace(name="module"), *_COLUMNS[2:]  # without the number of layers
        return heads, ((row[0], *row[2:]) for row in _rows(self.slots, details))


# The share of values that became 0 from which on others than outliers lose twice as much as by rounding. Measured with
# E4M3, a scale a tensor, and one channel of 512 that is 10,000 times as large: 5.7%, and 4.3% of the norm where there are
# 2.6% without.
FLUSHED = 1 / 16

_COLUMNS = (
    Column("layers"),
    Column("n", right=True),
    Column("recipe", whole=True, optional=True),
    Column("tensor", whole=True),
    Column("element", whole=True, optional=True),
    Column("amax", right=True),
    Column("scale", right=True, optional=True),
    Column("headroom, bits", right=True),
    Column("steps", right=True),
    Column("cut off", right=True),
    Column("coarse", right=True),
    Column("amax/held", right=True, optional=True),
    Column("inf, NaN", right=True),
    Column("jumps", right=True, optional=True),
    Column("own", right=True, optional=True),
    Column("kept out", right=True),
    Column("moved to", whole=True),
    Column("error", right=True),
    Column("saturated", right=True),
    Column("flushed", right=True),
)


def _headline(slots: Sequence[SlotStatistics]) -> str:
    """How many tensors there are, and which to look at first."""
    worst = sorted((one for one in slots if one.misfits), key=lambda one: -one.misfits)
    found = [
        (f"{plain(one.fqn) or '(root)'}.{one.slot}", one.misfits, one.counts.steps) for one in worst[:3] if one.counts
    ]
    names = ", ".join(f"{name} ({misfits} of {steps})" for name, misfits, steps in found)
    harmed = sum(one.counts is not None and one.counts.first > 0 for one in worst)
    line = f"te_inductor: {len(slots)} tensors in low precision; {len(worst)} had steps whose scale did not suit them"
    line += f", {harmed or 'none'} of them so that it did harm" if worst else ""
    line = f"{line}: {names}" if names else line
    flushed = [
        one for one in slots if one.sample is not None and one.sample.flushed > FLUSHED and one.recipe != "block"
    ]
    if not flushed:
        return line
    name = ", ".join(f"{plain(one.fqn) or '(root)'}.{one.slot} ({one.sample.flushed:.0%})" for one in flushed[:3])  # type: ignore[union-attr]
    return (
        f"{line}; outliers of {len(flushed)} make too many other values 0: {name}; recipe 'block' keeps outliers to a part"
        " of their row"
    )


def _rows(slots: Sequence[SlotStatistics], details: bool) -> Iterator[tuple[str, ...]]:
    """A row for each tensor of a kind of layers, or, with `details`, of a layer. Empty columns are left out."""
    everyone = list(dict.fromkeys(one.fqn for one in slots))
    groups = grouped(slots, lambda one: (one.fqn if details else kind(one.fqn), one.slot, one.recipe, one.element))
    last = None
    for group in groups.values():
        paths = list(dict.fromkeys(one.fqn for one in group))
        name, first = named(paths, everyone), group[0]
        yield (
            *((name, str(len(paths)), first.recipe) if name != last else ("", "", "")),
            first.slot,
            first.element,
            _number(max, [one.amax for one in group]),
            _number(min, [one.scale for one in group]),
            _number(min, [one.headroom for one in group], ".1f"),
            *(_number(max, [getattr(one.counts, field, None) for one in group], form) for field, form in _COUNTED),
            next((one.moved for one in group if one.moved), ""),
            *(_number(max, [getattr(one.sample, field, None) for one in group], ".2%") for field in _SAMPLED),
        )
        last = name


_COUNTED = (
    *(("steps", "d"), ("cut", "d"), ("coarse", "d"), ("excess", ".3g")),
    *(("nonfinite", "d"), ("jumps", "d"), ("own", "d"), ("kept_out", "d")),
)
_SAMPLED = ("relative_error", "saturated", "flushed")


def _number(worst: Any, values: Sequence[float | None], form: str = ".3g") -> str:
    known = [one for one in values if one is not None]
    return format(worst(known), form) if known else ""


def headroom(largest: float, amax: float, scale: float) -> float | None:
    """How many times an amax can double before the scale cuts it off; None where there is no amax."""
    return math.log2(largest / amax) - math.log2(scale) if 0 < amax < math.inf and scale > 0 else None
