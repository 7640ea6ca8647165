"""Output layers whose logits nothing reads but a loss: Note [Loss of chunks] in runtime/eager/losses.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_inductor.ops.casts import Copy, copies
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.layers.dense import DenseLayers
from te_inductor.ops.layers.layer import Needed, Opened, overflowing_sum
from te_inductor.ops.layers.parts import WeightGradient, is_turned
from te_inductor.ops.losses import scaled_token_losses, token_losses
from te_inductor.recipes.formats import Element
from te_inductor.recipes.losses import Loss, column_quantizers
from te_inductor.runtime.definition import op_of


@dataclass(frozen=True)
class LossLayers(DenseLayers):
    """One output layer in low precision. Inputs: x (N, K), no token, since the scale of dy is known; labels (N,), the
    weight (V, K), and a bias (V,) if there is one. The result are the tokens' losses, (N,) fp32. Saved for backward: x,
    dx and dy of losses whose gradients are 1."""

    loss: Loss = field(kw_only=True)
    groups: ClassVar[int] = 1

    def compute(self, needs: Needs, x: Tensor, token: Tensor | None, *tensors: Any) -> tuple[tuple[Tensor, ...], Any]:
        given, weights, biases = self._parts(tensors)
        wanted = needs[-len(weights) - len(biases) :]
        needed = Needed(needs[0], any(wanted[:1]), any(wanted[1:]))
        row, _, _ = self._copies([x], "input", self.input, True, False)
        _, of_weight = column_quantizers(self.slots)
        at_once = needed.x and of_weight == self.slots.weight
        [weight], saved = self.cast_weights(weights, at_once)
        column = Copy(*saved) if at_once else None
        if needed.x and not at_once:
            column = copies(weights, 0, of_weight, None, rowwise=False, columnwise=True)[1]
        assert row is not None  # it was asked for
        of_column = (None, None) if column is None else (column.data, column.scale_inv)
        bias = biases[0] if biases else None
        wants_dy = needed.weights or needed.biases
        losses, dx, dy = scaled_token_losses(
            row.data, row.scale_inv, weight.data, weight.scale_inv, *of_column, bias, *given.groups, self.loss, self.slots,
            self.out_dtype, wants_dy,
        )  # fmt: skip
        return (losses,), (dx, dy, needed)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, _, *tensors = inputs
        given, weights, biases = self._parts(tensors)
        [labels], ctx.given = given.groups, replace(given, groups=())
        dx, dy, ctx.needs = found
        ctx.save_for_backward(x, _kept(labels, self.loss), dx, dy)
        ctx.bias_dtype, ctx.turned = biases[0].dtype if biases else None, is_turned(weights[0])

    def backward(self, ctx: Any, *dlosses: Tensor) -> Gradients:
        needed: Needed = ctx.needs
        x, kept, dx, dy = ctx.saved_tensors
        each = _of_tokens(dlosses[0], kept)
        element = self.slots.grad_output.format
        dws: Sequence[Tensor | None] = [None]
        if needed.weights:
            of_x, _ = column_quantizers(self.slots)
            column = copies([x * each], 0, of_x, None, rowwise=False, columnwise=True)[1]
            assert column is not None  # it was asked for
            scale_inv = torch.full((), 1 / self.loss.gradient_scale(element), dtype=torch.float32, device=dy.device)
            gradient = WeightGradient(
                Copy(dy, scale_inv),
                column,
                self.slots.wgrad,
                None,
                partial(self.multiply_wgrad, Opened(ctx.given, [], None)),
                ctx.given.sizes,
                ctx.turned,
            )
            dws = (self.sink or self.spec.sink).take(gradient, self.takers)
        dbs = []
        if ctx.bias_dtype is not None:
            dbs = [self._bias_gradient(dy, each, element).to(ctx.bias_dtype) if needed.biases else None]
        return (dx * each).to(x.dtype) if needed.x else None, None, None, *dws, *dbs

    def _bias_gradient(self, dy: Tensor, each: Tensor, element: Element) -> Tensor:
        total = (dy[:, : each.shape[0]].float() * each.t()).sum(1) / self.loss.gradient_scale(element)
        return overflowing_sum(total, self.out_dtype)


@dataclass(frozen=True)
class OutputLoss(Operation):
    """One output layer in high precision. Inputs: x (N, K), labels (N,), the weight (V, K), a bias (V,) or None. The
    result are the tokens' losses, (N,) fp32."""

    loss: Loss
    dtype: torch.dtype  # of the logits

    def compute(self, needs: Needs, x: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, Any]:
        given = x.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        losses, dx, dy = token_losses(*given, labels, self.loss, needs[0], needs[2] or needs[3])
        return losses, (given[0], dx, dy, needs)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, dx, dy, ctx.needs = found
        ctx.save_for_backward(x, _kept(inputs[1], self.loss), dx, dy)
        ctx.dtypes = [None if one is None else one.dtype for one in inputs]

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        x, kept, dx, dy = ctx.saved_tensors
        x_dtype, _, weight_dtype, bias_dtype = ctx.dtypes
        each = _of_tokens(grads[0], kept)
        return (
            (dx * each).to(x_dtype) if ctx.needs[0] else None,
            None,
            torch.mm(dy.t(), (x * each).to(x.dtype)).to(weight_dtype) if ctx.needs[2] else None,
            (dy.float() * each).sum(0).to(bias_dtype) if ctx.needs[3] else None,
        )


def _kept(labels: Tensor, loss: Loss) -> Tensor | None:
    """The tokens that have a loss, (N,); None where all have. The labels themselves may change before the backward."""
    return None if loss.ignored is None else labels != loss.ignored


def _of_tokens(dlosses: Tensor, kept: Tensor | None) -> Tensor:
    """The gradients of the losses, (N, 1) fp32; zero of tokens that have none, whatever a program makes of that."""
    found = dlosses if kept is None else torch.where(kept, dlosses, 0.0)
    return found[:, None]


def trace_output_loss(
    x: Tensor,  # (N, K)
    weight: Tensor,  # (V, K)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    loss: Loss,
    dtype: torch.dtype,  # of the logits
) -> Tensor:  # (N,) fp32
    """Cross entropy of each token, in high precision."""
    return OutputLoss(loss, dtype)(x, labels, weight, bias)  # type: ignore[no-any-return]


output_loss = op_of(trace_output_loss, name="output_loss")
