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

Graphs of the same quantizers, as of other batch sizes, count in the same tensors. `te_inductor.statistics` reads all
counts when it is called, and waits for them.

# Note [Scales that do harm]
A misfit is no harm by itself. While a model warms up magnitudes grow, and where they double in a step, the cast cuts some
values off, once: the amax is in the history when the step ends. What does harm is what loses as much as a whole tensor, or
as roundings lose in a thousand steps, whose share of the tensor's square is 7e-4 each. Of a normal distribution, whose
amax is 5.5 standard deviations, what is cut off is 0.1% of the square where the scale brings the amax to twice the largest
value, 6% at 4 times, 56% at 16 times; then a product keeps a quarter of its length. So the device raises a level by 16 for
a step beyond twice the largest value, by 64 beyond 4 times, by 256 beyond 16 times, by 16 for one that loses digits, and
lowers it by 1 for each other step. Scales do harm at 256: one step that loses the tensor, 4 or 16 bad ones close together,
or more than one in 17 for good. A weight that starts at 0 grows by 3 and by 2 in its first steps under a learning rate that
is raised step by step, and gradients behind two such weights by 9 and by 4: they do none. A planted 1e30 does in its own
step. A change to far smaller magnitudes, for which a history of 1,024 steps has no scale, does after 16 steps. `first` is
the step in which it began.

The host says so once a process, of all tensors of all graphs, and never waits for the device in a step that goes well:
before each of the first calls, then before every sixteenth, it has the counts copied to pinned memory behind the device's
other work, and at each later call it asks whether the copy is there. On a CPU it reads them at once. Only when it has found
harm it reads the counts of the other graphs, as blocks that are compiled one by one have each their own.

# Note [A guard that heals]
With ``options={"guard": "heal"}`` three more things happen.

1. On the device, an amax that its scale brings to more than 16 times the element's largest value is an outlier. It
   enters no history, so that it moves no scale, unless the two steps before ended with scales that did not suit them
   either: then the tensor has changed. Ranks that reduce amaxes reduce them first, so that all keep the same ones out.
2. The host looks at each call, still without waiting. While the last step that it knows of ended with a scale that
   would not have suited its tensor, as behind an outlier, or for as long as a history remembers larger amaxes, calls
   run the graph of a first step (Note [A first step]), in which each tensor is cast by its own amax. So does the first
   call behind state that was loaded whose scale does not suit its newest amax, and a graph without gradients, as of an
   evaluation, whose tensors' scales do not suit: its first call behind a step does wait for the device. The step in which
   an outlier appears cannot: its amax is known when the cast is done. It cuts the outlier off and casts all else as
   before, which loses less than the outlier's own scale would.
3. Where the sizes of a call's inputs are at least twice, or at most half, those of the call before, gradients of a mean
   have another magnitude, so that the host does not wait for a misfit: that call casts by own amaxes.

Ranks may hear of a misfit a call apart, and then cast one step differently; both graphs reduce the same amaxes. Where a
graph exchanges tensors with other ranks both have to run one form (Note [Ranks that choose]), and only the first of the
three happens. What was done is counted, logged when it begins, and saved: `te_inductor.state_dict`.

# Note [Layers that a guard moves]
A tensor whose magnitude keeps changing has no scale that suits, and makes all of its graph cast by own amaxes ever
again. So a guard that heals moves the layers that read it to a recipe without history and with finer scales:
`recipe_behind` of store.py. Amaxes do not tell how outliers lie in a tensor. Scales of rows keep one token's to itself,
and help little against those of a channel, which every row has: where one of 512 channels is 1e5 times as large as the
others, E4M3 loses 52% of these by a scale of the tensor, 13% by scales of rows, 7% by scales of 1 x 128, and 2.6% where
there is no such channel. So it is recipe "block" where its blocks divide the weight and the device multiplies them,
else "rowwise". Where that is refused the layers run in high precision.

A channel that is as large in every step is no misfit: its scale is the tensor's own, and stays. Nor does it do much
harm: by the same measure one of 100 times loses 2.6%, of 3,000 times 2.7%, of 10,000 times 4.3%, of 30,000 times 12%,
as E4M3 has normal values over a range of 28,672. No count tells of it. One would need each cast to count what becomes
0, and ranks to reduce that, as they have to decide alike. A sample does, and so does `calibrate`, which then chooses
"block".

- When: here the device adds 16 to the level for each step that ends with a scale that would not have suited, as the calls
  behind it cast by own amaxes, and takes 1 away for each other step. At 256 the tensor keeps failing: in more than one step
  of 17, and in 16 at least. An outlier, and a change that stays, fail in a few steps.
- Which: the mark is on the tensor's state, which all layers that share it have. Layers of one GEMM stay one.
- How: a compile asks each parameter whether some state of it is marked, or what waits to be loaded. Where a guard heals
  Dynamo asks that of each parameter at each call, and compiles anew where the answer has changed, so that loading state
  moves layers too, or back. No step waits: the compile is that of the call behind the decision.
- Ranks: each decides alone, all alike. Levels follow from amaxes that ranks have reduced, and every 32 calls each rank has
  them copied behind the work of the same call, and reads that copy 16 calls later, when it has long arrived. Microbatches
  that reduce no amaxes do not count, as ranks may have other numbers of them. A graph that exchanges tensors with other
  ranks moves nothing: not all of these ranks need reduce an amax.
- What else moves nothing: a call in a checkpoint, whose backward would compute another graph; weights that FSDP2 gathers
  in FP8; and what Dynamo was told not to guard.
- How often: what a run compiles anew for this is at most `MOST_GRAPHS` graphs, each for all tensors that fail by then.
  Copies of one block that run one graph, and fail in one tensor, share the new graph as well. Dynamo keeps eight graphs of
  a function and runs what comes behind them uncompiled, hence few, so that evaluation and another batch size have theirs.
  Then the user is told."""

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from te_inductor.runtime.eager.delayed import FAILING
from te_inductor.runtime.state.store import QuantizerState
from te_inductor.tensor_tables import TensorTable

_OFTEN, _SELDOM = 16, 16  # calls, of which each is preceded by a look; between looks, then
_ROUND = 32  # calls from one decision about layers that keep failing to the next
_FAILING = FAILING  # the level at which they do
MOST_GRAPHS = 3  # that one process compiles anew


class Misfits(NamedTuple):
    """The counts of one quantizer in one graph."""

    steps: int  # all of them
    cut: int  # those in which values were cut off
    coarse: int  # those in which digits were lost
    first: int  # the step in which scales began to do harm: Note [Scales that do harm]; 0: they have done none
    nonfinite: int = 0  # those in which the tensor held an inf or a NaN
    jumps: int = 0  # those that moved the scale by a factor of more than 16
    own: int = 0  # those that cast by own amaxes
    kept_out: int = 0  # those whose amax was kept out of the history
    failing: int = 0  # the level of harm; of a guard that heals, of a tensor that keeps failing
    since: int = 0  # the step that raised it from 0
    peak: int = 0  # the bits of the largest fp32 that a scale has brought an amax to, own amaxes apart
    in_a_row: int = 0  # how many up to the last one ended with a scale that would not have suited them

    @property
    def highest(self) -> float:
        """`peak` as a number, which is finite, as JSON needs it."""
        return min(float(struct.unpack("f", struct.pack("i", self.peak))[0]), torch.finfo(torch.float32).max)


class Harm(NamedTuple):
    """A tensor whose scales did harm."""

    name: str
    counts: Misfits
    excess: float  # how many times its amax was the largest value that its scale held, at most


COUNTS = len(Misfits._fields)  # of each quantizer
_ACTS = slice(Misfits._fields.index("own"), Misfits._fields.index("failing") + 1)
ACTS = "guard"  # the entry of saved state that tells what a guard has done


@dataclass
class _Reading:
    """Counts on their way to the host."""

    copies: list[Tensor] = field(default_factory=list)  # on the host, one of each
    events: list[Any] | None = None  # of CUDA, behind the copies that are on their way

    @torch.no_grad()
    def begin(self, counts: Sequence[Tensor]) -> None:
        """Asks for copies behind the device's other work."""
        if not self.copies:
            with torch.inference_mode(False):
                self.copies = [torch.empty_like(one, device="cpu", pin_memory=one.is_cuda) for one in counts]
        for copy, one in zip(self.copies, counts, strict=True):
            copy.copy_(one, non_blocking=True)
        self.events = [event for one in counts if (event := _behind(one)) is not None]

    def take(self, wait: bool = False) -> list[Misfits] | None:
        """The counts of all quantizers, one update's behind another's; None where none were asked for, or, unless it is
        to `wait`, have arrived."""
        if self.events is None or not (wait or all(event.query() for event in self.events)):
            return None
        for event in self.events if wait else ():
            event.synchronize()
        self.events = None
        return [Misfits(*row) for copy in self.copies for row in copy.tolist()]


@dataclass(eq=False)
class Watch:
    """The counts of some quantizers: for each of the updates that a step ends with (n, COUNTS) int32."""

    counts: Sequence[Tensor]
    states: Sequence[QuantizerState] = ()  # of the rows of all counts
    names: Sequence[tuple[str, float]] = ()  # of these, with their elements' largest values; none where nobody is told
    heals: bool = False  # Note [A guard that heals]
    is_unsuited: bool = False  # whether the last step that the host knows of ended with scales that do not suit
    sizes: tuple[int, ...] = ()  # of the inputs of the last call
    begun: bool = False  # whether it knows of the scales that were there before
    _told_kept_out: set[int] = field(default_factory=set)  # the places of what was logged
    _told_unsuited: set[int] = field(default_factory=set)
    _calls: int = 0
    _steps: int = 0  # those of them that ended a step, which all ranks have equally many of
    _newest: _Reading = field(default_factory=_Reading)  # of any call
    _agreed: _Reading = field(default_factory=_Reading)  # of the same call on all ranks

    @torch.no_grad()
    def begin(self, limits: Sequence[tuple[float, float]]) -> None:
        """Notes on which scales, as state that was loaded, do not suit the newest amax: those that bring it out of the
        limits of their quantizer. Waits for the device."""
        self.begun = True
        newest = torch.stack([state.history[-1] * state.scale for state in self.states]).tolist()
        unsuited = [one > most or 0 < one < least for one, (least, most) in zip(newest, limits, strict=True)]
        self._note_unsuited(unsuited)
        rows = [row for counts in self.counts for row in counts.unbind()] if self.is_unsuited else []
        for row, one in zip(rows, unsuited, strict=False):
            row[-1] += one

    def _note_unsuited(self, unsuited: Sequence[bool]) -> None:
        self.is_unsuited = any(unsuited)
        for state, one in zip(self.states, unsuited, strict=True):
            state.unsuited = one

    def look(self) -> list[Misfits] | None:
        """The counts of all quantizers, one update's behind another's, if a copy has arrived; asks for one when it is
        time. Called once a call."""
        self._calls += 1
        if self.heals:
            _ahead.add(self)
        if self._newest.events is None and (self.heals or self._calls <= _OFTEN or self._calls % _SELDOM == 0):
            self._newest.begin(self.counts)
        return self._newest.take()

    def catch_up(self) -> None:
        """Takes note of all steps so far. Waits for the device."""
        _ahead.discard(self)
        self._newest.begin(self.counts)
        self._note_unsuited([row.in_a_row > 0 for row in self._newest.take(wait=True) or ()])

    def failing(self) -> list[int]:
        """The places of tensors that keep failing, once a round of calls; called behind each look but those of
        microbatches whose step goes on. The same on all ranks that reduce amaxes."""
        self._steps += 1
        turn = self._steps % _ROUND
        if turn == 0:
            self._agreed.begin(self.counts)
        rows = self._agreed.take(wait=True) if turn == _ROUND // 2 else None
        return [i for i, row in enumerate(rows or ()) if row.failing >= _FAILING]

    def note(self, rows: Sequence[Misfits]) -> tuple[list[int], list[int]]:
        """Takes what a look has found. Returns the places of tensors whose outliers were kept out, and of those whose
        scales did not suit them, each where that has not been returned before."""
        self._note_unsuited([row.in_a_row > 0 for row in rows])
        kept_out = {place for place, row in enumerate(rows) if row.kept_out} - self._told_kept_out
        unsuited = {place for place, row in enumerate(rows) if row.in_a_row} - self._told_unsuited
        self._told_kept_out |= kept_out
        self._told_unsuited |= unsuited
        return sorted(kept_out), sorted(unsuited)

    def note_sizes(self, sizes: tuple[int, ...]) -> bool:
        """Whether a call's inputs are at least twice, or at most half, as large as those of the call before."""
        before, self.sizes = self.sizes, sizes
        pairs = zip(before, sizes, strict=True) if len(before) == len(sizes) else ()
        return any(a >= 2 * b or b >= 2 * a for a, b in pairs if a != b)


def are_unsuited(states: Sequence[QuantizerState]) -> bool:
    """Whether the last step of some of these quantizers, under a guard that heals, ended with a scale that does not suit.
    Waits for the devices where steps lie behind that the host has not been told of."""
    for watch in [one for one in _ahead if not set(one.states).isdisjoint(states)]:
        watch.catch_up()
    return any(state.unsuited for state in states)


_ahead: "WeakSet[Watch]" = WeakSet()  # whose steps the host may not know of
_watches: TensorTable[dict[str, Watch]] = TensorTable()  # by a parameter, then by what is updated together


def watch_of(parameter: Tensor, updates: Sequence[Sequence[str]], states: Sequence[Sequence[QuantizerState]]) -> Watch:
    """The watch of all graphs whose steps end with these updates, of the quantizers that are named, one of which has
    this parameter. Each update's counts are where its states are."""
    known, name, like = _watches.setdefault(parameter, {}), repr(updates), [update[0].scale for update in states]
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
            kept = {} if other is None else {"first": other.first or row.first, "peak": max(row.peak, other.peak)}
            found[state] = sums._replace(**kept)
    for state, counts in found.items():
        kept_out, own = state.earlier
        found[state] = counts._replace(kept_out=counts.kept_out + kept_out, own=counts.own + own)
    return found


def acts_of(states: Collection[QuantizerState]) -> dict[QuantizerState, dict[str, Tensor]]:
    """What guards that heal have done to these quantizers, also before they were loaded, as an entry of saved state:
    (3,) fp32, the steps whose amax was kept out of the history, those that cast by own amaxes, and whether it was
    moved."""
    healed = {state for known in _watches.values() for one in known.values() if one.heals for state in one.states}
    found = counts_of(healed.intersection(states))
    acts = {state: [one.kept_out, one.own, state.moved] for state, one in found.items() if state in healed}
    return {state: {ACTS: torch.tensor(each, dtype=torch.float32, device="cpu")} for state, each in acts.items()}


_graphs: set[tuple[str, ...]] = set()  # that were compiled anew, by their tensors and those moved


def has_room(tensors: Sequence[str], moved: Sequence[str]) -> bool:
    """Whether a graph with these tensors may be compiled anew without some: Note [Layers that a guard moves]."""
    graph = (*tensors, "without", *moved)
    if graph not in _graphs and len(_graphs) == MOST_GRAPHS:
        return False
    _graphs.add(graph)
    return True


_said: set[str] = set()  # kinds of messages


def is_said(kind: str) -> bool:
    """Whether this process has said something of a kind."""
    return kind in _said


def say_once(kind: str) -> bool:
    """Whether to say something of a kind, of which one message a process is enough."""
    if kind in _said:
        return False
    _said.add(kind)
    return True


def harm_of_all() -> Iterator[Harm]:
    """Yields the tensors whose scales did harm, in any graph of this process that may say so. Waits for the devices."""
    for watch in [one for known in _watches.values() for one in known.values() if one.names]:
        rows = [Misfits(*row) for counts in watch.counts for row in counts.tolist()]
        for (name, largest), row in zip(watch.names, rows, strict=True):
            if row.first:
                yield Harm(name, row, row.highest / largest)


def forget() -> None:
    """Forgets the graphs that were compiled anew, as Dynamo forgets them, and what was said."""
    _graphs.clear()
    _said.clear()


@torch.no_grad()
def restart_acts(loaded: QuantizerState) -> None:
    """Counts what guards do to a quantizer anew, as its state was loaded, which says what they had done before."""
    for watch in [one for known in _watches.values() for one in known.values() if loaded in one.states]:
        rows = [row for counts in watch.counts for row in counts.unbind()]
        for place, (state, row) in enumerate(zip(watch.states, rows, strict=True)):
            if state is loaded:
                row[_ACTS] = 0
                watch._told_kept_out.discard(place)


def _behind(tensor: Tensor) -> Any:
    """What tells when a copy of this tensor has arrived; None if it is there."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
