"""What is computed of each number between a GEMM and the cast behind it, as data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_inductor.recipes.constants import Constant, constant

aten = torch.ops.aten
# What a step may be: on tensors. Lowerings lower them, templates/cutlass/epilogues.py has the same of one number.
OPS = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "neg": aten.neg.default,
    "relu": aten.relu.default,
    "erf": aten.erf.default,
    "tanh": aten.tanh.default,
    "sigmoid": aten.sigmoid.default,
}
# The name of one of OPS, and its operands: an int is an earlier value, 0 what comes in and n the result of step n; a
# float is a number.
PointwiseStep = tuple[str | int | float, ...]


@constant
class Activation(Constant):
    """A function of one fp32 number, the last step's result; without steps the number itself."""

    steps: tuple[PointwiseStep, ...] = ()

    def of(self, x: Tensor) -> Tensor:
        """Computes it in fp32, nothing rounded between two steps, as generated code does."""
        return evaluate(self.steps, x.float(), OPS)  # type: ignore[no-any-return]


@constant
class Gating(Constant):
    """Two functions of three fp32 numbers: the gradients of a gated activation's inputs, ``act(gate) * up``, of that of
    its output (value 0), of gate and of up (1 and 2); the first step's result is value 3."""

    steps: tuple[PointwiseStep, ...]
    results: tuple[int, int]  # which values they are

    def of(self, *given: Tensor) -> list[Tensor]:
        """Computes the results in fp32, as above."""
        values = values_of(self.steps, [x.float() for x in given], OPS)
        return [values[result] for result in self.results]


def evaluate(steps: tuple[PointwiseStep, ...], x: Any, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """`steps` on whatever `functions` compute with."""
    return values_of(steps, [x], functions)[-1]


def values_of(
    steps: tuple[PointwiseStep, ...], given: Sequence[Any], functions: Mapping[str, Callable[..., Any]]
) -> list[Any]:
    """What is given, and the result of each step."""
    values = list(given)
    for name, *operands in steps:
        found = [values[operand] if isinstance(operand, int) else operand for operand in operands]
        values.append(functions[str(name)](*found))
    return values
