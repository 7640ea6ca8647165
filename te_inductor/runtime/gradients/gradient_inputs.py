"""What takes weight gradients in autograd's place, as inputs of a compiled graph: one a parameter."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from te_inductor.runtime.extra_inputs import ExtraInputs, GraphCall


@dataclass(frozen=True)
class Takers:
    """One kind of them."""

    example: Callable[[Tensor], Tensor]  # of a parameter: a tensor like its taker
    of: Callable[[Tensor, bool], Tensor]  # of a parameter, and whether all of its gradient goes there: its taker
    watch: Callable[[Iterable[Tensor]], None] | None = None  # of parameters, run behind a forward


@dataclass
class GradientInputs(ExtraInputs):
    """The gradient inputs of all weights of a graph that have one, in the order of its inputs."""

    prefix: ClassVar[str] = "te_gradient_"
    takers: Takers
    parameters: list[int] = field(default_factory=list)  # places among the graph's inputs
    whole: list[bool] = field(default_factory=list)  # of each, whether autograd has no part of what the graph computes
    examples: list[Tensor] = field(default_factory=list)  # fake tensors, one an input

    def tensors(self, call: GraphCall) -> list[Tensor]:
        """The same memory with a version counter of the call's own, so that no backward minds that another one, or the
        user, has written there since its forward."""
        parameters = [call.inputs[place] for place in self.parameters]
        watch = self.takers.watch
        if watch is not None and torch.is_grad_enabled():
            call.behind.append(lambda _: watch(parameters))
        return [self.takers.of(*asked).data for asked in zip(parameters, self.whole, strict=True)]
