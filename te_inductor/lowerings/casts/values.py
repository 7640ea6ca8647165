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

from te_inductor.lowerings.casts.algebra import INDUCTOR
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import FP16_OVERFLOW
from te_inductor.runtime import arithmetic

MANTISSA_BITS, EXPONENT_BIAS = 23, 127  # of fp32


def magnitude(value):
    """The fp32 bit pattern without the sign, int32: infinity is above every number and NaN above infinity.

    Its maximum is the amax's bit pattern. Inductor fuses the amax of rows and of blocks with their cast, so that one
    kernel may hold both it and a transposed fp8 store. With a float max that would be Triton issue 11111 on torch 2.15.
    """
    return arithmetic.magnitude(INDUCTOR, value)


def _fp32_bits(value: float) -> int:
    [bits] = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def encode_scale(amax, quantizer: Quantizer, dtype: torch.dtype):
    """The fp32 factor of what has this amax, in a tensor of `dtype`."""
    largest = quantizer.largest_scale(dtype)
    if quantizer.amax_epsilon:
        epsilon = INDUCTOR.fp32(quantizer.amax_epsilon)
        amax = prims.where(prims.lt(amax, epsilon), epsilon, amax)
    if quantizer.power_2_scale:
        return INDUCTOR.from_bits(_power_2(INDUCTOR.bits(amax), quantizer, largest))
    zero, one = INDUCTOR.fp32(0.0), INDUCTOR.fp32(1.0)
    infinity = INDUCTOR.fp32(float("inf"))
    usable = prims.and_(prims.gt(amax, zero), prims.lt(amax, infinity))
    encoded = INDUCTOR.quotient(quantizer.format.max, amax)
    encoded = prims.where(prims.lt(encoded, infinity), encoded, INDUCTOR.fp32(largest))
    return prims.where(usable, encoded, one)


def _power_2(amax, quantizer: Quantizer, largest: float):  # bit patterns
    """The quotient of the element's largest value and amax, rounded down to a power of two: without a division, which
    every thread would do for each block that it has an element of, 14 of a column copy's 70 instructions an element.

    A bit pattern is the exponent and then the mantissa, so the difference of two, cut to whole exponents, is the
    exponent of the quotient rounded down. It is that of the fp32 quotient too, which IEEE division might round up to
    the next power: the largest value has few bits, so no fp32 amax brings the quotient that near to one from below.

    Few operations, as Inductor traces each of them several times, and a graph has hundreds of scales.
    """
    difference = prims.sub(INDUCTOR.int32(_fp32_bits(quantizer.format.max)), amax)
    finite, most = prims.lt(difference, _exponent(EXPONENT_BIAS + 1)), _exponent(math.frexp(largest)[1] - 1)
    raised = prims.add(prims.where(finite, difference, most), _exponent(EXPONENT_BIAS))
    encoded = prims.bitwise_and(raised, _exponent(-1))
    # A NaN of the whole tensor may have a sign, and be negative here.
    usable = prims.and_(prims.gt(amax, INDUCTOR.int32(0)), prims.lt(amax, INDUCTOR.int32(_fp32_bits(math.inf))))
    return prims.where(usable, encoded, _exponent(EXPONENT_BIAS))


def _exponent(value: int):
    """In its place in a bit pattern; -1 has all of its bits, and the sign's."""
    return INDUCTOR.int32(value << MANTISSA_BITS)


def decode_scale(scale, quantizer: Quantizer):
    if not quantizer.power_2_scale:
        return INDUCTOR.quotient(1.0, scale)
    bits = prims.sub(INDUCTOR.int32(2 * EXPONENT_BIAS << MANTISSA_BITS), INDUCTOR.bits(scale))
    subnormal = INDUCTOR.int32(1 << MANTISSA_BITS - 1)  # the reciprocal of 2**127
    return INDUCTOR.from_bits(prims.where(prims.eq(bits, INDUCTOR.int32(0)), subnormal, bits))


def cast(value, scale, quantizer: Quantizer, device: torch.device, dtype: torch.dtype):
    """Of a value of a tensor of `dtype`: to the element, saturating; an infinity becomes NaN, as NaN stays: Note
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
    """Of int32 values: by comparison, as no max but the reduction's own shall stand beside an fp8 store."""
    first, *rest = values
    for value in rest:
        first = prims.where(prims.gt(value, first), value, first)
    return first
