"""What a kernel computes of a single value: its magnitude, and its cast to FP8. Scales are those of
`numerics/arithmetic.py`. The cast is written here and, of tensors, in `runtime/eager/dense.py`: which steps saturate depends
on the device, and what fp16 would have overflowed is known of a stored tensor.

# Note [Overflow stays visible]
An infinity or a NaN in an operand makes the same outputs and gradients non-finite as in high precision, so that
GradScaler skips the step and whoever watches for NaN sees it. So a cast saturates finite values alone and makes NaN of
an infinity: ``x * scale + x * 0``, a product and an fma, whose second term is NaN where x is infinite and zero
elsewhere. It looks at x and not at the product, which a scale of an earlier step may lift beyond fp32: that saturates.

Inductor computes an fp16 tensor that it does not store in fp32, where nothing overflows at 65520. What is cast from an
fp16 tensor, or becomes one, is therefore compared with that bound, as if it had been stored. E2M1 has no NaN: there the
amax of the tensor, a factor of the product, is infinite or NaN."""

# mypy: disable-error-code="no-untyped-def"

import math

import torch
from torch._inductor.virtualized import ops as prims

from te_inductor.lowerings.casts.algebra import INDUCTOR
from te_inductor.numerics import arithmetic
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import FP16_OVERFLOW


def magnitude(value):
    """The fp32 bit pattern without the sign, int32: infinity is above every number and NaN above infinity.

    Its maximum is the amax's bit pattern. Inductor fuses the amax of rows and of blocks with their cast, so that one
    kernel may hold both it and a transposed fp8 store. With a float max that would be Triton issue 11111 on torch 2.15.
    """
    return arithmetic.magnitude(INDUCTOR, value)


def cast(value, scale, quantizer: Quantizer, device: torch.device, dtype: torch.dtype):
    """Casts a value of a tensor of `dtype` to the element, saturating; an infinity becomes NaN, as NaN stays: Note
    [Overflow stays visible]. On CUDA the conversion itself saturates: PTX's cvt.rn.satfinite, which Triton emits from
    compute capability 8.9 on, where our sites begin. Elsewhere by comparisons, which NaN passes."""
    value = prims.to_dtype(value, torch.float32)
    if dtype == torch.float16 or device.type != "cuda":
        bound = INDUCTOR.fp32(FP16_OVERFLOW if dtype == torch.float16 else math.inf)
        value = prims.where(prims.lt(prims.abs(value), bound), value, INDUCTOR.fp32(math.nan))
        value = prims.mul(value, scale)
    else:
        value = prims.add(prims.mul(value, scale), prims.mul(value, INDUCTOR.fp32(0.0)))
    if device.type != "cuda":
        high = INDUCTOR.fp32(quantizer.format.max)
        low = INDUCTOR.fp32(-quantizer.format.max)
        value = prims.where(prims.gt(value, high), high, value)
        value = prims.where(prims.lt(value, low), low, value)
    return prims.to_dtype(value, quantizer.format.dtype)


def largest(values):
    """The largest of int32 values, by comparison, as no max but the reduction's own shall stand beside an fp8 store."""
    first, *rest = values
    for value in rest:
        first = prims.where(prims.gt(value, first), value, first)
    return first
