"""Steps under delayed scaling whose scales did not suit their tensors.

# Note [Scales that do not suit]
A scale follows from the amaxes of earlier steps. Where a tensor's own amax is far from those, the cast loses more than a
rounding does: above the element's largest value values are cut off, and near its smallest normal value digits are lost.
When a step ends, the device knows the amax and the scale of each tensor. It counts the steps in which the scale brought
the amax to more than twice the largest value, where what is cut off of a normal distribution is as much as its roundings,
and those in which it brought it to less than eight times the smallest normal value, where the same is true of what its
coarser steps lose. An amax of 0, inf or NaN is no observation, and a step that casts by own amaxes fits. Where several
microbatches are in flight, the scale of a gradient is that of the backward's end, which may be newer than the one that
the cast read. Beside misfits it counts the steps in which the tensor held an inf or a NaN, on this rank alone, and those
that moved the scale by a factor of more than 16.

The host says so once, and never waits for it: before each of the first calls, then before every sixteenth, it has the
counts copied to pinned memory behind the device's other work, and at each later call it asks whether the copy is there.
On a CPU it reads them at once. Graphs of the same quantizers, as of other batch sizes, count in the same tensors.
`te_inductor.statistics` reads all counts when it is called, and waits for them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_inductor.runtime.state.store import QuantizerState
from te_inductor.tensor_tables import TensorTable

_OFTEN, _SELDOM = 16, 16  # calls, of which each is preceded by a look; between looks, then


class Misfits(NamedTuple):
    """The counts of one quantizer in one graph."""

    steps: int  # all of them
    cut: int  # those in which values were cut off
    coarse: int  # those in which digits were lost
    first: int  # which step was the first of either; 0: none
    nonfinite: int = 0  # those in which the tensor held an inf or a NaN
    jumps: int = 0  # those that moved the scale by a factor of more than 16


COUNTS = len(Misfits._fields)  # of each quantizer


@dataclass
class Watch:
    """The counts of some quantizers: for each of the updates that a step ends with (n, COUNTS) int32."""

    counts: Sequence[Tensor]
    states: Sequence[QuantizerState] = ()  # of the rows of all counts
    told: bool = False  # the host has said so
    _calls: int = 0
    _copies: list[Tensor] = field(default_factory=list)  # on the host, one of each
    _there: list[Any] | None = None  # CUDA events behind the copies that are on their way

    def look(self) -> list[Misfits] | None:
        """The counts of all quantizers, one update's behind another's, if a copy has arrived; asks for one when it is
        time. Called once a call."""
        self._calls += 1
        if self._there is None and (self._calls <= _OFTEN or self._calls % _SELDOM == 0):
            self._copy()
        if self._there is None or not all(event.query() for event in self._there):
            return None
        self._there = None
        return [Misfits(*row) for copy in self._copies for row in copy.tolist()]

    @torch.no_grad()
    def _copy(self) -> None:
        if not self._copies:
            with torch.inference_mode(False):
                self._copies = [torch.empty_like(one, device="cpu", pin_memory=one.is_cuda) for one in self.counts]
        for copy, one in zip(self._copies, self.counts, strict=True):
            copy.copy_(one, non_blocking=True)
        self._there = [event for one in self.counts if (event := _behind(one)) is not None]


_watches: TensorTable[dict[str, Watch]] = TensorTable()  # by a parameter, then by what is updated together


def watch_of(parameter: Tensor, updates: Sequence[Sequence[str]], states: Sequence[Sequence[QuantizerState]]) -> Watch:
    """The watch of all graphs whose steps end with these updates, of the quantizers that are named, one of which has
    this parameter. Each update's counts are where its states are."""
    known, name, like = _watches.setdefault(parameter, {}), repr(updates), [update[0].amax for update in states]
    watch = known.get(name)
    if watch is None or any(one.device != beside.device for one, beside in zip(watch.counts, like, strict=True)):
        with torch.inference_mode(False), torch.no_grad():
            pairs = zip(updates, like, strict=True)
            counts = [beside.new_zeros((len(each), COUNTS), dtype=torch.int32) for each, beside in pairs]
        watch = known[name] = Watch(counts)
    watch.states = [state for update in states for state in update]
    return watch


def counts_of(states: Collection[QuantizerState]) -> dict[QuantizerState, Misfits]:
    """The counts of those of the quantizers that some graph updates; a graph of other quantizers has counts of its own,
    which are added up. Waits for the devices."""
    found: dict[QuantizerState, Misfits] = {}
    for watch in [one for known in _watches.values() for one in known.values()]:
        if not any(state in states for state in watch.states):
            continue
        rows = [Misfits(*row) for counts in watch.counts for row in counts.tolist()]
        for state, row in zip(watch.states, rows, strict=True):
            other = found.get(state)
            sums = row if other is None else Misfits(*map(sum, zip(row, other, strict=True)))
            found[state] = sums if other is None else sums._replace(first=other.first or row.first)
    return found


def _behind(tensor: Tensor) -> Any:
    """What tells when a copy of this tensor has arrived; None if it is there."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
