"""Linear layers in low precision, made of the other ops: traced, so that Inductor sees casts and GEMMs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.compat import constant_type_name
from te_inductor.ops.casts import Copy, ScalePair, copies
from te_inductor.ops.definition import define
from te_inductor.ops.delayed import DelayedScales, record_amax
from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.ops.gemm import accumulate_wgrad, defer_wgrad, operands_of, product
from te_inductor.ops.written_out import for_program
from te_inductor.recipes import Gemm, Quantizer, Slots
from te_inductor.recipes.delayed import DelayedScaling
from te_inductor.recipes.formats import FP16_OVERFLOW

_SLOTS = constant_type_name(Slots)


def _weight_copies(
    weights: Sequence[Tensor], quantizer: Quantizer, known: ScalePair | None, kept: Sequence[Tensor], columnwise: bool
) -> tuple[Copy | None, Copy | None]:
    """A weight's copies: those that are kept, or were gathered, and what else is asked for."""
    if isinstance(weights[0], GatheredWeight):
        return weights[0].copies(columnwise)
    if not kept:
        return copies(weights, 0, quantizer, known, columnwise=columnwise)
    kept, amax = (kept[:-1], kept[-1]) if quantizer.granularity.two_level else (kept, None)
    row, column = Copy(kept[0], kept[1], amax), Copy(kept[2], kept[3], amax) if len(kept) > 2 else None
    if columnwise and column is None:
        _, column = copies(weights, 0, quantizer, known, rowwise=False, columnwise=True)
    return row, column if columnwise else None


@dataclass(frozen=True)
class Linears(Operation):
    """Linear layers of one input in low precision, one GEMM for all; traced, so its body becomes nodes of the forward
    and backward graphs. Layers whose weights are w₁, w₂, … are one layer whose weight is all of their rows.

    Inputs: x (M, K), the step's token or None, `count` weights (N, K), then their biases (N,) if they have any. Saved
    for backward: the columnwise copies of x and w, one byte an element each; of a compiled graph recompute.py says
    which of them the backward casts anew instead."""

    slots: Slots
    out_dtype: torch.dtype
    count: int = 1
    step: DelayedScales | None = None
    kept: Sequence[Tensor] = ()
    main_grads: Sequence[Tensor] = ()  # fp32 totals, one a weight, that take the weights' gradients
    tickets: Sequence[Tensor] = ()  # of the weights, one each, whose gradients wait

    def compute(
        self, needs: Needs, x: Tensor, token: Tensor | None, *operands: Tensor
    ) -> tuple[tuple[Tensor, ...], Any]:
        weights, biases = operands[: self.count], operands[self.count :]
        # Of the layers of one call all want a gradient or none does.
        wanted = needs[-len(operands) :]
        x_grad, weight_grad, bias_grad = needs[0], any(wanted[: self.count]), any(wanted[self.count :])
        slots, step = self.slots, self.step
        known_x, known_w = (
            step.known(slot, pieces, getattr(slots, slot))
            if step and not isinstance(pieces[0], GatheredWeight)
            else None
            for slot, pieces in (("input", [x]), ("weight", weights))
        )
        x_row, x_col = copies([x], 0, slots.input, known_x, columnwise=weight_grad)
        w_row, w_col = _weight_copies(weights, slots.weight, known_w, self.kept, x_grad)
        y = product(x_row, w_row, _cat(biases) if biases else None, slots.fprop, self.out_dtype)
        ys = y.split([weight.shape[0] for weight in weights], 1) if self.count > 1 else (y,)
        return ys, (x_col, [w_col], (x_grad, weight_grad, bias_grad))

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        save_copies(ctx, self.count, inputs, found)

    def backward(self, ctx: Any, *dys: Tensor) -> Gradients:
        x_grad, weight_grad, bias_grad = ctx.needs
        saved = ctx.saved_tensors  # once: each access unpacks them
        x_col, w_col = Copy(*saved[:3]), Copy(*saved[3:])
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        # Of this step alone, or mutable: what it holds is not for autograd's check that nothing saved has changed.
        slots, step, dx = self.slots, self.step, None
        dws: Sequence[Tensor | None] = [None] * len(dys)
        if x_grad or weight_grad:
            known = step.known("grad_output", dys, slots.grad_output) if step else None
            g_row, g_col = copies(dys, 1, slots.grad_output, known, rowwise=x_grad, columnwise=weight_grad)
            if step is not None:
                record_amax(dys, step.grad_amax)
        if x_grad:
            dx = product(g_row, w_col, None, slots.dgrad, self.out_dtype).to(x_dtype)  # under autocast x is wider
        if weight_grad:
            dws = self._weight_gradients(ctx, g_col, x_col, weight_dtype)
        dbs: Sequence[Tensor | None] = [] if bias_dtype is None else [None] * len(dys)
        if bias_grad:
            dbs = [bias_gradient(dy, self.out_dtype).to(bias_dtype) for dy in dys]
        return dx, None, *dws, *dbs

    def _weight_gradients(
        self, ctx: Any, g_col: Copy | None, x_col: Copy | None, dtype: torch.dtype
    ) -> Sequence[Tensor | None]:
        """What autograd gets of them."""
        gemm = self.slots.wgrad
        if self.tickets:
            defer_wgrad(self.tickets, *operands_of(g_col, x_col, gemm), gemm)
        elif self.main_grads:
            accumulate_wgrad(self.main_grads, *operands_of(g_col, x_col, gemm), gemm)
        else:
            # Under fp16 autocast PyTorch makes it in fp16 and widens it: what overflows there has to here.
            made = torch.float16 if self.out_dtype == torch.float16 else dtype
            return laid_out_gradients(partial(wgrad, made=made, dtype=dtype), g_col, x_col, gemm, ctx.sizes, ctx.turned)
        return [None] * len(ctx.sizes)


def save_copies(ctx: Any, count: int, inputs: tuple[Any, ...], found: Any) -> None:
    """What a backward of `count` layers of one input needs of the forward."""
    x, _, *operands = inputs
    weights, biases = operands[:count], operands[count:]
    x_col, w_cols, ctx.needs = found
    ctx.save_for_backward(*Copy.saved(x_col), *(part for w_col in w_cols for part in Copy.saved(w_col)))
    ctx.dtypes = x.dtype, weights[0].dtype, biases[0].dtype if biases else None
    ctx.sizes, ctx.turned = [weight.shape[0] for weight in weights], all(map(is_turned, weights))


def wgrad(a: Copy, b: Copy, gemm: Gemm, made: torch.dtype, dtype: torch.dtype) -> Tensor:
    """A weight's gradient, which the GEMM makes in one dtype and autograd gets in another."""
    return product(a, b, None, gemm, made).to(dtype)


def is_turned(weight: Tensor) -> bool:
    """Whether a weight (N, K), or (E, N, K), lies in memory as (K, N), as the view of a parameter that is written so."""
    *experts, n, k = weight.shape
    return min(n, k) > 1 and weight.stride() == (*(n * k for _ in experts), 1, n)


def laid_out_gradients(
    multiply: Callable[[Copy, Copy, Gemm], Tensor],
    g_col: Copy | None,
    x_col: Copy | None,
    gemm: Gemm,
    sizes: Sequence[int],  # rows of each weight
    turned: bool,
) -> Sequence[Tensor]:
    """The gradients of weights that are one layer, each laid out as its weight, as what is laid out otherwise autograd
    copies. A weight that is `turned` has a GEMM of its own, whose operands are in the other order."""
    assert g_col is not None and x_col is not None  # they were asked for
    if not (turned and gemm.transposes):
        dw = multiply(g_col, x_col, gemm)
        return dw.split(list(sizes), -2) if len(sizes) > 1 else [dw]
    pieces = g_col.split(sizes) if len(sizes) > 1 else [g_col]
    return [multiply(x_col, piece, gemm.transposed).mT for piece in pieces]


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:  # (N,) fp32
    return overflowing_sum(dy.sum(0, dtype=torch.float32), dtype)


def overflowing_sum(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinite where fp16 is, if the layer computes in that: Note [Overflow stays visible] in
    lowerings/casts/values.py."""
    return torch.where(total.abs() < FP16_OVERFLOW, total, total * torch.inf) if dtype == torch.float16 else total


def trace_linears(
    x: Tensor,  # (..., K)
    weights: Sequence[Tensor],  # each (N, K)
    biases: Sequence[Tensor],  # each (N,); none, or one a weight
    slots: Slots,
    out_dtype: torch.dtype,
    # scale, scale_inv of each slot, all of (), but not of a gathered weight; None: computed from the tensors
    known: Sequence[Tensor] | None = None,
    token: Tensor | None = None,  # what `delayed_step` returned
    grad_amax: Tensor | None = None,  # (), where the backward records the gradients' amax
    kept: Sequence[Tensor] | None = None,  # the weights' copies, as `CachedWeight.taken` has them
    main_grads: Sequence[Tensor] | None = None,  # each (N, K) fp32: what a weight's gradient is added to
    tickets: Sequence[Tensor] | None = None,  # each () int64: of weights whose gradients wait for `backward_dw`
) -> list[Tensor]:  # each (..., N)
    """``x @ weight.T + bias`` for each weight, the operands of all three GEMMs in the low precision of `slots`. Several
    weights, each with a multiple of 16 rows, share their scale, as their gradients do, and each of their GEMMs is
    one."""
    step = step_of(weights, known, token, grad_amax)
    layers = Linears(slots, out_dtype, len(weights), step, kept or (), main_grads or (), tickets or ())
    return _layers(layers, x, token, weights, biases)


def step_of(
    weights: Sequence[Tensor], known: Sequence[Tensor] | None, token: Tensor | None, grad_amax: Tensor | None
) -> DelayedScales | None:
    """The scales of delayed scaling that `linears` is given; None without. A weight that was gathered in low precision
    has its own."""
    if not known:
        return None
    pairs: list[ScalePair | None] = [ScalePair(*pair) for pair in zip(known[::2], known[1::2], strict=True)]
    if isinstance(compat.shard_of(weights[0]), GatheredWeight):
        pairs.insert(1, None)
    return DelayedScales(*pairs, *([token, grad_amax] if len(pairs) > 2 else []))  # type: ignore[arg-type]


def trace_first_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    slots: Slots,
    out_dtype: torch.dtype,
    recipe: DelayedScaling,
    token: Tensor | None = None,
    grad_amax: Tensor | None = None,
    main_grads: Sequence[Tensor] | None = None,
    tickets: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """The same under delayed scaling, in a step in which some quantizer of the graph has no history: each tensor's
    scale follows from its own amax, and kept copies, which have the state's scale, are not read. Note [A first
    step]."""
    step = DelayedScales(token=token, grad_amax=grad_amax, first=recipe)
    layers = Linears(slots, out_dtype, len(weights), step, (), main_grads or (), tickets or ())
    return _layers(layers, x, token, weights, biases)


def _layers(
    layers: Linears, x: Tensor, token: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    ys = layers(x.reshape(-1, x.shape[-1]), token, *weights, *biases)
    return [y.reshape(*x.shape[:-1], y.shape[1]) for y in ys]


def _cat(biases: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(biases)) if len(biases) > 1 else biases[0]


linears = define(
    f"linears(Tensor x, Tensor[] weights, Tensor[] biases, {_SLOTS} slots, ScalarType out_dtype, Tensor[]? known=None,"
    " Tensor? token=None, Tensor? grad_amax=None, Tensor[]? kept=None, Tensor[]? main_grads=None,"
    " Tensor[]? tickets=None) -> Tensor[]",
    trace_linears,
)
first_linears = define(
    f"first_linears(Tensor x, Tensor[] weights, Tensor[] biases, {_SLOTS} slots, ScalarType out_dtype,"
    f" {constant_type_name(DelayedScaling)} recipe, Tensor? token=None, Tensor? grad_amax=None, Tensor[]?"
    " main_grads=None, Tensor[]? tickets=None) -> Tensor[]",
    trace_first_linears,
)


def _exported_linears(
    x: Tensor,  # (..., K)
    weights: Sequence[Tensor],  # each (N, K)
    biases: Sequence[Tensor],  # each (N,); none, or one a weight
    slots: str,  # as Slots.to_text writes them
    out_dtype: torch.dtype,
) -> list[Tensor]:  # each (..., N)
    """`linears` as a saved program can hold it."""
    with for_program(exported_linears):
        return trace_linears(x, weights, biases, Slots.from_text(slots), out_dtype)


exported_linears = define(
    "exported_linears(Tensor x, Tensor[] weights, Tensor[] biases, str slots, ScalarType out_dtype) -> Tensor[]",
    _exported_linears,
)
