"""Inputs that the rewrite appends to a compiled graph. Dynamo, which writes the call, does not know of them: a wrapper
around the compiled graph brings them, found by the parameters that a call has.

There are several kinds: cached copies of weights, what takes weight gradients in autograd's place, delayed scaling's
state. A graph's kinds are one list, in the order of its inputs.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_inductor import compat


class GraphCall:
    """One call of a compiled graph, as the kinds of extra inputs see it, the last of them first."""

    __slots__ = ("behind", "inputs", "is_first_step", "states")

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = inputs  # that Dynamo knows of
        self.states: Sequence[Any] = ()  # of delayed scaling's quantizers
        self.is_first_step = False  # whether some of them have no history
        self.behind: list[Callable[[Any], None]] = []  # run with the graph's outputs


class ExtraInputs:
    """One kind."""

    prefix: ClassVar[str]  # of the placeholders' names, which end in a number
    examples: list[Tensor]  # fake tensors, one an input

    def tensors(self, call: GraphCall) -> Sequence[Tensor]:
        """What a call takes of this kind, in the order of `examples`. May ask of the call what a later kind has left
        there."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """The rewritten graph is not run."""


FIRST_STEP = "te_inductor: first step"  # what profiles call the graph of one, which casts by the tensors' own amaxes


def bind(
    compiled: Callable[..., Any],
    kinds: Sequence[ExtraInputs],
    first: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The compiled graph as Dynamo calls it. `first` runs in its place in a first step under delayed scaling."""
    used = [kind for kind in reversed(kinds) if kind.examples]
    if not used:
        return compiled

    def run(*inputs: Any) -> Any:
        call = GraphCall(inputs)
        found = [kind.tensors(call) for kind in used]
        extra = [*itertools.chain.from_iterable(reversed(found))]
        with compat.saved_as_they_are(extra):
            if call.is_first_step and first is not None:
                with torch.profiler.record_function(FIRST_STEP):
                    outputs = first(*inputs, *extra)
            else:
                outputs = compiled(*inputs, *extra)
        for step in call.behind:
            step(outputs)
        return outputs

    return run


@dataclass(frozen=True)
class Takers:
    """One kind of what takes weight gradients in autograd's place: one a parameter."""

    prefix: str  # of the placeholders' names
    example: Callable[[Tensor], Tensor]  # of a parameter: a tensor like its taker
    of: Callable[[Tensor, bool], Tensor]  # of a parameter, and whether all of its gradient goes there: its taker
    watch: Callable[[Iterable[Tensor]], None] | None = None  # of parameters, run behind a forward


@dataclass
class GradientInputs(ExtraInputs):
    """The gradient inputs of all weights of a graph that have one, in the order of its inputs."""

    takers: Takers
    parameters: list[int] = field(default_factory=list)  # places among the graph's inputs
    whole: list[bool] = field(default_factory=list)  # of each, whether autograd has no part of what the graph computes
    examples: list[Tensor] = field(default_factory=list)  # fake tensors, one an input

    def tensors(self, call: GraphCall) -> list[Tensor]:
        parameters = [call.inputs[place] for place in self.parameters]
        watch = self.takers.watch
        if watch is not None and torch.is_grad_enabled():
            call.behind.append(lambda _: watch(parameters))
        return [self.takers.of(*asked) for asked in zip(parameters, self.whole, strict=True)]

    @property
    def prefix(self) -> str:  # type: ignore[override]
        return self.takers.prefix
