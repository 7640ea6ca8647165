"""The sink of weight gradients that autograd is to have in another dtype than the weight's, as a parameter's `grad_dtype`
says.

# Note [Gradients that are not rounded]
``weight.grad_dtype = torch.float32`` has autograd cast a bf16 parameter's gradient to fp32. AOTAutograd traces with
tensors that do not have the attribute (torch 2.13 makes them non-leaves, `FunctionalTensor.to_functional`), and autograd
casts each gradient to its input's dtype: what the GEMM has summed in fp32 would be rounded to bf16 first. So the gradient
leaves the graph as that of another input, a carrier, which is fp32 and made of the parameter by an operation whose
gradient it hands on as it is. What autograd does with it, as hooks, sums with other gradients of the parameter and the
cast, then is what `grad_dtype` says, at each backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.layers.parts import GradientSink, WeightGradient
from te_inductor.recipes.constants import constant
from te_inductor.runtime.extra_inputs import Takers


class _Carrier(torch.autograd.Function):
    """An fp32 tensor like a parameter, which nothing reads, and whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:  # type: ignore[override]
        return _nothing(parameter.device).expand(parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


def _example(parameter: Tensor) -> Tensor:
    nothing = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return nothing.expand(parameter.shape).requires_grad_()


CARRIERS = Takers("te_carrier_", _example, lambda parameter, _: _Carrier.apply(parameter))  # type: ignore[no-untyped-call]


@constant
class Unrounded(GradientSink):
    """Autograd, which has the gradients in fp32 by carriers: Note [Gradients that are not rounded]."""

    takers = CARRIERS

    def around(self, layers: Operation, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        carried = _Carried(layers)
        return lambda *inputs: carried(*inputs, *tensors)

    def take(self, gradient: WeightGradient, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return replace(gradient, dtype=torch.float32).laid_out()


@dataclass(frozen=True)
class _Carried(Operation):
    """Layers whose last inputs, a carrier for each weight, have the weights' gradients."""

    layers: Any  # LinearLayers

    def compute(self, needs: Needs, *inputs: Any) -> tuple[Any, Any]:
        count = self.layers.count
        return self.layers.compute(needs[:-count], *inputs[:-count])  # type: ignore[no-any-return]

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        self.layers.setup_context(ctx, inputs[: -self.layers.count], found)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        begin = 2 + self.layers.groups
        found, end = self.layers.backward(ctx, *grads), begin + self.layers.count
        return *found[:begin], *[None] * self.layers.count, *found[end:], *found[begin:end]
