"""The GEMM that makes both copies of a gated activation's gradients: CUTLASS's, which reads gate and up where they
lie."""

from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler

from te_inductor.lowerings.registry import lowering
from te_inductor.templates.cutlass import scaled_mm_ops

_gated_gradient = fallback_handler(scaled_mm_ops.gated_gradient, add_to_fallback_set=False)


@lowering(scaled_mm_ops.gated_gradient)
def gated_gradient(
    a: ir.TensorBox,  # (M, K)
    a_scale: ir.TensorBox,
    b: ir.TensorBox,  # (N, K)
    b_scale: ir.TensorBox,
    gate: ir.TensorBox,  # (M, N), rows contiguous
    up: ir.TensorBox,
    *constants: Any,
) -> Any:
    operands = [ir.ExternKernel.require_contiguous(x) for x in (a, a_scale, b, b_scale)]
    gates = [ir.ExternKernel.require_stride1(ir.ExternKernel.realize_input(x)) for x in (gate, up)]
    return _gated_gradient(*operands, *gates, *constants)
