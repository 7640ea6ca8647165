"""Products whose sums are made in one order: Note [One order of sums] in kernels/fixed_order.py."""

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings

from te_inductor import ops
from te_inductor.lowerings.casts.narrowing import narrowed
from te_inductor.lowerings.gemm.partial_sums import called
from te_inductor.lowerings.registry import lowering

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type


@lowering(ops.fixed_mm)
def fixed_mm(
    a: ir.TensorBox,  # (B, M, K)
    b: ir.TensorBox,  # (B, N, K), or (B, K, N) where it is turned
    a_scale: ir.TensorBox | None,  # as the eager kernel has them
    b_scale: ir.TensorBox | None,
    blocked: bool,
    out_dtype: torch.dtype,
    turned: bool = False,
) -> ir.TensorBox:  # (B, M, N)
    """Calls our kernel on CUDA. On a CPU it is a sum over the last of four dimensions, which generated code makes one
    element after the other, where it neither has vectors nor threads (passes/pre_grad/decide/invariance.py)."""
    if a.get_device_or_error().type == "cuda":
        return called(ops.fixed_mm, a, b, a_scale, b_scale, blocked, out_dtype, turned)  # type: ignore[no-any-return]
    for operand in (a, b):  # once: each element is read N times, or M times
        operand.realize()
    b = lowerings[aten.permute](b, [0, 2, 1]) if turned else b
    wide_a, wide_b = (lowerings[convert](x, torch.float32) for x in (a, b))
    products = lowerings[aten.mul](lowerings[aten.unsqueeze](wide_a, 2), lowerings[aten.unsqueeze](wide_b, 1))
    y = lowerings[aten.sum](products, [3])
    if a_scale is not None and b_scale is not None:
        turned = lowerings[aten.permute](b_scale, list(reversed(range(len(b_scale.get_size())))))
        y = lowerings[aten.mul](y, lowerings[aten.mul](a_scale, turned))
    return narrowed(y, out_dtype)
