"""Cached copies of weights as inputs of a compiled graph: found by the parameters that a call brings, as the state of
delayed scaling is (`state_inputs.py`), and made to be those of the parameters' values before the graph runs."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from te_inductor import compat
from te_inductor.diagnostics import say
from te_inductor.runtime.extra_inputs import ExtraInputs, GraphCall
from te_inductor.runtime.state.state_inputs import StateInput
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_weights import CachedWeight, FreshnessCheck, Spec, cached_of
from te_inductor.tensor_tables import TensorGroups

Refresh = Callable[[Sequence[FreshnessCheck]], None]


@dataclass
class CachedInput:
    """The copies of one GEMM's weight."""

    parameters: Sequence[int | str]  # places among the graph's inputs, or names where the graph holds them
    spec: Spec
    columns: bool  # whether the graph reads column copies
    state: StateInput | None = None  # under delayed scaling, the weight's quantizer
    records: bool = False  # whether a call records its amax


@dataclass
class _FoundWeights:
    cached: list[CachedWeight]
    tensors: list[Tensor]
    refresh: "Refreshers"
    again: "Refreshers"  # of backwards, which record no amax: what they remember is something else


class Refreshers:
    """What makes copies anew, on each device that has some."""

    def __init__(
        self, refresh_on: Callable[[torch.device], Refresh], cached: Sequence[CachedWeight], fallback: str
    ) -> None:
        self._on = {device: refresh_on(device) for device in dict.fromkeys(one.digests.device for one in cached)}
        self._fallback = fallback

    def look(self, looks: Sequence[FreshnessCheck]) -> None:
        try:
            for look in looks:
                look.cached.note(look.weights)
            for device in self._on:
                self._refresh(device, [look for look in looks if look.cached.digests.device == device])
        except BaseException:  # somebody's keyboard: copies are half of one weight
            _forget(looks)
            raise

    def _refresh(self, device: torch.device, looks: Sequence[FreshnessCheck]) -> None:
        """Refreshes; by plain torch from then on where a kernel does not compile. Copies are made whole, and an amax
        that was recorded is the same one."""
        try:
            self._on[device](looks)
        except Exception:
            if self._on[device] is cached_weights.refresh:
                raise
            failure = traceback.format_exc(limit=-3)
            _forget(looks)
            self._on[device] = cached_weights.refresh
            cached_weights.refresh(looks)
            say_failed(failure, self._fallback)


def say_failed(failure: str, fallback: str) -> None:
    """Says that kernels of cached weights are not used any more."""
    say(f"te_inductor: weights are cast once by plain torch, because a kernel failed:\n{failure}", fallback)


def _forget(looks: Sequence[FreshnessCheck]) -> None:
    """What their copies were made of."""
    for look in looks:
        look.cached.digests.data.zero_()


@dataclass
class CachedInputs(ExtraInputs):
    """All cached weights of a graph, in the order of its inputs."""

    prefix: ClassVar[str] = "te_cached_"
    refresh_on: Callable[[torch.device], Refresh]
    fallback: str = "warn"  # options["fallback"]
    held: Mapping[str, Tensor] = field(default_factory=dict)  # parameters that the graph holds
    weights: list[CachedInput] = field(default_factory=list)
    examples: list[Tensor] = field(default_factory=list)  # fake tensors, one an input
    _found: TensorGroups[_FoundWeights] = field(default_factory=TensorGroups)  # by the parameters

    def tensors(self, call: GraphCall) -> list[Tensor]:
        """The copies, made to be those of the parameters' values; of a call with a backward, that looks again first."""
        parameters = [[self._parameter(p, call.inputs) for p in weight.parameters] for weight in self.weights]
        with cached_weights.LOCK:
            found = self._of(parameters)
            if isinstance(parameters[0][0], FakeTensor):
                return found.tensors
            looks: dict[CachedWeight, FreshnessCheck] = {}
            for weight, cached, mine in zip(self.weights, found.cached, parameters, strict=True):
                scaling = call.states[weight.state.place] if weight.state else None
                scale, amax = (scaling.scale, scaling.amax if weight.records else None) if scaling else (None, None)
                if amax is not None or cached not in looks:  # of a parameter that several sites read there is one look
                    looks[cached] = FreshnessCheck(cached, mine, scale, amax)
            found.refresh.look(list(looks.values()))
            call.behind.append(CheckAgain(list(looks.values()), found.again).before_backward)
            return found.tensors

    def _parameter(self, place: int | str, inputs: Sequence[Any]) -> Tensor:
        return self.held[place] if isinstance(place, str) else inputs[place]

    def _of(self, parameters: list[list[Tensor]]) -> _FoundWeights:
        flat = [parameter for group in parameters for parameter in group]
        found = self._found.get(flat)
        if found is None:
            cached = [cached_of(w.spec, group, w.columns) for w, group in zip(self.weights, parameters, strict=True)]
            tensors = [t for one, w in zip(cached, self.weights, strict=True) for t in one.taken(w.columns)]
            refreshers = (Refreshers(self.refresh_on, cached, self.fallback) for _ in range(2))
            found = _FoundWeights(cached, tensors, *refreshers)
            self._found.set(flat, found)
        return found


class CheckAgain:
    """What a call's backward does first where another look came behind: `Note [A weight that has not changed]`."""

    def __init__(self, looks: Sequence[FreshnessCheck], refreshers: Refreshers) -> None:
        self._looks = [look._replace(amax=None) for look in looks]
        self._counts = [look.cached.looks for look in looks]
        self._refreshers = refreshers

    def before_backward(self, outputs: Any) -> None:
        """Hooks into the backward of the graph that made these outputs."""
        compat.before_backward(outputs, self.if_another_came)

    def if_another_came(self) -> None:
        with cached_weights.LOCK:
            if [look.cached.looks for look in self._looks] != self._counts:
                self._refreshers.look(self._looks)
