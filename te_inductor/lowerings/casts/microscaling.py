"""The arithmetic of MXFP8 and NVFP4 on single values of Inductor IR. Mirrors `runtime/microscaling.py`."""

# mypy: disable-error-code="no-untyped-def"

import functools

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.virtualized import ops as prims

from te_inductor.lowerings.casts import values
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import E2M1, E4M3, E8M0, HADAMARD, HADAMARD_SIGNS
from te_inductor.runtime.microscaling import (
    FP32_MAX,
    INFINITY_CODE,
    MAGNITUDES,
    NAN_CODE,
    SMALLEST_BITS,
    THRESHOLDS,
    TWO_LEVEL_MAX,
    reciprocal,
)
from te_inductor.runtime.philox import BITS


def _int(value: int):
    return prims.constant(value, torch.int32)


def _fp32(value: float):
    return prims.constant(value, torch.float32)


def _negative(value):
    """By a product: Triton's `-value` is 0 - value, which loses the sign of a zero."""
    return prims.mul(value, _fp32(-1.0))


def _bits(value):
    return prims.to_dtype_bitcast(value, torch.int32, torch.float32)


def encode(amax, quantizer: Quantizer, tensor_amax):
    """Of a block with this amax (fp32): the factor that values are multiplied with before the cast, and scale_inv as it
    is stored."""
    if quantizer.granularity.scale is E8M0:
        code = _e8m0_code(prims.mul(amax, _fp32(reciprocal(quantizer.format.max))))
        return _e8m0_reciprocal(code), prims.to_dtype(code, torch.uint8)
    return _two_level(amax, tensor_amax)


def _e8m0_code(value):
    bits = _bits(value)
    up = prims.and_(
        prims.ne(prims.bitwise_and(bits, _int(0x7FFFFF)), _int(0)),
        prims.gt(bits, _int(SMALLEST_BITS)),
    )
    exponent = prims.bitwise_right_shift(bits, _int(23))
    code = prims.where(up, prims.add(exponent, _int(1)), exponent)
    infinity = _int(0x7F800000)
    code = prims.where(prims.eq(bits, infinity), _int(INFINITY_CODE), code)
    return prims.where(prims.gt(bits, infinity), _int(NAN_CODE), code)


def _e8m0_reciprocal(code):
    bits = prims.bitwise_left_shift(prims.sub(_int(254), code), _int(23))
    return _special(code, INFINITY_CODE, bits)


def e8m0_value(code):
    """The fp32 value of a uint8 code."""
    code = prims.to_dtype(code, torch.int32)
    return _special(code, 0, prims.bitwise_left_shift(code, _int(23)))


def _special(code, smallest: int, bits):
    bits = prims.where(prims.eq(code, _int(smallest)), _int(SMALLEST_BITS), bits)
    return values.from_bits(prims.where(prims.eq(code, _int(NAN_CODE)), _int(0x7FC00000), bits))


def _quotient(numerator: float, denominator):
    return values.divide(prims.constant(numerator, torch.float64), denominator)


def _two_level(amax, tensor_amax):
    scale = _tensor_encode_scale(tensor_amax, TWO_LEVEL_MAX)
    return _two_levels(prims.mul(amax, prims.mul(scale, _fp32(reciprocal(E2M1.max)))), scale)


def candidates(amax, quantizer: Quantizer, tensor_amax):
    """What `encode` finds, where a block's amax goes to each of the quantizer's candidates."""
    scale, (first, *others) = _tensor_encode_scale(tensor_amax, quantizer.two_level_max), quantizer.candidates
    base = prims.mul(values.divide(amax, prims.constant(first, torch.float64)), scale)
    stretched = (prims.mul(base, _fp32(first / candidate)) for candidate in others)
    return [_two_levels(base, scale), *(_two_levels(scale_inv, scale) for scale_inv in stretched)]


def error(value, factor, scale_inv, quantizer: Quantizer, tensor_amax):
    """How far a value comes to lie from itself. A square is rounded by its conversion, and so before it is added."""
    size = values.from_bits(values.magnitude(value))
    scaled, nearest = prims.mul(size, factor), _fp32(E2M1.max)
    for (threshold, tie_is_below), below in reversed(tuple(zip(THRESHOLDS, MAGNITUDES, strict=False))):
        below_it = (prims.le if tie_is_below else prims.lt)(scaled, _fp32(threshold))
        nearest = prims.where(below_it, _fp32(below), nearest)
    back = prims.mul(prims.mul(nearest, prims.to_dtype(scale_inv, torch.float32)), tensor_amax)
    most = prims.constant(quantizer.two_level_max, torch.float64)
    off = values.from_bits(values.magnitude(prims.sub(values.divide(back, most), size)))
    if quantizer.error_metric == "MAE":
        return off
    wide = prims.to_dtype(off, torch.float64)
    return prims.to_dtype(prims.mul(wide, wide), torch.float32)


def least(pairs, errors):
    """scale_inv of the pair of `candidates` that leaves the least error, of the first where they are equal."""
    scales = [prims.to_dtype(scale_inv, torch.float32) for _, scale_inv in pairs]
    found = scales[0]
    for place in range(1, len(scales)):
        smallest = functools.reduce(lambda a, b: prims.where(prims.lt(b, a), b, a), errors[:place])
        found = prims.where(prims.lt(errors[place], smallest), scales[place], found)
    return prims.to_dtype(found, E4M3.dtype)


def factor(scale_inv, quantizer: Quantizer, tensor_amax):
    """What values are multiplied with before the cast, of a block with this scale_inv."""
    return _factor(scale_inv, _tensor_encode_scale(tensor_amax, quantizer.two_level_max))


def _tensor_encode_scale(tensor_amax, largest: float):
    zero, infinity, most = _fp32(0.0), _fp32(float("inf")), _fp32(FP32_MAX)
    scale = _quotient(largest, tensor_amax)
    scale = prims.where(prims.lt(scale, most), scale, most)
    usable = prims.and_(prims.gt(tensor_amax, zero), prims.lt(tensor_amax, infinity))
    return prims.where(usable, scale, _fp32(1.0))


def _two_levels(scale_inv, scale):
    """Both of a block whose scale_inv is yet to be rounded."""
    scale_inv = prims.where(prims.gt(scale_inv, _fp32(E4M3.max)), _fp32(E4M3.max), scale_inv)
    scale_inv = prims.to_dtype(scale_inv, E4M3.dtype)
    return _factor(scale_inv, scale), scale_inv


def _factor(scale_inv, scale):
    most, decode = _fp32(FP32_MAX), prims.mul(prims.to_dtype(scale_inv, torch.float32), _quotient(1.0, scale))
    factor = _quotient(1.0, decode)
    return prims.where(prims.lt(factor, most), factor, most)


def cast_e2m1(value, random=None):
    """The code, int32: to nearest, ties to even, or as the `random` bits say; saturates; NaN becomes 6."""
    bits, magnitude = _bits(value), values.magnitude(value)
    size = values.from_bits(magnitude)
    code = _nearest(size) if random is None else _stochastic(size, random)
    negative = prims.and_(prims.lt(bits, _int(0)), prims.le(magnitude, _int(0x7F800000)))
    return prims.where(negative, prims.add(code, _int(8)), code)


def _nearest(size):
    code = _int(7)
    for threshold, tie_is_below in THRESHOLDS:
        below = (prims.le if tie_is_below else prims.lt)(size, _fp32(threshold))
        code = prims.where(below, prims.sub(code, _int(1)), code)
    return code


def _stochastic(size, random):
    two, four, most = _fp32(2.0), _fp32(4.0), _fp32(E2M1.max)
    size = prims.where(prims.le(size, most), size, most)
    base = prims.where(prims.lt(size, two), _int(0), prims.where(prims.lt(size, four), _int(2), _int(4)))
    per_step = prims.where(prims.lt(size, two), two, prims.where(prims.lt(size, four), _fp32(1.0), _fp32(0.5)))
    steps = prims.mul(size, per_step)
    low = prims.to_dtype(steps, torch.int32)
    part = prims.sub(steps, prims.to_dtype(low, torch.float32))
    up = prims.lt(prims.to_dtype(random, torch.float32), prims.mul(part, _fp32(2.0**BITS)))
    code = prims.add(low, base)
    return prims.where(up, prims.add(code, _int(1)), code)


def random_bits(seed, place):
    """As `philox.random_bits`; `place` is an index."""
    bounds = (prims.index_expr(sympy.Integer(bound), torch.int64) for bound in (0, 2**BITS))
    return prims.randint64(seed, prims.index_expr(place, torch.int32), *bounds)


def hadamard(sixteen, place):
    """One of the 16 results of 16 values, `place` its index, as a value of bf16 in fp32."""
    place = prims.index_expr(place, torch.int32)
    sums = [value if sign > 0 else _negative(value) for value, sign in zip(sixteen, HADAMARD_SIGNS, strict=True)]
    apart = 1
    while len(sums) > 1:
        sign = prims.where(prims.ne(prims.bitwise_and(place, _int(apart)), _int(0)), _fp32(-1.0), _fp32(1.0))
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [prims.add(a, prims.mul(b, sign)) for a, b in pairs]
        apart *= 2
    return _bf16(prims.mul(sums[0], _fp32(HADAMARD**-0.5)))


def _bf16(value):
    """Rounded to bf16. On the bits: what Inductor stores as bf16 and reads again in the same kernel, it does not
    round."""
    bits = _bits(value)
    odd = prims.bitwise_and(prims.bitwise_right_shift(bits, _int(16)), _int(1))
    rounded = prims.bitwise_and(prims.add(bits, prims.add(odd, _int(0x7FFF))), _int(-0x10000))
    return prims.where(prims.eq(value, value), values.from_bits(rounded), value)


def pack(codes):
    """Two codes of four bits as a byte, the first in its low bits."""
    low, high = codes
    return prims.to_dtype(prims.bitwise_or(low, prims.bitwise_left_shift(high, _int(4))), torch.uint8)


def unpack(byte, place):
    """The fp32 value of the first code of a byte, or of the second, where `place` (an index) is 1."""
    byte = prims.to_dtype(byte, torch.int32)
    second = prims.eq(prims.index_expr(place, torch.int32), _int(1))
    code = prims.where(second, prims.bitwise_right_shift(byte, _int(4)), prims.bitwise_and(byte, _int(15)))
    size = prims.to_dtype(prims.bitwise_and(code, _int(7)), torch.float32)
    # Steps of 1/2 up to 2, of 1 up to 4, of 2 above.
    large = prims.where(
        prims.lt(size, _fp32(6.0)), prims.sub(size, _fp32(2.0)), prims.sub(prims.mul(size, _fp32(2.0)), _fp32(8.0))
    )
    size = prims.where(prims.lt(size, _fp32(4.0)), prims.mul(size, _fp32(0.5)), large)
    return prims.where(prims.gt(code, _int(7)), _negative(size), size)
