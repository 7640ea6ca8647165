"""Whether ranks that reduce amaxes together do so in one order: Note [Ranks that agree] in agreement.py; and answers to
ranks that wait for this one, by a thread, as its own may wait for them in a collective."""

import atexit
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.diagnostics import say
from te_inductor.distributed.world import World, digest
from te_inductor.errors import StateError
from te_inductor.tensor_tables import TensorTable

MOST_CALLS = 64  # of graphs that reduce amaxes, between two looks at their order on other ranks
_SAMPLE = 64  # values by which a parameter is known
PATIENCE = 120.0  # seconds; until a rank says that it waits for others to make a call
STANDSTILL = 1.0  # seconds without a call, behind which a rank looks whether another one asks
_KEPT = 256  # of the last calls, of which other ranks may ask
_PAUSE, _LOOK = 0.002, 0.2  # seconds; between looks at whether all ranks have come, and at the others


class Reduction(NamedTuple):
    """A reduction of amaxes, as ranks tell each other of it."""

    layer: str
    what: str  # the graph, how often its state was loaded, and whether gradients' amaxes are reduced
    mark: str = ""  # by which another rank knows the layer, where that has found it in another order; or empty

    def __str__(self) -> str:
        return f"{self.layer} ({self.what})"


_Step = tuple[Reduction | None, Reduction]  # a call behind the call before it
_Noted = dict[tuple[str, int], tuple[Reduction, Callable[[Iterable[Any]], None]]]


@dataclass
class CallOrder:
    """The reductions of amaxes over one group, in the order in which this rank makes them."""

    store: World
    key: str  # of the group, the same on all of its ranks
    ranks: Sequence[int]
    before: int = 0  # calls that were compared with those of another rank
    calls: list[Reduction] = field(default_factory=list)  # those behind them
    # A call's first parameter has a name, a mark, and what is noted of each graph, by how often state was loaded.
    known: TensorTable[tuple[str, str, _Noted]] = field(default_factory=TensorTable)
    reduced: TensorTable[bool] = field(default_factory=TensorTable)  # parameters
    layers: dict[str, str] = field(default_factory=dict)  # that no wrapper names, by their marks
    unnamed: int = 0  # how many there are: they are told apart by their order
    looked: list[str] = field(default_factory=list)  # the keys of the last comparisons
    made: int = 0  # calls
    last: Reduction | None = None
    steps: set[_Step] = field(default_factory=set)  # that this rank has made
    met: set[int] = field(default_factory=set)  # the numbers of calls before which it has waited for the others
    latest: deque[tuple[int, _Step]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def note(self, parameters: Sequence[Tensor], graph: str, loads: int) -> Callable[[Iterable[Any]], None]:
        """Is called before each call of a graph whose ranks have agreed; `loads` is how often its state was loaded.
        Returns what to call with the graph's outputs, which has their backward noted likewise.

        Raises:
            StateError: another rank has made other calls.
        """
        known = self.known.get(parameters[0], None)
        if known is None:
            known = self.known[parameters[0]] = *self._named(parameters[0]), {}
        name, mark, noted = known
        found = noted.get((graph, loads))
        if found is None:  # of each layer at each call: no text and no function that can be kept
            again = partial(self._add, Reduction(name, f"graph {graph}, in its backward", mark))
            call = Reduction(name, f"graph {graph}, {loads} loads of its state", mark)
            found = noted[graph, loads] = call, partial(compat.before_backward, first=again)
            for parameter in parameters:
                self.reduced[parameter] = True
        self._add(found[0])
        return found[1]

    def reduces(self, parameter: Tensor) -> bool:
        """Whether ranks have reduced amaxes of a parameter's layer."""
        return self.reduced.get(parameter, False)

    def _add(self, call: Reduction) -> None:
        number, step = self.made, (self.last, call)
        if step not in self.steps:
            self.met.add(number)  # before it is made, so that nobody is told that this rank has gone on
        self.latest.append((number, step))
        self.made, self.last = number + 1, call
        self.calls.append(call)
        if number in self.met:
            self._meet(number, step)
            self.steps.add(step)
        if len(self.calls) > min(self.before // 16, MOST_CALLS - 1):
            self._compare()

    def _meet(self, number: int, step: _Step) -> None:
        """Waits for the other ranks, all of which make this step here, or none does.

        Raises:
            StateError: one makes another, or did not come before the process group's timeout.
        """
        rank, key = self.store.rank, f"meets/{self.key}/{number}"
        first, other = self.store.first(f"{key}/first", json.dumps([rank, *step]))
        if not self._is(step, other):
            self.store.set(f"{key}/differs", json.dumps([rank, *step]))
            self._check(number, step, first, other)
        self.store.set(f"{key}/{rank}", "1")
        if self.store.count(f"{key}/count") == len(self.ranks):
            self.store.set(f"{key}/all", "1")
        started = looked = time.monotonic()
        limit = min(PATIENCE, self.store.timeout)
        while not self.store.has(f"{key}/all"):
            now = time.monotonic()
            if now - looked > _LOOK:
                looked = now
                if differs := self.store.get(f"{key}/differs"):
                    first, *other = json.loads(differs)
                    self._check(number, step, first, other)
                missing = [one for one in self.ranks if not self.store.has(f"{key}/{one}")]
                gone_on = dict(self.gone_on(number, missing))
                for one, made in gone_on.items():
                    self._check(number, step, one, made)
                if missing and len(gone_on) == len(missing):  # by the same step, which they had made before
                    return
                if now - started > limit:
                    text = alone(rank, missing, now - started, number, step)
                    if limit >= self.store.timeout:
                        raise StateError(text)
                    say(text, "warn")
                    limit = self.store.timeout
            time.sleep(_PAUSE if now - started < _LOOK else 5 * _PAUSE)

    def gone_on(self, number: int, ranks: Iterable[int]) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yields those of these ranks that have made a call of this number, and the step that it was."""
        self.store.set(f"asked/{self.key}", str(number))
        for rank in ranks:
            if found := self.store.get(f"answers/{self.key}/{number}/{rank}"):
                yield rank, json.loads(found)

    def answer(self) -> None:
        """Tells a rank that asks which call this one has made, if it did not wait there for the others, and one that has
        made more calls how many these are."""
        asked = self.store.get(f"asked/{self.key}")
        for number, step in [*self.latest] if asked else ():
            if number == int(asked) and number not in self.met:
                self.store.set(f"answers/{self.key}/{number}/{self.store.rank}", json.dumps(step))

        more = self.store.get(f"stands/{self.key}")
        if more and self.made < int(more):
            known = json.dumps([self.made, *filter(None, [self.last])])
            self.store.set(f"stands/{self.key}/{more}/{self.store.rank}", known)

    def is_ahead(self, waited: float) -> bool:
        """Says, where this rank has made no call for long, which ranks stand behind fewer calls, as its own thread may
        wait for them in a reduction. False if there is nothing to say, as the others have come to its last call."""
        last = self.last
        if last is None or self.made - 1 in self.met or waited < min(PATIENCE, self.store.timeout / 2):
            return False
        behind = list(self._behind())
        if behind:
            say(ahead(self.store.rank, waited, self.made, last, behind), "warn")
        return bool(behind)

    def _behind(self) -> Iterator[tuple[int, int, Reduction | None]]:
        """Yields other ranks that stand behind fewer calls than this one has made, how many these are, and the last."""
        self.store.set(f"stands/{self.key}", str(self.made))
        for rank in self.ranks:
            if found := self.store.get(f"stands/{self.key}/{self.made}/{rank}"):
                made, *last = json.loads(found)
                yield rank, made, next(self._as_here(last), None)

    def _is(self, step: _Step, other: Sequence[Any]) -> bool:
        return all(_same(*pair) for pair in zip(step, self._as_here(other), strict=True))

    def _as_here(self, calls: Iterable[Any]) -> Iterator[Reduction | None]:
        """The calls of another rank, with the names that their layers have on this one."""
        for one in calls:
            call = None if one is None else Reduction(*one)
            yield call and call._replace(layer=self.layers.get(call.mark, call.layer))

    def _check(self, number: int, calls: Sequence[Reduction | None], rank: int, others: Sequence[Any]) -> None:
        """Raises where another rank has made other calls, the last of which have this number."""
        for place, (own, other) in enumerate(zip(calls, self._as_here(others), strict=True), number + 1 - len(calls)):
            if not _same(own, other):
                raise StateError(out_of_order(self.store.rank, str(own), rank, str(other), place))

    def _named(self, parameter: Tensor) -> tuple[str, str]:
        name = compat.name_in_ddp(parameter)
        if name is not None:
            return name, ""
        name, self.unnamed = f"layer {self.unnamed}", self.unnamed + 1
        mark = _mark_of(parameter)
        return name, mark if mark and self.layers.setdefault(mark, name) == name else ""

    def _compare(self) -> None:
        own, self.calls = self.calls, []
        self.looked.append(f"order/{self.key}/{self.before}")
        first, others = self.store.first(self.looked[-1], json.dumps([self.store.rank, *own]))
        if len(self.looked) > 8:  # no rank is that far behind
            oldest = self.looked.pop(0)
            self.store.delete(*[oldest] if self.store.rank == self.ranks[0] else [])
        self._check(self.before + len(own) - 1, own, first, others)
        self.before += len(own)


class Answers:
    """A thread that tells other ranks which calls this one has made while it makes no others. It ends with the process
    group, and in front of the interpreter, whose end no call of a store would survive."""

    def __init__(self, world: World) -> None:
        self._world, self._ends, self._said = weakref.ref(world), threading.Event(), set[str]()
        self._thread = threading.Thread(target=self._run, name="te_inductor answers", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        self._ends.set()
        self._thread.join(2 * STANDSTILL)

    def _run(self) -> None:
        seen: dict[str, tuple[int, float]] = {}
        while not self._ends.wait(STANDSTILL) and self._answer(seen):
            pass
        atexit.unregister(self._end)

    def _answer(self, seen: dict[str, tuple[int, float]]) -> bool:
        """Whether there may be more to answer; `seen` has the numbers of calls that were made before, and since when."""
        world = self._world()
        if world is None:
            return False
        for order in list(world.orders.values()):
            made, since = seen.get(order.key, (-1, 0.0))
            if made != order.made:
                seen[order.key] = order.made, time.monotonic()
                continue
            try:
                order.answer()
                if order.key not in self._said and order.is_ahead(time.monotonic() - since):
                    self._said.add(order.key)
            except (RuntimeError, StateError):  # its store is gone
                return False
        return True


def _same(own: Reduction | None, other: Reduction | None) -> bool:
    """Whether calls are of one layer and one graph, whatever marks ranks know the layer by."""
    return own is other or (own is not None and other is not None and own[:2] == other[:2])


def _mark_of(parameter: Tensor) -> str:
    """What ranks that hold the same parameter know it by: a digest of some of its values, so that it may differ between
    ranks that hold other ones. Empty where these tell nothing, or cannot be read."""
    plain = type(parameter) in (Tensor, torch.nn.Parameter) and not parameter.is_meta
    if not plain or (parameter.is_cuda and torch.cuda.is_current_stream_capturing()):
        return ""
    values = parameter.detach().reshape(-1)
    some = values[:: max(1, values.numel() // _SAMPLE)].tolist()
    return digest(some) if len(set(some)) > 1 else ""


def out_of_order(rank: int, call: str, first: int, other: str, number: int) -> str:
    """The text of the error about a rank whose calls of graphs are not those of the first one."""
    return (
        f"rank {rank} reduces amaxes of delayed scaling with those of other layers, or other state, of rank {first}: call"
        f" {number} of those that reduce over the same ranks is of {call}, and on rank {first} of {other}; expected these"
        " ranks to call the same layers, and their backwards, in one order, and te_inductor.load_state_dict equally"
        " often; have them do so, put forwards that others do not run under torch.no_grad(), or pass"
        " options={'amax_group': 'none'}"
    )


def alone(rank: int, missing: Sequence[int], waited: float, number: int, step: _Step) -> str:
    """The text about a rank that calls graphs in an order in which it has not called them before, and the others do not."""
    return (
        f"rank {rank} waited {waited:.0f} s for {'rank' if len(missing) == 1 else 'ranks'}"
        f" {', '.join(map(str, missing))} to reduce amaxes of delayed scaling with it: its call {number} of those that"
        f" reduce over the same ranks is of {step[1]}, which never followed {step[0]} before, expected all of these ranks"
        " to call the same layers, and their backwards, in one order; have them do so, put forwards that others do not run"
        " under torch.no_grad(), or pass options={'amax_group': 'none'}"
    )


def ahead(
    rank: int, waited: float, made: int, last: Reduction, behind: Iterable[tuple[int, int, Reduction | None]]
) -> str:
    """The text about a rank that has made more calls than others, which stand still as it does."""
    others = " and ".join(f"rank {one} behind {count}, of which {of} was the last" for one, count, of in behind)
    return (
        f"te_inductor: rank {rank} has stood for {waited:.0f} s behind {made} calls that reduce amaxes of delayed scaling"
        f" over the same ranks, of which {last} was the last, and {others}; expected all of these ranks to make the same"
        " calls, and waits for them until the process group's timeout. A rank that runs a step without the backend, as"
        ' under torch.compiler.set_stance("force_eager") or beyond Dynamo\'s limit of recompiles, or leaves out a'
        " backward, makes none: have all of them do so, or pass options={'amax_group': 'none'}"
    )
