"""What takes weight gradients in autograd's place, as inputs of a compiled graph: one a parameter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Takers:
    """One kind of them."""

    name: str  # the argument of `te_inductor.linears`
    example: Callable[[Tensor], Tensor]  # of a parameter: a tensor like its taker
    of: Callable[[Tensor], Tensor]  # of a parameter: its taker


@dataclass
class GradientInputs:
    """Of all weights of a graph that have one, in the order of its inputs."""

    takers: Takers | None = None  # None: gradients go to autograd
    parameters: list[int] = field(default_factory=list)  # places among the graph's inputs
    examples: list[Tensor] = field(default_factory=list)  # fake tensors, one an input

    def of(self, inputs: Sequence[Any]) -> list[Tensor]:
        """What a call with these inputs takes besides: the same memory with a version counter of the call's own, so
        that no backward minds that another one, or the user, has written there since its forward."""
        return [self.takers.of(inputs[place]).data for place in self.parameters] if self.takers else []
