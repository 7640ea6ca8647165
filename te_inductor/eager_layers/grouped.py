"""Linear layers of experts in low precision, by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.eager_layers.low_precision import spec_of
from te_inductor.errors import OptionError, RecipeError
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.gemm import operands_of
from te_inductor.ops.layers.experts import ExpertLayers
from te_inductor.ops.layers.parts import GradientSink, WeightGradient
from te_inductor.recipes import Recipe
from te_inductor.runtime.eager import grouped
from te_inductor.runtime.gradients import deferred_wgrads


class WaitingGradients:
    """The weight gradients of one call of a `GroupedLinear` that delays them. The backward leaves what their GEMM
    multiplies here, and `run` multiplies."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.products: list[deferred_wgrads.WaitingProduct] = []

    def __len__(self) -> int:
        return len(self.products)

    @torch.no_grad()
    def run(self) -> int:
        """Add each gradient to its parameter's `main_grad` where there is one, else to its `grad`; returns how many
        grouped GEMMs ran: none before the backward, nor a second time."""
        products, self.products = self.products, []
        for product in products:
            product.run()
        return len(products)


@dataclass(frozen=True, eq=False)
class _Waits(GradientSink):
    """The sink of weight gradients that wait with one call's result."""

    waiting: WaitingGradients

    def take(self, gradient: WeightGradient, tensors: Sequence[Tensor]) -> Sequence[None]:
        *operands, alpha = operands_of(gradient.a, gradient.b, gradient.gemm)
        waiting = self.waiting
        product = deferred_wgrads.product_of(waiting.parameters, operands, gradient.starts, alpha, gradient.gemm)
        if product is not None:
            waiting.products.append(product)
        return [None] * len(gradient.sizes)


class GroupedBias(Operation):
    """``y[m] + bias[g] * scale[m]``, g being the group of row m: TransformerEngine's grouped bias with a scale a row,
    as of a router's weights. Sums in fp32. Inputs: y (M, N), ends (E,) int32, bias (E, N), scales (M,) or (M, 1). Rows
    behind the last group stay as they are."""

    def compute(self, needs: Needs, y: Tensor, ends: Tensor, bias: Tensor, scales: Tensor) -> tuple[Tensor, None]:
        weight = _of_groups(ends, scales)
        added = bias.float()[weight[1]] * weight[0][:, None]
        return (y.float() + added).to(y.dtype), None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        y, ends, bias, scales = inputs
        ctx.save_for_backward(ends, bias, scales)
        ctx.dtype = y.dtype

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        [dy], (ends, bias, scales) = grads, ctx.saved_tensors
        weight, group = _of_groups(ends, scales)
        wide = grouped.mask_rows(dy.float(), ends)
        # A product in place of sums in the order of atomics.
        chosen = (group[None, :] == torch.arange(len(ends), device=dy.device)[:, None]) * weight
        dscales = (wide * bias.float()[group]).sum(1)
        return dy.to(ctx.dtype), None, (chosen @ wide).to(bias.dtype), dscales.view(scales.shape).to(scales.dtype)


def _of_groups(ends: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A scale a row in fp32, 0 behind the last group; and each row's group."""
    flat = scales.reshape(-1).float()
    return grouped.mask_rows(flat[:, None], ends)[:, 0], grouped.group_of_rows(ends, flat.shape[0])


class GroupedLinear:
    """``x[m] @ weight[g].T + bias[g]``, g being the group of row m, the operands of all three grouped GEMMs in the low
    precision of a recipe. Inputs: x (M, K), whose rows stand by group; ends (E,) int32, where each group ends, on x's
    device; weight (E, N, K), or E weights (N, K); bias (E, N), or E biases (N,), or None. Rows behind the last group
    give zeros, and nothing to any gradient. The result has the dtype of x.

    Args:
        scale_bias: the bias is multiplied by a scale a row, `scales` (M,): `GroupedBias`.
        delay_wgrad: the result is (y, `WaitingGradients`): weight gradients are computed when its `run` is called.

    Raises:
        RecipeError: the recipe has state (DelayedScaling), or no low precision, or blocks of several rows for x.
        OptionError: `scales` without `scale_bias` and a bias, or the other way round.
    """

    def __init__(self, recipe: Recipe | str, *, scale_bias: bool = False, delay_wgrad: bool = False) -> None:
        self.spec = spec_of(recipe, "GroupedLinear")
        scopes = [one.granularity for one in (self.spec.slots.input, self.spec.slots.grad_output)]
        if any(scope.blocked and not scope.one_row for scope in scopes):
            raise RecipeError(
                f"recipe {recipe!r} of an eager GroupedLinear has blocks of several rows, expected scales of rows or of"
                " blocks of one row: rows of several experts would share a scale"
            )
        self.scale_bias, self.delay_wgrad = scale_bias, delay_wgrad

    def __call__(
        self,
        x: Tensor,
        ends: Tensor,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | Sequence[Tensor] | None = None,
        scales: Tensor | None = None,
    ) -> Any:
        if (scales is not None) != (self.scale_bias and bias is not None):
            given, wanted = scales is not None, self.scale_bias and bias is not None
            raise OptionError(f"GroupedLinear with scales: {given}, expected {wanted}: scale_bias and a bias have them")
        whole, together = _together(weight), None if bias is None else _together(bias)
        in_gemm = [together] if together is not None and scales is None else []
        waiting = WaitingGradients([weight] if isinstance(weight, Tensor) else weight)
        x = ops.mask_rows(x, ends)
        if self.delay_wgrad:
            layer = ExpertLayers(self.spec, x.dtype, sink=_Waits(waiting))
            [y] = layer(x, None, ends, None, None, whole, *in_gemm)
        elif torch._C._are_functorch_transforms_active():  # an op of a library is out of their reach
            [y] = ExpertLayers(self.spec, x.dtype)(x, None, ends, None, None, whole, *in_gemm)
        else:
            [y] = ops.layers(x, [whole], in_gemm, self.spec, x.dtype, ends=ends)
        y = y if scales is None else GroupedBias()(y, ends, together, scales)
        return (y, waiting) if self.delay_wgrad else y


def _together(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    return tensors if isinstance(tensors, Tensor) else torch.stack(list(tensors))
