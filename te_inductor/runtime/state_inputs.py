"""The state of delayed scaling as inputs of a compiled graph.

Dynamo compiles a module's code, not a module: its parameters are inputs of the graph, and another module of the same class
runs the same graph. So the state is an input too, found by the parameters that a call brings.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from te_inductor.diagnostics import COMPUTED_AGAIN, say, without_state
from te_inductor.runtime import agreement, resumed
from te_inductor.runtime.state import LOCK, Key, ScalingState, moves, shared_state, take_from_shards
from te_inductor.runtime.tensor_groups import TensorGroups


class Reader(NamedTuple):
    """A place in a graph that casts a tensor, by the parameter that its state is kept with."""

    parameter: int | str  # its place among the graph's inputs, or its name where the graph holds it
    key: Key


@dataclass
class StateInput:
    """One quantizer of a graph. All its readers share its state."""

    readers: Sequence[Reader]
    site: str  # module path, for messages
    place: int  # which of the graph's quantizers it is
    recorded: bool = False  # whether the graph gives it new scales


@dataclass
class _Found:
    moves: int
    tensors: list[Tensor]
    unseen: list[tuple[str, ScalingState]]  # sites whose state the graph reads and never records, by module path
    said: bool


@dataclass
class StateInputs:
    """All quantizers of a graph, in the order of its state inputs: of each `amax`, `scale` and `history`."""

    fallback: str  # options["fallback"]
    held: Mapping[str, Tensor] = field(default_factory=dict)  # parameters that the graph holds
    examples: list[Tensor] = field(default_factory=list)  # fake tensors, one an input
    quantizers: list[StateInput] = field(default_factory=list)
    agreements: list[str] = field(default_factory=list)  # those without which it does not reduce amaxes over ranks
    _found: TensorGroups[_Found] = field(default_factory=TensorGroups)  # by the parameters
    _said_again: bool = False

    def of(self, inputs: Sequence[Any]) -> list[Tensor]:
        """What a call with these inputs takes besides."""
        if not self.quantizers:
            return []
        if torch._C._current_graph_task_id() >= 0:  # called by a backward
            self._note_checkpoint()
        parameters = [inputs[place] for place in self._places] or list(self.held.values())
        if self.agreements and not isinstance(parameters[0], FakeTensor):
            agreement.settle(self.agreements, self.fallback)
        with LOCK:
            found = self._found_of(parameters, inputs)
        if found.unseen:
            self._note_unseen(found)
        return found.tensors

    def _found_of(self, parameters: Sequence[Tensor], inputs: Sequence[Any]) -> _Found:
        found = self._found.get(parameters)
        if found is None or found.moves != moves():
            take_from_shards()
            states = self._states(inputs)  # which may move some
            tensors = [tensor for one in states for tensor in one.tensors().values()]
            new = [(q, one) for q, one in zip(self.quantizers, states, strict=True) if one.unseen]
            unseen = [(q.site, one) for q, one in new if not q.recorded]
            for q in [q for q, _ in new if q.recorded] if self.fallback != "silent" else ():
                for reader in q.readers:
                    resumed.note_new(self._parameter(reader, inputs), q.site)
            found = _Found(moves(), tensors, unseen, found is not None and found.said)
            self._found.set(parameters, found)
        return found

    def _note_unseen(self, found: _Found) -> None:
        """Once a model; an error at each call."""
        if found.said and self.fallback != "error":
            return
        found.unseen = [(site, state) for site, state in found.unseen if state.unseen]
        if found.unseen:
            found.said = True
            say(without_state(site for site, _ in found.unseen), self.fallback)

    def _note_checkpoint(self) -> None:
        """Say that a checkpoint without reentry runs the graph again. With reentry its first run, without gradients,
        recorded nothing and left the scales as they were."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        again = bool(hooks) and hooks[0].__qualname__.startswith("_recomputation_hook.")
        if again and (self.fallback == "error" or not self._said_again):
            self._said_again = True
            say(COMPUTED_AGAIN, self.fallback)

    @functools.cached_property
    def _places(self) -> list[int]:
        return sorted({place for q in self.quantizers for place, _ in q.readers if isinstance(place, int)})

    @staticmethod
    def scaling(quantizer: StateInput, tensors: Sequence[Tensor]) -> ScalingState:
        """One quantizer's part of what `of` found."""
        return ScalingState(*tensors[3 * quantizer.place : 3 * quantizer.place + 3])

    def _parameter(self, reader: Reader, inputs: Sequence[Any]) -> Tensor:
        place = reader.parameter
        return self.held[place] if isinstance(place, str) else inputs[place]

    def _states(self, inputs: Sequence[Any]) -> list[ScalingState]:
        readers = [[(self._parameter(reader, inputs), reader.key) for reader in q.readers] for q in self.quantizers]
        of_graph: dict[int, set[Key]] = {}
        for parameter, key in itertools.chain(*readers):
            of_graph.setdefault(id(parameter), set()).add(key)
        return [shared_state(group, of_graph) for group in readers]
