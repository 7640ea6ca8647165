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
    weight (V, K), and a bias (V,) if there is one. The results are the tokens' losses, (N,) fp32, and the logarithms of
    their sums, if the loss has those. Saved for backward: x, dx and dy of losses whose gradients are 1."""

    loss: Loss = field(kw_only=True)
    groups: ClassVar[int] = 1

    def compute(self, needs: Needs, x: Tensor, token: Tensor | None, *tensors: Any) -> tuple[tuple[Tensor, ...], Any]:
        given, weights, biases, needed = self._wanted(needs, tensors)
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
        losses, sums, dx, dy = scaled_token_losses(
            row.data, row.scale_inv, weight.data, weight.scale_inv, *of_column, bias, *given.groups, self.loss, self.slots,
            self.out_dtype, wants_dy,
        )  # fmt: skip
        if not self.loss.sums:
            return (losses,), (dx, dy, needed, ())
        of_labels = _of_labels(given.groups[0], losses, sums, weights[0], self.loss, needed.x)
        return (losses, sums), (dx, dy, needed, of_labels)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, _, *tensors = inputs
        given, weights, biases = self._parts(tensors)
        [labels], ctx.given = given.groups, replace(given, groups=())
        dx, dy, ctx.needs, of_labels = found
        ctx.save_for_backward(x, _kept(labels, self.loss), dx, dy, *of_labels)
        ctx.bias_dtype, ctx.turned = biases[0].dtype if biases else None, is_turned(weights[0])

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        needed: Needed = ctx.needs
        x, kept, dx, dy, *of_labels = ctx.saved_tensors
        each, at_labels = _of_tokens(grads, kept, of_labels)
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
            if at_labels is not None:
                dws = [None if dw is None else at_labels.add_products(dw, x) for dw in dws]
        dbs = []
        if ctx.bias_dtype is not None:
            dbs = [self._bias_gradient(dy, each, element, at_labels).to(ctx.bias_dtype) if needed.biases else None]
        return _of_x(dx, each, at_labels).to(x.dtype) if needed.x else None, None, None, *dws, *dbs

    def _bias_gradient(self, dy: Tensor, each: Tensor, element: Element, at_labels: "_AtLabels | None") -> Tensor:
        total = (dy[:, : each.shape[0]].float() * each.t()).sum(1) / self.loss.gradient_scale(element)
        total = total if at_labels is None else at_labels.add(total)
        return overflowing_sum(total, self.out_dtype)


@dataclass(frozen=True)
class OutputLoss(Operation):
    """One output layer in high precision. Inputs: x (N, K), labels (N,), the weight (V, K), a bias (V,) or None. The
    results are those of `LossLayers`."""

    loss: Loss
    dtype: torch.dtype  # of the logits

    def compute(self, needs: Needs, x: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, Any]:
        given = x.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        losses, sums, dx, dy = token_losses(*given, labels, self.loss, needs[0], needs[2] or needs[3])
        if not self.loss.sums:
            return (losses,), (given[0], dx, dy, needs, ())
        of_labels = _of_labels(labels, losses, sums, given[1], self.loss, needs[0])
        return (losses, sums), (given[0], dx, dy, needs, of_labels)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, dx, dy, ctx.needs, of_labels = found
        ctx.save_for_backward(x, _kept(inputs[1], self.loss), dx, dy, *of_labels)
        ctx.dtypes = [None if one is None else one.dtype for one in inputs]

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        x, kept, dx, dy, *of_labels = ctx.saved_tensors
        x_dtype, _, weight_dtype, bias_dtype = ctx.dtypes
        each, at_labels = _of_tokens(grads, kept, of_labels)
        dw = torch.mm(dy.t(), (x * each).to(x.dtype)).to(weight_dtype) if ctx.needs[2] else None
        db = (dy.float() * each).sum(0) if ctx.needs[3] else None
        if at_labels is not None:
            dw = None if dw is None else at_labels.add_products(dw, x)
            db = None if db is None else at_labels.add(db)
        dx = _of_x(dx, each, at_labels).to(x_dtype) if ctx.needs[0] else None
        return dx, None, dw, None if db is None else db.to(bias_dtype)


def _kept(labels: Tensor, loss: Loss) -> Tensor | None:
    """The tokens that have a loss, (N,); None where all have. The labels themselves may change before the backward."""
    return None if loss.ignored is None else labels != loss.ignored


@dataclass(frozen=True)
class _AtLabels:
    """The gradients of labels' logits, which dy has not where the loss has its sums."""

    gradients: Tensor  # (N,) fp32
    labels: Tensor  # (N,) int64, words of the vocabulary
    rows: Tensor  # (N, K), the weight's of these words; empty where dx is not wanted

    def add_products(self, dw: Tensor, x: Tensor) -> Tensor:
        """dw (V, K), and the products with x (N, K). Those of one word are added up in fp32 first, as many that are each
        too small to change dw may change it together."""
        words = self.labels.sort().values
        first = torch.searchsorted(words, self.labels)
        totals = torch.zeros_like(x, dtype=torch.float32).index_add(0, first, x * self.gradients[:, None])
        return dw.index_add(0, words, totals.to(dw.dtype))  # at all but the first of a word zeros

    def add(self, db: Tensor) -> Tensor:
        """db (V,) in fp32, and the gradients themselves."""
        return db.index_add(0, self.labels, self.gradients)


def _of_labels(
    labels: Tensor, losses: Tensor, sums: Tensor, weight: Tensor, loss: Loss, wants_dx: bool
) -> tuple[Tensor, ...]:
    """What `_AtLabels` follows from, of a loss with its sums: the derivatives of each loss and of each sum by the label's
    logit, (N,) fp32, labels and rows. A label outside of the vocabulary, at which a GPU does not raise, has NaN at some
    other word."""
    slope: Tensor | float = loss.inner
    if loss.outer is not None:
        slope = loss.inner * (loss.outer - (sums - losses).square() / loss.outer)
    found = [torch.expm1(-losses) * slope, torch.exp(-losses) * slope]
    kept = _kept(labels, loss)
    if kept is not None:
        found = [torch.where(kept, one, 0.0) for one in found]
    words = labels.clamp(0, weight.shape[0] - 1)
    return (*found, words, weight.index_select(0, words if wants_dx else words[:0]))


def _of_tokens(
    grads: Sequence[Tensor], kept: Tensor | None, of_labels: Sequence[Tensor]
) -> tuple[Tensor, _AtLabels | None]:
    """The factors of dx and dy, (N, 1) fp32, and what is at labels. Gradients of losses are zero of tokens that have
    none, whatever a program makes of that."""
    each = grads[0] if kept is None else torch.where(kept, grads[0], 0.0)
    if not of_labels:
        return each[:, None], None
    of_loss, of_sum, words, rows = of_labels
    return (each + grads[1])[:, None], _AtLabels(each * of_loss + grads[1] * of_sum, words, rows)


def _of_x(dx: Tensor, each: Tensor, at_labels: _AtLabels | None) -> Tensor:
    """The gradient of x, of that of losses whose gradients are 1."""
    return dx * each if at_labels is None else dx * each + at_labels.rows * at_labels.gradients[:, None]


def trace_output_loss(
    x: Tensor,  # (N, K)
    weight: Tensor,  # (V, K)
    bias: Tensor | None,  # (V,)
    labels: Tensor,  # (N,) int64
    loss: Loss,
    dtype: torch.dtype,  # of the logits
) -> list[Tensor]:  # each (N,) fp32
    """Cross entropy of each token, in high precision, and the logarithm of its sum, if the loss has those. Of words
    that ranks share x is a DTensor that each has whole, and weight and bias are sharded by words."""
    if loss.shared is not None:
        x, weight, bias = _of_rank(x, weight, bias)
    return list(OutputLoss(loss, dtype)(x, labels, weight, bias))


def _of_rank(x: Any, weight: Any, bias: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a rank has of these; its gradient of x is a part of a sum."""
    from torch.distributed.tensor import Partial, Shard

    rows = [Shard(0)]
    return (
        x.to_local(grad_placements=[Partial()]),
        weight.to_local(grad_placements=rows),
        None if bias is None else bias.to_local(grad_placements=rows),
    )


output_loss = op_of(trace_output_loss, name="output_loss")
