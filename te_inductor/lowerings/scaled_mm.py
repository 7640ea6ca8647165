"""The low-precision GEMM: cuBLASLt or Inductor's Triton choices on CUDA, an exact fp32 GEMM on CPU."""

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings

from te_inductor import ops
from te_inductor.lowerings.registry import lowering
from te_inductor.recipes import Gemm
from te_inductor.recipes.quantizers import padded
from te_inductor.runtime.eager import ROW_SCALED_OUTPUT

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type


@lowering(ops.scaled_mm)
def scaled_mm(
    a: ir.TensorBox,  # (M, K)
    a_scale: ir.TensorBox,  # () or (M, 1)
    b: ir.TensorBox,  # (N, K)
    b_scale: ir.TensorBox,  # () or (N, 1)
    bias: ir.TensorBox | None,
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> ir.TensorBox:
    if a.get_device_or_error().type == "cuda":
        return _cuda(a, a_scale, b, b_scale, bias, gemm, out_dtype)
    # An fp8 value is exact in fp32, so this is the low-precision product up to the order of the fp32 sum.
    y = lowerings[aten.mm](lowerings[convert](a, torch.float32), _transposed(lowerings[convert](b, torch.float32)))
    return _add(_scaled(y, a_scale, b_scale, out_dtype), bias, out_dtype)  # type: ignore[no-any-return]


def _transposed(x):  # type: ignore[no-untyped-def]
    """The transpose of a matrix; a scalar as it is."""
    return lowerings[aten.permute](x, list(reversed(range(len(x.get_size())))))


def _scaled(y, a_scale, b_scale, out_dtype):  # type: ignore[no-untyped-def]
    scales = lowerings[aten.mul](a_scale, _transposed(b_scale))
    return lowerings[convert](lowerings[aten.mul](y, scales), out_dtype)


def _add(y, bias, out_dtype):  # type: ignore[no-untyped-def]
    return y if bias is None else lowerings[aten.add](y, lowerings[convert](bias, out_dtype))


def _cuda(a, a_scale, b, b_scale, bias, gemm, out_dtype):  # type: ignore[no-untyped-def]
    if a_scale.get_size() and out_dtype != ROW_SCALED_OUTPUT:
        one = lowerings[aten.full]([], 1.0, dtype=torch.float32, device=a.get_device())
        y = _cuda(a, one, b, one, None, gemm, torch.float32)
        return _add(_scaled(y, a_scale, b_scale, out_dtype), bias, out_dtype)
    rows = b.get_size()[0]
    missing = padded(rows) - rows
    if missing != 0:  # cuBLASLt wants N % 16 == 0; the pad fuses with the cast that makes b
        b, b_scale = (
            lowerings[aten.constant_pad_nd](x, [0, 0, 0, missing], 0.0) if x.get_size() else x for x in (b, b_scale)
        )
    fused_bias = bias if bias is not None and missing == 0 and bias.get_dtype() == out_dtype == torch.bfloat16 else None
    y = lowerings[aten._scaled_mm.default](
        a,
        _transposed(b),
        a_scale,
        _transposed(b_scale),
        fused_bias,
        out_dtype=out_dtype,
        use_fast_accum=gemm.fast_accum,
    )
    if missing != 0:
        y = lowerings[aten.slice](y, 1, 0, rows)
    return y if fused_bias is not None else _add(y, bias, out_dtype)
