"""The low-precision GEMM: cuBLASLt or Inductor's Triton choices on CUDA, an exact fp32 GEMM on CPU."""

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings

from te_inductor import ops
from te_inductor.lowerings.registry import lowering
from te_inductor.recipes import Gemm
from te_inductor.recipes.quantizers import padded

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type


@lowering(ops.scaled_mm)
def scaled_mm(
    a: ir.TensorBox,  # (M, K)
    a_scale: ir.TensorBox,
    b: ir.TensorBox,  # (N, K)
    b_scale: ir.TensorBox,
    bias: ir.TensorBox | None,
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> ir.TensorBox:
    if a.get_device_or_error().type == "cuda":
        return _cuda(a, a_scale, b, b_scale, bias, gemm, out_dtype)
    # An fp8 value is exact in fp32, so this is the low-precision product up to the order of the fp32 sum.
    b_t = lowerings[aten.permute](lowerings[convert](b, torch.float32), [1, 0])
    y = lowerings[aten.mm](lowerings[convert](a, torch.float32), b_t)
    y = lowerings[convert](lowerings[aten.mul](y, lowerings[aten.mul](a_scale, b_scale)), out_dtype)
    return y if bias is None else lowerings[aten.add](y, lowerings[convert](bias, out_dtype))  # type: ignore[no-any-return]


def _cuda(a, a_scale, b, b_scale, bias, gemm, out_dtype):  # type: ignore[no-untyped-def]
    rows = b.get_size()[0]
    missing = padded(rows) - rows
    if missing != 0:  # cuBLASLt wants N % 16 == 0; the pad fuses with the cast that makes b
        b = lowerings[aten.constant_pad_nd](b, [0, 0, 0, missing], 0.0)
    fused_bias = bias if bias is not None and missing == 0 and bias.get_dtype() == out_dtype == torch.bfloat16 else None
    y = lowerings[aten._scaled_mm.default](
        a,
        lowerings[aten.permute](b, [1, 0]),
        a_scale,
        b_scale,
        fused_bias,
        out_dtype=out_dtype,
        use_fast_accum=gemm.fast_accum,
    )
    if missing != 0:
        y = lowerings[aten.slice](y, 1, 0, rows)
    if bias is not None and fused_bias is None:
        y = lowerings[aten.add](y, lowerings[convert](bias, out_dtype))
    return y
