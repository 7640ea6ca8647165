"""fp32 values as the fp16 or bf16 tensor that a GEMM makes of them."""

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops as prims

from te_inductor.lowerings.casts import pointwise
from te_inductor.recipes.formats import FP16_OVERFLOW

_convert = torch.ops.prims.convert_element_type


def narrowed(y: ir.TensorBox, dtype: torch.dtype) -> ir.TensorBox:
    """`y` in `dtype`. What overflows fp16 is infinite, also where Inductor keeps the fp32 value for the next kernel's
    arithmetic: Note [Overflow stays visible] in values.py."""
    return lowerings[_convert](overflowing(y) if dtype == torch.float16 else y, dtype)  # type: ignore[no-any-return]


def overflowing(y: ir.TensorBox) -> ir.TensorBox:  # fp32
    """`y`, and infinite where fp16 is."""
    load = lowerings[_convert](y, torch.float32).make_loader()

    def inner(index):  # type: ignore[no-untyped-def]
        value = load(index)
        bound = prims.constant(FP16_OVERFLOW, torch.float32)
        infinite = prims.mul(value, prims.constant(float("inf"), torch.float32))
        return prims.where(prims.lt(prims.abs(value), bound), value, infinite)

    return pointwise(y, torch.float32, y.get_size(), inner)
