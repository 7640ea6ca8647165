"""Whether ranks that reduce amaxes together do so in one order: Note [Ranks that agree] in agreement.py."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.errors import StateError
from te_inductor.tensor_tables import TensorTable

MOST_CALLS = 64  # of graphs that reduce amaxes, between two looks at their order on other ranks
_SAMPLE = 64  # values by which a parameter is known


class Reduction(NamedTuple):
    """A reduction of amaxes, as ranks tell each other of it."""

    layer: str
    what: str  # the graph, how often its state was loaded, and whether gradients' amaxes are reduced
    mark: str = ""  # by which another rank knows the layer, where that has found it in another order; or empty

    def __str__(self) -> str:
        return f"{self.layer} ({self.what})"


class _Store(Protocol):
    """What ranks leave for each other."""

    rank: int

    def first(self, key: str, value: str) -> tuple[int, list[Any]]: ...

    def delete(self, *keys: str) -> None: ...


_Noted = dict[tuple[str, int], tuple[Reduction, Callable[[Iterable[Any]], None]]]


@dataclass
class CallOrder:
    """The reductions of amaxes over one group, in the order in which this rank makes them."""

    store: _Store
    key: str  # of the group, the same on all of its ranks
    leads: bool  # whether this rank is the first of them
    before: int = 0  # calls that were compared with those of another rank
    calls: list[Reduction] = field(default_factory=list)  # those behind them
    # A call's first parameter has a name, a mark, and what is noted of each graph, by how often state was loaded.
    known: TensorTable[tuple[str, str, _Noted]] = field(default_factory=TensorTable)
    layers: dict[str, str] = field(default_factory=dict)  # that no wrapper names, by their marks
    unnamed: int = 0  # how many there are: they are told apart by their order
    looked: list[str] = field(default_factory=list)  # the keys of the last comparisons

    def note(self, parameter: Tensor, graph: str, loads: int) -> Callable[[Iterable[Any]], None]:
        """Is called before each call of a graph whose ranks have agreed; `loads` is how often its state was loaded.
        Returns what to call with the graph's outputs, which has their backward noted likewise.

        Raises:
            StateError: another rank has made other calls.
        """
        known = self.known.get(parameter, None)
        if known is None:
            known = self.known[parameter] = *self._named(parameter), {}
        name, mark, noted = known
        found = noted.get((graph, loads))
        if found is None:  # of each layer at each call: no text and no function that can be kept
            again = partial(self._add, Reduction(name, f"graph {graph}, in its backward", mark))
            call = Reduction(name, f"graph {graph}, {loads} loads of its state", mark)
            found = noted[graph, loads] = call, partial(compat.before_backward, first=again)
        self._add(found[0])
        return found[1]

    def _add(self, call: Reduction) -> None:
        self.calls.append(call)
        if len(self.calls) > min(self.before // 16, MOST_CALLS - 1):
            self._compare()

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
            self.store.delete(*[oldest] if self.leads else [])
        for place, (call, other) in enumerate(zip(own, (Reduction(*one) for one in others), strict=True)):
            known = other._replace(layer=self.layers.get(other.mark, other.layer))
            if call[:2] != known[:2]:
                raise StateError(out_of_order(self.store.rank, str(call), first, str(known), self.before + place))
        self.before += len(own)


def _mark_of(parameter: Tensor) -> str:
    """What ranks that hold the same parameter know it by: a digest of some of its values, so that it may differ between
    ranks that hold other ones. Empty where these tell nothing, or cannot be read."""
    plain = type(parameter) in (Tensor, torch.nn.Parameter) and not parameter.is_meta
    if not plain or (parameter.is_cuda and torch.cuda.is_current_stream_capturing()):
        return ""
    values = parameter.detach().reshape(-1)
    some = values[:: max(1, values.numel() // _SAMPLE)].tolist()
    return hashlib.sha256(repr(some).encode()).hexdigest()[:16] if len(set(some)) > 1 else ""


def out_of_order(rank: int, call: str, first: int, other: str, number: int) -> str:
    """The text of the error about a rank whose calls of graphs are not those of the first one."""
    return (
        f"rank {rank} reduces amaxes of delayed scaling with those of other layers, or other state, of rank {first}: call"
        f" {number} of those that reduce over the same ranks is of {call}, and on rank {first} of {other}; expected these"
        " ranks to call the same layers, and their backwards, in one order, and te_inductor.load_state_dict equally"
        " often; have them do so, or pass options={'amax_group': 'none'}"
    )
