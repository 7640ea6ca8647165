"""The arithmetic of scales, in fp32, of E8M0 and of two levels, and of values of
elements that torch does not have. Written once: eager code evaluates it on tensors, lowerings on values of Inductor IR
(`on`, an `Algebra`).

Of a block of MXFP8, MXFP4 or NVFP4, `encode` finds its factor, which values are multiplied with before the cast, and
`scale_inv` as it is stored. A quantizer with several candidates wants the block's values too: the error that each
candidate leaves.

Each operation is one rounding of fp32, and an order of operations is an order of instructions in generated code. torch
fuses none of them; in lowerings a square alone would become part of an fma.

Source: TransformerEngine, common/recipe/recipe_common.cuh, common/util/ptx.cuh (float_to_e8m0, exp2f_rcp),
common/cast/nvfp4/core_nvfp4.cuh, common/cast/nvfp4/quantize_4over6_nvfp4.cuh.
"""

import functools
import math
import operator
import struct
from collections.abc import Iterable, Sequence

import torch

from te_inductor.numerics.algebra import Algebra, Value
from te_inductor.numerics.philox import BITS
from te_inductor.recipes.formats import E2M1, E4M3, E8M0, Element
from te_inductor.recipes.quantizers import Quantizer

Pair = tuple[Value, Value]  # of a block: its factor, and scale_inv
FP32_MAX = torch.finfo(torch.float32).max
MAGNITUDE_BITS, INFINITY_BITS, NAN_BITS = 0x7FFFFFFF, 0x7F800000, 0x7FC00000  # of fp32
MANTISSA_BITS, EXPONENT_BIAS = 23, 127  # of fp32
NAN_CODE, INFINITY_CODE = 0xFF, 0xFE  # E8M0 has no infinity: its largest value stands for one
# The bits of 2**-127 as fp32, a subnormal: the value of code 0, and the reciprocal of that of code 0xFE.
SMALLEST_BITS = 0x00400000
# What two-level scales map the tensor's amax to: the largest element times the largest scale of a block.
TWO_LEVEL_MAX = E2M1.max * E4M3.max
# E2M1's magnitudes by their codes; midway between neighbours, and whether the lower one has the even mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
THRESHOLDS = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))


def reciprocal(value: float) -> float:
    """1 / value as fp32 has it."""
    (rounded,) = struct.unpack("f", struct.pack("f", 1.0 / value))
    return float(rounded)


def magnitude(on: Algebra, value: Value) -> Value:
    """The fp32 bit pattern without the sign, int32: infinity is above every number and NaN above infinity."""
    return on.bits(on.convert(value, torch.float32)) & on.int32(MAGNITUDE_BITS)


def encode_scale(on: Algebra, amax: Value, quantizer: Quantizer, dtype: torch.dtype) -> Value:
    """The fp32 factor that maps `amax` (fp32), of a tensor of `dtype`, to the element's largest value."""
    largest = quantizer.largest_scale(dtype)
    if quantizer.amax_epsilon:
        epsilon = on.fp32(quantizer.amax_epsilon)
        amax = on.where(amax < epsilon, epsilon, amax)
    if quantizer.power_2_scale:
        return on.from_bits(_power_2(on, on.bits(amax), quantizer, largest))
    zero, one, infinity = on.fp32(0.0), on.fp32(1.0), on.fp32(math.inf)
    usable = on.both(amax > zero, amax < infinity)
    encoded = on.quotient(quantizer.format.max, amax)
    encoded = on.where(encoded < infinity, encoded, on.fp32(largest))
    return on.where(usable, encoded, one)


def _power_2(on: Algebra, amax: Value, quantizer: Quantizer, largest: float) -> Value:  # bit patterns
    """The quotient of the element's largest value and amax, rounded down to a power of two: without a division, which
    every thread would do for each block that it has an element of, 14 of a column copy's 70 instructions an element.

    A bit pattern is the exponent and then the mantissa, so the difference of two, cut to whole exponents, is the
    exponent of the quotient rounded down. It is that of the fp32 quotient too, which IEEE division might round up to
    the next power: the largest value has few bits, so no fp32 amax brings the quotient that near to one from below.

    Few operations, as Inductor traces each of them several times, and a graph has hundreds of scales.
    """

    def exponent(value: int) -> Value:
        """Puts an exponent in its place in a bit pattern; -1 has all of its bits, and the sign's."""
        return on.int32(value << MANTISSA_BITS)

    difference = on.int32(_fp32_bits(quantizer.format.max)) - amax
    finite, most = difference < exponent(EXPONENT_BIAS + 1), exponent(math.frexp(largest)[1] - 1)
    raised = on.where(finite, difference, most) + exponent(EXPONENT_BIAS)
    encoded = raised & exponent(-1)
    # A NaN of the whole tensor may have a sign, and be negative here.
    usable = on.both(amax > on.int32(0), amax < on.int32(INFINITY_BITS))
    return on.where(usable, encoded, exponent(EXPONENT_BIAS))


def _fp32_bits(value: float) -> int:
    [bits] = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def decode_scale(on: Algebra, scale: Value, quantizer: Quantizer) -> Value:
    """scale_inv of the factor that `encode_scale` finds."""
    if not quantizer.power_2_scale:
        return on.quotient(1.0, scale)
    bits = on.int32(2 * EXPONENT_BIAS << MANTISSA_BITS) - on.bits(scale)
    subnormal = on.int32(1 << MANTISSA_BITS - 1)  # the reciprocal of 2**127
    return on.from_bits(on.where(bits == on.int32(0), subnormal, bits))


def encode(on: Algebra, amax: Value, quantizer: Quantizer, first_amax: Value | None) -> Pair:
    """Returns the scales of a block with this amax (fp32, its sign bit clear), where it goes to the element's largest
    value; `first_amax` is that of what has the first of two levels."""
    if quantizer.granularity.scale is E8M0:
        code = e8m0_code(on, amax * on.fp32(reciprocal(quantizer.format.max)))
        return _e8m0_reciprocal(on, code), on.convert(code, torch.uint8)
    scale = first_encode_scale(on, first_amax, quantizer)
    return _two_levels(on, amax * (scale * on.fp32(reciprocal(E2M1.max))), scale)


def e8m0_code(on: Algebra, value: Value) -> Value:
    """The smallest power of two that is no smaller (of fp32, its sign bit clear), as an int32 code; NaN and infinity
    have theirs."""
    bits = on.bits(value)
    up = on.both((bits & on.int32(0x7FFFFF)) != on.int32(0), bits > on.int32(SMALLEST_BITS))
    exponent = on.shift_right(bits, 23)
    code = on.where(up, exponent + on.int32(1), exponent)
    infinity = on.int32(INFINITY_BITS)
    code = on.where(bits == infinity, on.int32(INFINITY_CODE), code)
    return on.where(bits > infinity, on.int32(NAN_CODE), code)


def _e8m0_reciprocal(on: Algebra, code: Value) -> Value:
    return _special(on, code, INFINITY_CODE, (on.int32(254) - code) << on.int32(23))


def e8m0_value(on: Algebra, code: Value) -> Value:
    """The fp32 value of a uint8 code."""
    code = on.convert(code, torch.int32)
    return _special(on, code, 0, code << on.int32(23))


def _special(on: Algebra, code: Value, smallest: int, bits: Value) -> Value:
    bits = on.where(code == on.int32(smallest), on.int32(SMALLEST_BITS), bits)
    return on.from_bits(on.where(code == on.int32(NAN_CODE), on.int32(NAN_BITS), bits))


def first_encode_scale(on: Algebra, amax: Value, quantizer: Quantizer) -> Value:
    """The fp32 factor of the first of two levels, which maps this amax to `Quantizer.two_level_max`."""
    zero, infinity, most = on.fp32(0.0), on.fp32(math.inf), on.fp32(FP32_MAX)
    scale = on.quotient(quantizer.two_level_max, amax)
    scale = on.where(scale < most, scale, most)
    return on.where(on.both(amax > zero, amax < infinity), scale, on.fp32(1.0))


def candidates(on: Algebra, amax: Value, quantizer: Quantizer, first_amax: Value) -> list[Pair]:
    """Returns the scales of a block with this amax, where it goes to each of the quantizer's candidates: to less with a
    larger scale."""
    scale, (first, *others) = first_encode_scale(on, first_amax, quantizer), quantizer.candidates
    base = on.quotient(amax, first) * scale
    stretched = (base * on.fp32(first / candidate) for candidate in others)
    return [_two_levels(on, base, scale), *(_two_levels(on, scale_inv, scale) for scale_inv in stretched)]


def error(on: Algebra, value: Value, pair: Pair, quantizer: Quantizer, first_amax: Value) -> Value:
    """How far a value comes to lie from itself (fp32), by the quantizer's metric. TransformerEngine computes it with
    the amax, and not with the factor that values are encoded with. Of magnitudes: the sign is the same."""
    (factor, scale_inv), size = pair, on.from_bits(magnitude(on, value))
    scaled, nearest = size * factor, on.fp32(E2M1.max)
    for (threshold, tie_is_below), below in reversed(tuple(zip(THRESHOLDS, MAGNITUDES, strict=False))):
        nearest = on.where(_is_below(on, scaled, threshold, tie_is_below), on.fp32(below), nearest)
    back = nearest * on.convert(scale_inv, torch.float32) * first_amax
    off = on.from_bits(magnitude(on, on.quotient(back, quantizer.two_level_max) - size))
    return off if quantizer.error_metric == "MAE" else on.square(off)


def in_order(values: Iterable[Value]) -> Value:
    """The sum, from the first to the last."""
    return functools.reduce(operator.add, values)


def in_halves(values: Iterable[Value]) -> Value:
    """The sum, of those that are half of them apart, and so on; a power of two of them."""
    values = list(values)
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def least(on: Algebra, scales: Sequence[Value], errors: Sequence[Value]) -> Value:
    """scale_inv of the candidate that leaves the least error, of the first where errors are equal."""
    scales = [on.convert(scale_inv, torch.float32) for scale_inv in scales]
    found = scales[0]
    for place in range(1, len(scales)):
        smallest = functools.reduce(lambda a, b: on.where(b < a, b, a), errors[:place])
        found = on.where(errors[place] < smallest, scales[place], found)
    return on.convert(found, E4M3.dtype)


def factor_of(on: Algebra, scale_inv: Value, quantizer: Quantizer, first_amax: Value) -> Value:
    """The factor of a block with this scale of two levels."""
    return _factor(on, scale_inv, first_encode_scale(on, first_amax, quantizer))


def _two_levels(on: Algebra, scale_inv: Value, scale: Value) -> Pair:
    """Returns the scales of a block whose scale_inv is yet to be rounded."""
    scale_inv = on.where(scale_inv > on.fp32(E4M3.max), on.fp32(E4M3.max), scale_inv)
    scale_inv = on.convert(scale_inv, E4M3.dtype)
    return _factor(on, scale_inv, scale), scale_inv


def _factor(on: Algebra, scale_inv: Value, scale: Value) -> Value:
    """A NaN too is the largest number, as CUDA's fminf has it."""
    most, decode = on.fp32(FP32_MAX), on.convert(scale_inv, torch.float32) * on.quotient(1.0, scale)
    factor = on.quotient(1.0, decode)
    return on.where(factor < most, factor, most)


def encode_value(on: Algebra, value: Value, element: Element, random: Value | None = None) -> Value:
    """The code of an fp32 value, of an element that is stored as codes: rounded to nearest, ties to even, or as `random`
    bits say; saturates; NaN becomes the largest."""
    if element is E2M1:  # in fewer operations, and at random
        return cast_e2m1(on, value, random)
    bits, unsigned = on.bits(value), magnitude(on, value)
    largest, smallest = (on.int32(_fp32_bits(limit)) for limit in (element.max, 2.0**element.min_exponent))
    inside = on.where(unsigned < largest, unsigned, largest)
    less = MANTISSA_BITS - element.mantissa_bits
    odd = on.shift_right(inside, less) & on.int32(1)
    exponents = on.int32(EXPONENT_BIAS + element.min_exponent - 1 << element.mantissa_bits)
    normal = on.shift_right(inside + (odd + on.int32((1 << less - 1) - 1)), less) - exponents
    # The steps of fp32 from this number on are those of the element's subnormal values.
    steps = element.smallest_step * 2.0**MANTISSA_BITS
    subnormal = on.bits(on.from_bits(inside) + on.fp32(steps)) - on.int32(_fp32_bits(steps))
    code = on.where(inside < smallest, subnormal, normal)
    negative = on.both(bits < on.int32(0), unsigned <= on.int32(INFINITY_BITS))
    return on.where(negative, code + on.int32(1 << element.bits - 1), code)


def decode_value(on: Algebra, code: Value, element: Element) -> Value:
    """The fp32 value of a code."""
    if element is E2M1:
        return e2m1_value(on, code)
    code, sign = on.convert(code, torch.int32), 1 << element.bits - 1
    size, less = code & on.int32(sign - 1), MANTISSA_BITS - element.mantissa_bits
    exponents = on.int32(EXPONENT_BIAS + element.min_exponent - 1 << MANTISSA_BITS)
    normal = on.from_bits((size << on.int32(less)) + exponents)
    subnormal = on.convert(size, torch.float32) * on.fp32(element.smallest_step)
    value = on.where(size < on.int32(1 << element.mantissa_bits), subnormal, normal)
    return on.where(code >= on.int32(sign), value * on.fp32(-1.0), value)


def cast_e2m1(on: Algebra, value: Value, random: Value | None = None) -> Value:
    """The code of an fp32 value, rounded to nearest, ties to even, or as `random` bits say; saturates; NaN
    becomes 6, as CUDA's cvt.rn.satfinite.e2m1x2 has it."""
    bits, unsigned = on.bits(value), magnitude(on, value)
    size = on.from_bits(unsigned)
    code = _nearest(on, size) if random is None else _stochastic(on, size, random)
    negative = on.both(bits < on.int32(0), unsigned <= on.int32(INFINITY_BITS))
    return on.where(negative, code + on.int32(8), code)


def _nearest(on: Algebra, size: Value) -> Value:
    code = on.int32(7)
    for threshold, tie_is_below in THRESHOLDS:
        code = on.decrement(code, _is_below(on, size, threshold, tie_is_below))
    return code


def _is_below(on: Algebra, size: Value, threshold: float, tie_is_below: bool) -> Value:
    return (operator.le if tie_is_below else operator.lt)(size, on.fp32(threshold))


def _stochastic(on: Algebra, size: Value, random: Value) -> Value:
    """Rounds up with a probability of the distance from the lower neighbour, in units of their distance, rounded up to
    2**-24."""
    two, four, most = on.fp32(2.0), on.fp32(4.0), on.fp32(E2M1.max)
    size = on.where(size <= most, size, most)  # NaN too
    base = on.where(size < two, on.int32(0), on.where(size < four, on.int32(2), on.int32(4)))
    per_step = on.where(size < two, two, on.where(size < four, on.fp32(1.0), on.fp32(0.5)))
    steps = size * per_step
    low = on.convert(steps, torch.int32)
    part = steps - on.convert(low, torch.float32)
    up = on.convert(random, torch.float32) < part * on.fp32(2.0**BITS)
    code = low + base
    return on.where(up, code + on.int32(1), code)


def e2m1_value(on: Algebra, code: Value) -> Value:
    """The fp32 value of a code: of steps of 1/2 up to 2, of 1 up to 4, of 2 above."""
    size = on.convert(code & on.int32(7), torch.float32)
    large = on.where(size < on.fp32(6.0), size - on.fp32(2.0), size * on.fp32(2.0) - on.fp32(8.0))
    size = on.where(size < on.fp32(4.0), size * on.fp32(0.5), large)
    # The sign is a product's: Triton's `-value` is 0 - value, which loses the sign of a zero.
    return on.where(code > on.int32(7), size * on.fp32(-1.0), size)


def pack(on: Algebra, low: Value, high: Value) -> Value:
    """Two codes of four bits as a byte."""
    return on.convert(low | (high << on.int32(4)), torch.uint8)
