"""Kept copies of weights as inputs of a compiled graph: found by the parameters that a call brings, as the state of delayed
scaling is (`state_inputs.py`), and made to be those of the parameters' values before the graph runs.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_inductor.runtime import kept_weights
from te_inductor.runtime.gradient_inputs import GradientInputs
from te_inductor.runtime.kept_weights import Kept, Look, Spec, kept_of
from te_inductor.runtime.state_inputs import StateInput, StateInputs

Refresh = Callable[[Sequence[Look]], None]


@dataclass
class KeptInput:
    """The copies of one GEMM's weight."""

    parameters: Sequence[int | str]  # places among the graph's inputs, or names where the graph holds them
    spec: Spec
    columns: bool  # whether the graph reads column copies
    state: StateInput | None = None  # under delayed scaling, the weight's quantizer
    records: bool = False  # whether a call records its amax


@dataclass
class _Found:
    parameters: list[weakref.ref[Tensor]]
    kept: list[Kept]
    tensors: list[Tensor]
    refresh: Refresh


@dataclass
class KeptInputs:
    """All kept weights of a graph, in the order of its inputs."""

    refresh_on: Callable[[torch.device], Refresh]
    held: Mapping[str, Tensor] = field(default_factory=dict)  # parameters that the graph holds
    weights: list[KeptInput] = field(default_factory=list)
    examples: list[Tensor] = field(default_factory=list)  # fake tensors, one an input
    _found: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # by the first parameter

    def of(self, inputs: Sequence[Any], states: StateInputs, state: Sequence[Tensor]) -> list[Tensor]:
        """What a call with these inputs takes besides; `state` is what it takes of the quantizers of `states`."""
        if not self.weights:
            return []
        parameters = [[self._parameter(p, inputs) for p in weight.parameters] for weight in self.weights]
        with kept_weights.LOCK:
            found = self._of(parameters)
            looks: dict[Kept, Look] = {}
            for weight, kept, mine in zip(self.weights, found.kept, parameters, strict=True):
                scaling = states.scaling(weight.state, state) if weight.state else None
                scale, amax = (scaling.scale, scaling.amax if weight.records else None) if scaling else (None, None)
                if amax is not None or kept not in looks:  # of a parameter that several sites read there is one look
                    looks[kept] = Look(kept, mine, scale, amax)
            if not isinstance(parameters[0][0], FakeTensor):
                for look in looks.values():
                    look.kept.note(look.weights)
                found.refresh(list(looks.values()))
        return found.tensors

    def _parameter(self, place: int | str, inputs: Sequence[Any]) -> Tensor:
        return self.held[place] if isinstance(place, str) else inputs[place]

    def _of(self, parameters: list[list[Tensor]]) -> _Found:
        flat = [parameter for group in parameters for parameter in group]
        found: _Found | None = self._found.get(flat[0])
        if found is None or any(ref() is not p for ref, p in zip(found.parameters, flat, strict=True)):
            kept = [kept_of(w.spec, group, w.columns) for w, group in zip(self.weights, parameters, strict=True)]
            tensors = [t for one, w in zip(kept, self.weights, strict=True) for t in one.taken(w.columns)]
            found = _Found([weakref.ref(p) for p in flat], kept, tensors, self.refresh_on(flat[0].device))
            self._found[flat[0]] = found
        return found


def bind(
    compiled: Callable[..., Any], kept: KeptInputs, gradients: GradientInputs, states: StateInputs
) -> Callable[..., Any]:
    """The compiled graph as Dynamo calls it, which knows neither of copies, nor of what takes gradients, nor of state."""
    if not (kept.weights or gradients.parameters or states.quantizers):
        return compiled

    def call(*inputs: Any) -> Any:
        state = states.of(inputs)
        return compiled(*inputs, *kept.of(inputs, states, state), *gradients.of(inputs), *state)

    return call
