"""The op set: fine-grained, functional ops whose graph Inductor can fuse, and the linear layer made of them.

Low-precision copies are stored with the contraction dimension of their GEMM last, padded with zeros (see
`formats.Scope`). "Rowwise" is the copy with x's own layout; "columnwise" is its transpose, cast from x at the same
read. Which GEMM uses which copy::

    fprop  y[M,N]  = x[M,K] wᵀ    x rowwise,  w rowwise
    dgrad  dx[M,K] = dy[M,N] w    dy rowwise, w columnwise
    wgrad  dw[N,K] = dyᵀ x        dy columnwise, x columnwise
"""

from typing import Any

import torch
from torch import Tensor

from te_inductor.compat import constant_type_name
from te_inductor.errors import DoubleBackwardError
from te_inductor.recipes import Gemm, Quantizer, Slots
from te_inductor.runtime import eager

_QUANTIZER, _GEMM, _SLOTS = (constant_type_name(cls) for cls in (Quantizer, Gemm, Slots))

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
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), scale_inv as Scope.scale_shape says: (), (R, 1), ...
    rows, columns = x.shape
    data = x.new_empty((rows, quantizer.padded(columns)), dtype=quantizer.format.dtype)
    return data, x.new_empty(quantizer.granularity.scale_shape(rows, columns), dtype=torch.float32)


def _quantize_rowcol_fake(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (R, pad(C)), scale_inv, data_t (C, pad(R)), scale_inv_t
    return *_quantize_fake(x, quantizer), *_quantize_fake(x.t(), quantizer)


def _dequantize_fake(
    data: Tensor,  # (R, C)
    scale_inv: Tensor,  # of the shape that the quantizer's scope stores
    quantizer: Quantizer,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(data, dtype=dtype, memory_format=torch.contiguous_format)


def _scaled_mm_fake(
    a: Tensor,  # (M, K), low precision
    a_scale_inv: Tensor,  # (), (M, 1), or of the shape that gemm.scopes[0] stores
    b: Tensor,  # (N, K), low precision
    b_scale_inv: Tensor,  # (), (N, 1), or of the shape that gemm.scopes[1] stores
    bias: Tensor | None,  # (N,)
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> Tensor:  # (M, N)
    torch._check(a.shape[1] == b.shape[1], lambda: f"contraction sizes {a.shape[1]} and {b.shape[1]}, expected equal")
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


quantize = _define(f"quantize(Tensor x, {_QUANTIZER} q) -> (Tensor, Tensor)", eager.quantize, _quantize_fake)
quantize_rowcol = _define(
    f"quantize_rowcol(Tensor x, {_QUANTIZER} q) -> (Tensor, Tensor, Tensor, Tensor)",
    eager.quantize_rowcol,
    _quantize_rowcol_fake,
)
dequantize = _define(
    f"dequantize(Tensor data, Tensor scale_inv, {_QUANTIZER} q, ScalarType dtype) -> Tensor",
    eager.dequantize,
    _dequantize_fake,
)
scaled_mm = _define(
    f"scaled_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, {_GEMM} g, ScalarType out_dtype)"
    " -> Tensor",
    eager.scaled_mm,
    _scaled_mm_fake,
)


class _Linear(torch.autograd.Function):
    """The linear layer in low precision; traced, so its body becomes nodes of the forward and backward graphs.

    Saved for backward: the columnwise copies of x and w, one byte an element each, and never a view of an input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots, out_dtype: torch.dtype
    ) -> Tensor:
        x_grad, weight_grad = ctx.needs_input_grad[:2]
        data, scale, data_t, scale_t = _copies(x, slots.input, columnwise=weight_grad)
        w, w_scale, w_t, w_scale_t = _copies(weight, slots.weight, columnwise=x_grad)
        ctx.save_for_backward(data_t, scale_t, w_t, w_scale_t)
        ctx.slots, ctx.dtypes = slots, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return scaled_mm(data, scale, w, w_scale, bias, slots.fprop, out_dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled() and dy.requires_grad:
            raise DoubleBackwardError(
                "a gradient of a low-precision gradient was asked for, expected first-order gradients only; "
                'compile this module with options={"recipe": "none"}'
            )
        x_grad, weight_grad, bias_grad = ctx.needs_input_grad[:3]
        x_t, x_scale, w_t, w_scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        slots, dx, dw, db = ctx.slots, None, None, None
        if x_grad or weight_grad:
            g, g_scale, g_t, g_scale_t = _copies(dy, slots.grad_output, rowwise=x_grad, columnwise=weight_grad)
        if x_grad:
            dx = scaled_mm(g, g_scale, w_t, w_scale, None, slots.dgrad, x_dtype)
        if weight_grad:
            dw = scaled_mm(g_t, g_scale_t, x_t, x_scale, None, slots.wgrad, weight_dtype)
        if bias_grad:
            db = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None


def _copies(x: Tensor, quantizer: Quantizer, *, rowwise: bool = True, columnwise: bool) -> tuple[Any, Any, Any, Any]:
    """The low-precision copies that are asked for: data, scale_inv, data_t, scale_inv_t (None where not)."""
    if rowwise and columnwise:
        return quantize_rowcol(x, quantizer)  # type: ignore[no-any-return]
    if columnwise:
        return None, None, *quantize(x.t(), quantizer)
    return *quantize(x, quantizer), None, None


def _linear(
    x: Tensor,  # (..., K)
    weight: Tensor,  # (N, K)
    bias: Tensor | None,  # (N,)
    slots: Slots,
    out_dtype: torch.dtype,
) -> Tensor:  # (..., N)
    """``x @ weight.T + bias`` with the operands of all three GEMMs in the low precision of `slots`."""
    flat = x.reshape(-1, x.shape[-1])
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        y = _Linear.apply(flat, weight, bias, slots, out_dtype)
    else:
        data, scale = quantize(flat, slots.input)
        w, w_scale = quantize(weight, slots.weight)
        y = scaled_mm(data, scale, w, w_scale, bias, slots.fprop, out_dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


linear = _define(
    f"linear(Tensor x, Tensor weight, Tensor? bias, {_SLOTS} slots, ScalarType out_dtype) -> Tensor", _linear
)
