"""Norms over the last dimension."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.ops.differentiable import Gradients, Needs, Operation

aten = torch.ops.aten


@dataclass(frozen=True)
class LayerNorm(Operation):
    """LayerNorm over the last dimension. Inputs: x (..., N), and gain and bias, each (N,) or None."""

    eps: float = 1e-5

    def compute(
        self, needs: Needs, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, mean, rstd = aten.native_layer_norm(x, x.shape[-1:], gain, bias, self.eps)
        return y, (mean, rstd)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: tuple[Tensor, Tensor]) -> None:
        given = (*inputs, None, None)[:3]
        ctx.count = len(inputs)
        ctx.save_for_backward(*given, *found)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        x, gain, bias, mean, rstd = ctx.saved_tensors
        mask = [*ctx.needs_input_grad[1:], False, False][:3]
        found = aten.native_layer_norm_backward(grads[0], x, x.shape[-1:], mean, rstd, gain, bias, mask)
        return tuple(found[: ctx.count])


@dataclass(frozen=True)
class RMSNorm(Operation):
    """RMSNorm over the last dimension. Inputs: x (..., N), and gain (N,) or None. The backward computes the forward
    once more."""

    eps: float | None = None  # None: that of x's dtype

    def compute(self, needs: Needs, x: Tensor, gain: Tensor | None = None) -> tuple[Tensor, None]:
        return F.rms_norm(x, x.shape[-1:], gain, self.eps), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return _recomputed(lambda x, gain=None: F.rms_norm(x, x.shape[-1:], gain, self.eps), ctx, grads[0])


@dataclass(frozen=True)
class L2Normalization(Operation):
    """``x / sqrt(sum(x**2) + eps)`` over the last dimension, in fp32. The backward computes the forward once more."""

    eps: float = 1e-6

    def compute(self, needs: Needs, x: Tensor) -> tuple[Tensor, None]:
        return self._normalized(x), None

    def _normalized(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        return _recomputed(self._normalized, ctx, grads[0])


def _recomputed(function: Callable[..., Tensor], ctx: Any, dy: Tensor) -> Gradients:
    """The gradients, by autograd, of a function of the saved tensors."""
    needs = ctx.needs_input_grad[1:]  # after the operation's own
    inputs, places = list(ctx.saved_tensors), [place for place, need in enumerate(needs) if need]

    def of_wanted(*wanted: Tensor) -> Tensor:
        for place, x in zip(places, wanted, strict=True):
            inputs[place] = x
        return function(*inputs)

    pull = torch.func.vjp(of_wanted, *(inputs[place] for place in places))[1]
    found = iter(pull(dy))
    return tuple(next(found) if need else None for need in needs)
