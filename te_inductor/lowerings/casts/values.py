"""The arithmetic of quantization on single values of Inductor IR. Mirrors `runtime/eager.py`.

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
import struct

import torch
from torch._inductor.virtualized import ops as prims

from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import FP16_OVERFLOW

MANTISSA_BITS, EXPONENT_BIAS = 23, 127  # of fp32


def magnitude(value):
    """The fp32 bit pattern without the sign, int32: infinity is above every number and NaN above infinity.

    Its maximum is the amax's bit pattern. Inductor fuses the amax of rows and of blocks with their cast, so that one
    kernel may hold both it and a transposed fp8 store. With a float max that would be Triton issue 11111 on torch 2.15.
    """
    return prims.bitwise_and(_bits(prims.to_dtype(value, torch.float32)), _int(0x7FFFFFFF))


def from_bits(bits):
    return prims.to_dtype_bitcast(bits, torch.float32, torch.int32)


def _bits(value):
    return prims.to_dtype_bitcast(value, torch.int32, torch.float32)


def _int(value: int):
    return prims.constant(value, torch.int32)


def _fp32_bits(value: float) -> int:
    [bits] = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def encode_scale(amax, quantizer: Quantizer, dtype: torch.dtype):
    """The fp32 factor of what has this amax, in a tensor of `dtype`."""
    largest = quantizer.largest_scale(dtype)
    if quantizer.amax_epsilon:
        epsilon = prims.constant(quantizer.amax_epsilon, torch.float32)
        amax = prims.where(prims.lt(amax, epsilon), epsilon, amax)
    if quantizer.power_2_scale:
        return from_bits(_power_2(_bits(amax), quantizer, largest))
    zero, one = prims.constant(0.0, torch.float32), prims.constant(1.0, torch.float32)
    infinity = prims.constant(float("inf"), torch.float32)
    usable = prims.and_(prims.gt(amax, zero), prims.lt(amax, infinity))
    encoded = divide(prims.constant(quantizer.format.max, torch.float64), amax)
    encoded = prims.where(prims.lt(encoded, infinity), encoded, prims.constant(largest, torch.float32))
    return prims.where(usable, encoded, one)


def _power_2(amax, quantizer: Quantizer, largest: float):  # bit patterns
    """The quotient of the element's largest value and amax, rounded down to a power of two: without a division, which
    every thread would do for each block that it has an element of, 14 of a column copy's 70 instructions an element.

    A bit pattern is the exponent and then the mantissa, so the difference of two, cut to whole exponents, is the
    exponent of the quotient rounded down. It is that of the fp32 quotient too, which IEEE division might round up to
    the next power: the largest value has few bits, so no fp32 amax brings the quotient that near to one from below.

    Few operations, as Inductor traces each of them several times, and a graph has hundreds of scales.
    """
    difference = prims.sub(_int(_fp32_bits(quantizer.format.max)), amax)
    finite, most = prims.lt(difference, _exponent(EXPONENT_BIAS + 1)), _exponent(math.frexp(largest)[1] - 1)
    raised = prims.add(prims.where(finite, difference, most), _exponent(EXPONENT_BIAS))
    encoded = prims.bitwise_and(raised, _exponent(-1))
    # A NaN of the whole tensor may have a sign, and be negative here.
    usable = prims.and_(prims.gt(amax, _int(0)), prims.lt(amax, _int(_fp32_bits(math.inf))))
    return prims.where(usable, encoded, _exponent(EXPONENT_BIAS))


def _exponent(value: int):
    """In its place in a bit pattern; -1 has all of its bits, and the sign's."""
    return _int(value << MANTISSA_BITS)


def decode_scale(scale, quantizer: Quantizer):
    if not quantizer.power_2_scale:
        return divide(prims.constant(1.0, torch.float64), scale)
    bits = prims.sub(_int(2 * EXPONENT_BIAS << MANTISSA_BITS), _bits(scale))
    subnormal = _int(1 << MANTISSA_BITS - 1)  # the reciprocal of 2**127
    return from_bits(prims.where(prims.eq(bits, _int(0)), subnormal, bits))


def divide(numerator, denominator):
    """IEEE fp32 division on every device. Triton's own fp32 division may be off by 2 ulp; the double quotient of two
    fp32 values, rounded to fp32, is the correctly rounded quotient, since 53 >= 2 * 24 + 2 bits."""
    return prims.to_dtype(prims.truediv(numerator, prims.to_dtype(denominator, torch.float64)), torch.float32)


def cast(value, scale, quantizer: Quantizer, device: torch.device, dtype: torch.dtype):
    """Of a value of a tensor of `dtype`: to the element, saturating; an infinity becomes NaN, as NaN stays: Note
    [Overflow stays visible]. On CUDA the conversion itself saturates: PTX's cvt.rn.satfinite, which Triton emits from
    compute capability 8.9 on, where our sites begin. Elsewhere by comparisons, which NaN passes."""
    value = prims.to_dtype(value, torch.float32)
    if dtype == torch.float16 or device.type != "cuda":
        bound = prims.constant(FP16_OVERFLOW if dtype == torch.float16 else math.inf, torch.float32)
        value = prims.where(prims.lt(prims.abs(value), bound), value, prims.constant(math.nan, torch.float32))
        value = prims.mul(value, scale)
    else:
        value = prims.add(prims.mul(value, scale), prims.mul(value, prims.constant(0.0, torch.float32)))
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
