"""The arithmetic of quantization on single values of Inductor IR. Mirrors `runtime/eager.py`."""

# mypy: disable-error-code="no-untyped-def"

import torch
from torch._inductor.virtualized import ops as prims

from te_inductor.recipes import Quantizer
from te_inductor.runtime.eager import EXPONENT_MASK


def magnitude(value):
    """The fp32 bit pattern without the sign, int32: infinity is above every number and NaN above infinity.

    Its maximum is the amax's bit pattern. Inductor fuses the amax of rows and of blocks with their cast, so that one kernel
    may hold both it and a transposed fp8 store. With a float max that would be Triton issue 11111 on torch 2.15.
    """
    bits = prims.to_dtype_bitcast(prims.to_dtype(value, torch.float32), torch.int32, torch.float32)
    return prims.bitwise_and(bits, prims.constant(0x7FFFFFFF, torch.int32))


def from_bits(bits):
    return prims.to_dtype_bitcast(bits, torch.float32, torch.int32)


def encode_scale(amax, quantizer: Quantizer, dtype: torch.dtype):
    """The fp32 factor of what has this amax, in a tensor of `dtype`."""
    epsilon, one = prims.constant(quantizer.amax_epsilon, torch.float32), prims.constant(1.0, torch.float32)
    infinity = prims.constant(float("inf"), torch.float32)
    amax = prims.where(prims.lt(amax, epsilon), epsilon, amax)
    usable = prims.and_(prims.gt(amax, prims.constant(0.0, torch.float32)), prims.lt(amax, infinity))
    encoded = divide(prims.constant(quantizer.format.max, torch.float64), amax)
    largest = prims.constant(quantizer.largest_scale(dtype), torch.float32)
    encoded = prims.where(prims.lt(encoded, infinity), encoded, largest)
    if quantizer.power_2_scale:
        bits = prims.to_dtype_bitcast(encoded, torch.int32, torch.float32)
        encoded = from_bits(prims.bitwise_and(bits, prims.constant(EXPONENT_MASK, torch.int32)))
    return prims.where(usable, encoded, one)


def decode_scale(scale):
    return divide(prims.constant(1.0, torch.float64), scale)


def divide(numerator, denominator):
    """IEEE fp32 division on every device. Triton's own fp32 division may be off by 2 ulp; the double quotient of two
    fp32 values, rounded to fp32, is the correctly rounded quotient, since 53 >= 2 * 24 + 2 bits."""
    return prims.to_dtype(prims.truediv(numerator, prims.to_dtype(denominator, torch.float64)), torch.float32)


def cast(value, scale, quantizer: Quantizer, device: torch.device):
    """Saturates and keeps NaN. On CUDA the conversion itself does, infinity too: PTX's cvt.rn.satfinite, which Triton emits
    from compute capability 8.9 on, where our sites begin. Elsewhere by comparisons, which NaN passes."""
    value = prims.mul(prims.to_dtype(value, torch.float32), scale)
    if device.type != "cuda":
        high = prims.constant(quantizer.format.max, torch.float32)
        low = prims.constant(-quantizer.format.max, torch.float32)
        value = prims.where(prims.gt(value, high), high, value)
        value = prims.where(prims.lt(value, low), low, value)
    return prims.to_dtype(value, quantizer.format.dtype)


def largest(values):
    """Of int32 values: by comparison, as no max but the reduction's own shall stand beside an fp8 store."""
    first, *rest = values
    for value in rest:
        first = prims.where(prims.gt(value, first), value, first)
    return first
