"""The op set: fine-grained, functional ops whose graph Inductor can fuse, and the linear layer made of them.

Low-precision copies are stored with the contraction dimension of their GEMM last, padded with zeros (see
`formats.Scope`). "Rowwise" is the copy with x's own layout; "columnwise" is its transpose, cast from x at the same
read. Which GEMM uses which copy::

    fprop  y[M,N]  = x[M,K] wᵀ    x rowwise,  w rowwise
    dgrad  dx[M,K] = dy[M,N] w    dy rowwise, w columnwise
    wgrad  dw[N,K] = dyᵀ x        dy columnwise, x columnwise
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor.compat import constant_type_name
from te_inductor.recipes import Gemm, Quantizer, Slots
from te_inductor.recipes.delayed import DelayedScaling, ScaleUpdate
from te_inductor.recipes.formats import FP16_OVERFLOW, HADAMARD, padded
from te_inductor.runtime import deferred_wgrads, delayed, eager
from te_inductor.runtime.activation import Activation
from te_inductor.runtime.microscaling import ALPHA
from te_inductor.runtime.operation import Gradients, Needs, Operation
from te_inductor.runtime.philox import new_seed

_QUANTIZER, _GEMM, _SLOTS, _UPDATE = (constant_type_name(cls) for cls in (Quantizer, Gemm, Slots, ScaleUpdate))

# A module-level reference keeps the registrations alive.
_library = torch.library.Library("te_inductor", "DEF")


def _define(schema: str, implementation: Any, fake: Any = None) -> Any:
    """Define an op; with `fake` it is a primitive of the graph, without it is traced through."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"te_inductor::{name}", fake, lib=_library)
    return getattr(torch.ops.te_inductor, name).default


def _quantize_fake(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: Tensor | None = None,  # () fp32, of the tensor, where scales have two levels
    seed: Tensor | None = None,  # () int64, of stochastic rounding
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), scale_inv as Scope.scale_shape says: (), (R, 1), ...
    rows, columns = x.shape
    scope = quantizer.granularity
    data = x.new_empty((rows, quantizer.stored(columns)), dtype=quantizer.format.dtype)
    return data, x.new_empty(scope.scale_shape(rows, columns), dtype=scope.scale.dtype)


def _quantize_rowcol_fake(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: Tensor | None = None,  # () fp32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (R, pad(C)), scale_inv, data_t (C, pad(R)), scale_inv_t
    return *_quantize_fake(x, quantizer), *_quantize_fake(x.t(), quantizer)


def _hadamard_fake(
    x: Tensor,  # (R, C)
) -> Tensor:  # (R, C padded to 16) bf16
    return x.new_empty((x.shape[0], padded(x.shape[1], HADAMARD)), dtype=torch.bfloat16)


def _tensor_amax_fake(x: Tensor) -> Tensor:  # () fp32
    return x.new_empty((), dtype=torch.float32)


def _quantize_delayed_fake(
    x: Tensor,  # (R, C)
    scale: Tensor,  # ()
    quantizer: Quantizer,
) -> Tensor:  # (R, pad(C))
    return _quantize_fake(x, quantizer)[0]


def _quantize_rowcol_delayed_fake(
    x: Tensor,  # (R, C)
    scale: Tensor,  # ()
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), data_t (C, pad(R))
    return _quantize_fake(x, quantizer)[0], _quantize_fake(x.t(), quantizer)[0]


def _quantize_pieces_fake(
    pieces: list[Tensor],  # matrices that make one (R, C) side by side along dim
    dim: int,
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (R, pad(C)), scale_inv, data_t (C, pad(R)), scale_inv_t
    return _quantize_rowcol_fake(torch.cat(pieces, dim), quantizer)


def _quantize_pieces_delayed_fake(
    pieces: list[Tensor],  # matrices that make one (R, C) side by side along dim
    dim: int,
    scale: Tensor,  # ()
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), data_t (C, pad(R))
    return _quantize_rowcol_delayed_fake(torch.cat(pieces, dim), scale, quantizer)


def _current_scale_fake(
    pieces: list[Tensor],
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # scale (), scale_inv ()
    return tuple(pieces[0].new_empty((), dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def _read_scales_fake(
    scales: list[Tensor],  # n of ()
) -> list[Tensor]:  # n scales, n reciprocals
    return [scale.new_empty(()) for scale in (*scales, *scales)]


def _dequantize_fake(
    data: Tensor,  # (R, C), as stored
    scale_inv: Tensor,  # of the shape that the quantizer's scope stores
    quantizer: Quantizer,
    dtype: torch.dtype,
) -> Tensor:  # (R, C); of two-level scales in units of the tensor's factor
    rows, columns = data.shape
    return data.new_empty((rows, columns * quantizer.format.packed), dtype=dtype)


def _scaled_mm_fake(
    a: Tensor,  # (M, K), low precision
    a_scale_inv: Tensor,  # (), (M, 1), or of the shape that gemm.scopes[0] stores
    b: Tensor,  # (N, K), low precision
    b_scale_inv: Tensor,  # (), (N, 1), or of the shape that gemm.scopes[1] stores
    bias: Tensor | None,  # (N,)
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,  # (), factor of the product, of two-level scales
    added: Tensor | None = None,  # (M, N), of out_dtype
) -> Tensor:  # (M, N)
    torch._check(a.shape[1] == b.shape[1], lambda: f"contraction sizes {a.shape[1]} and {b.shape[1]}, expected equal")
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _quantized_mm_fake(
    a: Tensor,  # as `scaled_mm` has them
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    gemm: Gemm,
    out_dtype: torch.dtype,  # that the product is rounded to
    activation: Activation,
    scale: Tensor,  # (), of the copy
    quantizer: Quantizer,
) -> Tensor:  # (M, pad(N)), the row copy of the activation
    return _quantize_fake(_scaled_mm_fake(a, a_scale_inv, b, b_scale_inv, bias, gemm, out_dtype), quantizer)[0]


quantize = _define(
    f"quantize(Tensor x, {_QUANTIZER} q, Tensor? amax=None, Tensor? seed=None) -> (Tensor, Tensor)",
    eager.quantize,
    _quantize_fake,
)
quantize_rowcol = _define(
    f"quantize_rowcol(Tensor x, {_QUANTIZER} q, Tensor? amax=None) -> (Tensor, Tensor, Tensor, Tensor)",
    eager.quantize_rowcol,
    _quantize_rowcol_fake,
)
quantize_pieces = _define(
    f"quantize_pieces(Tensor[] pieces, int dim, {_QUANTIZER} q) -> (Tensor, Tensor, Tensor, Tensor)",
    eager.quantize_pieces,
    _quantize_pieces_fake,
)
hadamard = _define("hadamard(Tensor x) -> Tensor", eager.hadamard, _hadamard_fake)
tensor_amax = _define("tensor_amax(Tensor x) -> Tensor", eager.tensor_amax, _tensor_amax_fake)
quantize_delayed = _define(
    f"quantize_delayed(Tensor x, Tensor scale, {_QUANTIZER} q) -> Tensor",
    eager.quantize_delayed,
    _quantize_delayed_fake,
)
quantize_rowcol_delayed = _define(
    f"quantize_rowcol_delayed(Tensor x, Tensor scale, {_QUANTIZER} q) -> (Tensor, Tensor)",
    eager.quantize_rowcol_delayed,
    _quantize_rowcol_delayed_fake,
)
current_scale = _define(
    f"current_scale(Tensor[] pieces, {_QUANTIZER} q) -> (Tensor, Tensor)", eager.current_scale, _current_scale_fake
)
quantize_pieces_delayed = _define(
    f"quantize_pieces_delayed(Tensor[] pieces, int dim, Tensor scale, {_QUANTIZER} q) -> (Tensor, Tensor)",
    eager.quantize_pieces_delayed,
    _quantize_pieces_delayed_fake,
)
read_scales = _define("read_scales(Tensor[] scales) -> Tensor[]", delayed.read_scales, _read_scales_fake)
record_amax = _define(
    "record_amax(Tensor[] pieces, Tensor(a!) amax) -> ()", delayed.record_amax, lambda pieces, amax: None
)
accumulate_wgrad = _define(
    "accumulate_wgrad(Tensor(a!)[] totals, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? alpha,"
    f" {_GEMM} g) -> ()",
    eager.accumulate_wgrad,
    lambda totals, a, a_scale, b, b_scale, alpha, gemm: None,
)
defer_wgrad = _define(
    "defer_wgrad(Tensor(a!)[] tickets, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? alpha,"
    f" {_GEMM} g, bool copy=True) -> ()",
    deferred_wgrads.defer_wgrad,
    lambda tickets, a, a_scale, b, b_scale, alpha, gemm, copy=True: None,
)
update_scales = _define(
    f"update_scales(Tensor(a!)[] amaxes, Tensor(b!)[] scales, Tensor(c!)[] histories, {_UPDATE} update, Tensor[]? read=None)"
    " -> ()",
    delayed.update_scales,
    lambda amaxes, scales, histories, update, read=None: None,
)
dequantize = _define(
    f"dequantize(Tensor data, Tensor scale_inv, {_QUANTIZER} q, ScalarType dtype) -> Tensor",
    eager.dequantize,
    _dequantize_fake,
)
scaled_mm = _define(
    f"scaled_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, {_GEMM} g, ScalarType out_dtype,"
    " Tensor? alpha=None, Tensor? added=None) -> Tensor",
    eager.scaled_mm,
    _scaled_mm_fake,
)
quantized_mm = _define(
    f"quantized_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, {_GEMM} g, ScalarType out_dtype,"
    f" {constant_type_name(Activation)} f, Tensor scale, {_QUANTIZER} q) -> Tensor",
    eager.quantized_mm,
    _quantized_mm_fake,
)


@dataclass(frozen=True)
class Copy:
    """One low-precision copy of a matrix, an operand of a GEMM."""

    data: Tensor  # (R, pad(C))
    scale_inv: Tensor
    amax: Tensor | None = None  # (), of what the copy was cast from, where scales have two levels

    @staticmethod
    def saved(copy: "Copy | None") -> tuple[Tensor | None, ...]:
        """What autograd keeps of it; `Copy(*saved)` is it again."""
        return (None, None, None) if copy is None else (copy.data, copy.scale_inv, copy.amax)


@dataclass(frozen=True)
class Known:
    """What delayed scaling knows of a tensor before it sees it: the scale it is cast with, and the reciprocal."""

    scale: Tensor  # ()
    scale_inv: Tensor  # ()


@dataclass(frozen=True)
class Step:
    """What delayed scaling brings to one call: tensors of the step, and where the backward records. In a first step no scale
    is known, and `first` says how each tensor's follows from its own amax: Note [A first step]."""

    input: Known | None = None
    weight: Known | None = None
    grad_output: Known | None = None  # in training, as the rest
    token: Tensor | None = None  # what `delayed_step` returned
    grad_amax: Tensor | None = None  # ()
    first: DelayedScaling | None = None

    def known(self, slot: str, pieces: Sequence[Tensor], quantizer: Quantizer) -> Known | None:
        """What the pieces, which share a scale, are cast with."""
        if self.first is None:
            return getattr(self, slot)  # type: ignore[no-any-return]
        if self.first.scaling_factor_compute_algo is None:
            scale, scale_inv = current_scale(pieces, quantizer)
            headroom = 2.0**self.first.margin
            return Known(scale / headroom, scale_inv * headroom) if self.first.margin else Known(scale, scale_inv)
        amaxes = torch.stack([tensor_amax(piece) for piece in pieces]).amax(0, keepdim=True)
        scale = delayed.scale_of(amaxes, torch.ones_like(amaxes), ScaleUpdate(self.first, quantizer.element)).squeeze(0)
        return Known(scale, scale.reciprocal())


def _weight_copies(
    weights: Sequence[Tensor], quantizer: Quantizer, known: Known | None, kept: Sequence[Tensor], columnwise: bool
) -> tuple[Copy | None, Copy | None]:
    """A weight's copies: those that are kept, and what else is asked for."""
    if not kept:
        return copies(weights, 0, quantizer, known, columnwise=columnwise)
    kept, amax = (kept[:-1], kept[-1]) if quantizer.granularity.two_level else (kept, None)
    row, column = Copy(kept[0], kept[1], amax), Copy(kept[2], kept[3], amax) if len(kept) > 2 else None
    if columnwise and column is None:
        _, column = copies(weights, 0, quantizer, known, rowwise=False, columnwise=True)
    return row, column if columnwise else None


@dataclass(frozen=True)
class Linears(Operation):
    """Linear layers of one input in low precision, one GEMM for all; traced, so its body becomes nodes of the forward and
    backward graphs. Layers whose weights are w₁, w₂, … are one layer whose weight is all of their rows.

    Inputs: x (M, K), the step's token or None, `count` weights (N, K), then their biases (N,) if they have any.
    Saved for backward: the columnwise copies of x and w, one byte an element each; of a compiled graph joint_graph.py says
    which of them the backward casts anew instead.
    """

    slots: Slots
    out_dtype: torch.dtype
    count: int = 1
    step: Step | None = None
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
            step.known(slot, pieces, getattr(slots, slot)) if step else None
            for slot, pieces in (("input", [x]), ("weight", weights))
        )
        x_row, x_col = copies([x], 0, slots.input, known_x, columnwise=weight_grad)
        w_row, w_col = _weight_copies(weights, slots.weight, known_w, self.kept, x_grad)
        y = product(x_row, w_row, _cat(biases) if biases else None, slots.fprop, self.out_dtype)
        ys = y.split([weight.shape[0] for weight in weights], 1) if self.count > 1 else (y,)
        return ys, (x_col, w_col, (x_grad, weight_grad, bias_grad))

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        x, _, *operands = inputs
        weights, biases = operands[: self.count], operands[self.count :]
        x_col, w_col, ctx.needs = found
        ctx.save_for_backward(*Copy.saved(x_col), *Copy.saved(w_col))
        ctx.dtypes = x.dtype, weights[0].dtype, biases[0].dtype if biases else None
        ctx.sizes = [weight.shape[0] for weight in weights]

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
            dws = self._weight_gradients(g_col, x_col, weight_dtype, ctx.sizes)
        dbs: Sequence[Tensor | None] = [] if bias_dtype is None else [None] * len(dys)
        if bias_grad:
            dbs = [_bias_gradient(dy, self.out_dtype).to(bias_dtype) for dy in dys]
        return dx, None, *dws, *dbs

    def _weight_gradients(
        self, g_col: Copy | None, x_col: Copy | None, dtype: torch.dtype, rows: list[int]
    ) -> Sequence[Tensor | None]:
        """What autograd gets of them."""
        gemm = self.slots.wgrad
        if self.tickets:
            defer_wgrad(self.tickets, *_operands(g_col, x_col), gemm)
        elif self.main_grads:
            accumulate_wgrad(self.main_grads, *_operands(g_col, x_col), gemm)
        else:
            # Under fp16 autocast PyTorch makes it in fp16 and widens it: what overflows there has to here.
            narrow = self.out_dtype == torch.float16
            dw = product(g_col, x_col, None, gemm, torch.float16 if narrow else dtype).to(dtype)
            return dw.split(rows) if len(rows) > 1 else [dw]
        return [None] * len(rows)


def _bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:  # (N,) fp32
    """Infinite where fp16 is, if the layer computes in that: Note [Overflow stays visible] in lowerings/values.py."""
    total = dy.sum(0, dtype=torch.float32)
    return torch.where(total.abs() < FP16_OVERFLOW, total, total * torch.inf) if dtype == torch.float16 else total


def product(a: Copy | None, b: Copy | None, bias: Tensor | None, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    *operands, alpha = _operands(a, b)
    return scaled_mm(*operands, bias, gemm, out_dtype, alpha)  # type: ignore[no-any-return]


def _operands(a: Copy | None, b: Copy | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Of a GEMM: both copies with their scales, and the product's factor."""
    assert a is not None and b is not None  # they were asked for
    alpha = None if a.amax is None or b.amax is None else a.amax * b.amax * ALPHA
    return a.data, a.scale_inv, b.data, b.scale_inv, alpha


def copies(
    pieces: Sequence[Tensor],
    dim: int,
    quantizer: Quantizer,
    known: Known | None,
    *,
    rowwise: bool = True,
    columnwise: bool,
) -> tuple[Copy | None, Copy | None]:
    """The low-precision copies that are asked for, rowwise and columnwise. One scale for the whole tensor is known
    beforehand or found here; finer ones belong to each copy."""
    if quantizer.granularity.whole:
        scale, scale_inv = (known.scale, known.scale_inv) if known else current_scale(pieces, quantizer)
        data, data_t = _casts(pieces, dim, scale, quantizer, rowwise, columnwise)
        return Copy(data, scale_inv) if rowwise else None, Copy(data_t, scale_inv) if columnwise else None
    if len(pieces) > 1:  # always both: the lowering writes no copy that nobody reads
        data, scale_inv, data_t, scale_inv_t = quantize_pieces(pieces, dim, quantizer)
        return Copy(data, scale_inv) if rowwise else None, Copy(data_t, scale_inv_t) if columnwise else None
    [x] = pieces
    if rowwise and columnwise and not (quantizer.hadamard or quantizer.stochastic):
        amax = tensor_amax(x) if quantizer.granularity.two_level else None
        data, scale_inv, data_t, scale_inv_t = quantize_rowcol(x, quantizer, amax)
        return Copy(data, scale_inv, amax), Copy(data_t, scale_inv_t, amax)
    row = _copy(x, quantizer) if rowwise else None
    column = _copy(hadamard(x.t()) if quantizer.hadamard else x.t(), quantizer) if columnwise else None
    return row, column


def _copy(x: Tensor, quantizer: Quantizer) -> Copy:
    """One copy, with scales and random bits of its own."""
    amax = tensor_amax(x) if quantizer.granularity.two_level else None
    seed = new_seed(x.device) if quantizer.stochastic else None
    data, scale_inv = quantize(x, quantizer, amax, seed)
    return Copy(data, scale_inv, amax)


def _casts(
    pieces: Sequence[Tensor], dim: int, scale: Tensor, quantizer: Quantizer, rowwise: bool, columnwise: bool
) -> tuple[Any, Any]:
    if len(pieces) > 1:  # both, as above
        return quantize_pieces_delayed(pieces, dim, scale, quantizer)  # type: ignore[no-any-return]
    [x] = pieces
    if rowwise and columnwise:
        return quantize_rowcol_delayed(x, scale, quantizer)  # type: ignore[no-any-return]
    if columnwise:
        return None, quantize_delayed(x.t(), scale, quantizer)
    return quantize_delayed(x, scale, quantizer), None


def trace_linears(
    x: Tensor,  # (..., K)
    weights: Sequence[Tensor],  # each (N, K)
    biases: Sequence[Tensor],  # each (N,); none, or one a weight
    slots: Slots,
    out_dtype: torch.dtype,
    known: Sequence[Tensor] | None = None,  # scale, scale_inv of each slot, all of (); None: computed from the tensors
    token: Tensor | None = None,  # what `delayed_step` returned
    grad_amax: Tensor | None = None,  # (), where the backward records the gradients' amax
    kept: Sequence[Tensor] | None = None,  # the weights' copies, as `Kept.taken` has them
    main_grads: Sequence[Tensor] | None = None,  # each (N, K) fp32: what a weight's gradient is added to
    tickets: Sequence[Tensor] | None = None,  # each () int64: of weights whose gradients wait for `backward_dw`
) -> list[Tensor]:  # each (..., N)
    """``x @ weight.T + bias`` for each weight, the operands of all three GEMMs in the low precision of `slots`. Several
    weights, each with a multiple of 16 rows, share their scale, as their gradients do, and each of their GEMMs is one."""
    pairs = [] if known is None else [Known(*pair) for pair in zip(known[::2], known[1::2], strict=True)]
    step = Step(*pairs, *([token, grad_amax] if len(pairs) > 2 else [])) if pairs else None  # type: ignore[arg-type]
    layers = Linears(slots, out_dtype, len(weights), step, kept or (), main_grads or (), tickets or ())
    return _layers(layers, x, token, weights, biases)


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
    """The same under delayed scaling, in a step in which some quantizer of the graph has no history: each tensor's scale
    follows from its own amax, and kept copies, which have the state's scale, are not read. Note [A first step]."""
    step = Step(token=token, grad_amax=grad_amax, first=recipe)
    layers = Linears(slots, out_dtype, len(weights), step, (), main_grads or (), tickets or ())
    return _layers(layers, x, token, weights, biases)


def _layers(
    layers: Linears, x: Tensor, token: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    ys = layers(x.reshape(-1, x.shape[-1]), token, *weights, *biases)
    return [y.reshape(*x.shape[:-1], y.shape[1]) for y in ys]


def _cat(biases: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(biases)) if len(biases) > 1 else biases[0]


linears = _define(
    f"linears(Tensor x, Tensor[] weights, Tensor[] biases, {_SLOTS} slots, ScalarType out_dtype, Tensor[]? known=None,"
    " Tensor? token=None, Tensor? grad_amax=None, Tensor[]? kept=None, Tensor[]? main_grads=None,"
    " Tensor[]? tickets=None) -> Tensor[]",
    trace_linears,
)
first_linears = _define(
    f"first_linears(Tensor x, Tensor[] weights, Tensor[] biases, {_SLOTS} slots, ScalarType out_dtype,"
    f" {constant_type_name(DelayedScaling)} recipe, Tensor? token=None, Tensor? grad_amax=None, Tensor[]? main_grads=None,"
    " Tensor[]? tickets=None) -> Tensor[]",
    trace_first_linears,
)


class _DelayedStep(torch.autograd.Function):
    """Its backward runs after that of every site that takes its output: there the gradients' scales are updated, once a
    backward."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, state: tuple[list[Tensor], ...], update: ScaleUpdate) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.state, ctx.update = state, update
        return leaf.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:  # type: ignore[override]
        update_scales(*ctx.state, ctx.update)
        return None, None, None


def _delayed_step(
    leaf: Tensor, amaxes: list[Tensor], scales: list[Tensor], histories: list[Tensor], update: ScaleUpdate
) -> Tensor:
    """A token for the sites whose gradients' state this is; `leaf` is any input of the graph that requires a gradient,
    and gets none from here."""
    return _DelayedStep.apply(leaf, (amaxes, scales, histories), update)  # type: ignore[no-any-return]


delayed_step = _define(
    f"delayed_step(Tensor leaf, Tensor[] amaxes, Tensor[] scales, Tensor[] histories, {_UPDATE} update) -> Tensor",
    _delayed_step,
)
