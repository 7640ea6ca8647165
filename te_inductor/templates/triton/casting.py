"""A scale and a cast in Triton, for templates: the same numbers as `runtime/eager/dense.py` has."""

import math

import torch
import triton
import triton.language as tl

from te_inductor.recipes.quantizers import Quantizer
from te_inductor.templates.triton.ptx import (
    CAST_CONSTRAINTS,
    CAST_PACK,
    CASTS,
    PAIRS,
    PAIRS_CONSTRAINTS,
    PAIRS_PACK,
)

# The exponent of fp32; clearing the mantissa of a positive value rounds it down to a power of two.
_EXPONENT_MASK = tl.constexpr(255 << 23)
_INFINITY = tl.constexpr(float("inf"))
_ONE, _INFINITY_BITS = tl.constexpr(127 << 23), tl.constexpr(255 << 23)  # of fp32
_E4M3, _E5M2 = (tl.constexpr(CASTS[dtype]) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
_CONSTRAINTS, _PACK = tl.constexpr(CAST_CONSTRAINTS), tl.constexpr(CAST_PACK)
_PAIRS, _PAIRS_CONSTRAINTS, _PAIRS_PACK = tl.constexpr(PAIRS), tl.constexpr(PAIRS_CONSTRAINTS), tl.constexpr(PAIRS_PACK)
_EXP2, _LOG2_E = tl.constexpr("ex2.approx.ftz.f32 $0, $1;"), tl.constexpr(math.log2(math.e))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


ELEMENTS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5, torch.uint8: tl.uint8}


def scaling(quantizer: Quantizer, dtype: torch.dtype) -> tuple[float, float, float, bool]:
    """What `encode` is told of a quantizer that casts tensors of a dtype: the kernels' SCALING."""
    largest, epsilon = quantizer.format.max, float(quantizer.amax_epsilon)
    return largest, epsilon, quantizer.largest_scale(dtype), quantizer.power_2_scale


@triton.jit
def encode(amax, SCALING: tl.constexpr):
    """Computes what `arithmetic.encode_scale` does. The double quotient of fp32 values, rounded to fp32, is the
    correctly rounded one; Triton's own fp32 division may be off by 2 ulp. A power of two is found without one, as by
    `lowerings.values`."""
    LARGEST: tl.constexpr = SCALING[0]
    EPSILON: tl.constexpr = SCALING[1]
    LARGEST_SCALE: tl.constexpr = SCALING[2]
    POWER_2: tl.constexpr = SCALING[3]
    amax = tl.where(amax < EPSILON, EPSILON, amax)
    if POWER_2:
        quotient = tl.full((), LARGEST, tl.float32).to(tl.int32, bitcast=True) - amax.to(tl.int32, bitcast=True)
        most = tl.full((), LARGEST_SCALE, tl.float32).to(tl.int32, bitcast=True)
        factor = tl.where(quotient < _INFINITY_BITS - _ONE, quotient + _ONE, most) & _EXPONENT_MASK
        factor = factor.to(tl.float32, bitcast=True)
    else:
        factor = (LARGEST / amax.to(tl.float64)).to(tl.float32)
        factor = tl.where(factor < _INFINITY, factor, LARGEST_SCALE)
    return tl.where((amax > 0.0) & (amax < _INFINITY), factor, 1.0)


@triton.jit
def inverse(factor):
    return (1.0 / factor.to(tl.float64)).to(tl.float32)


@triton.jit
def cast(x, LARGEST: tl.constexpr, ELEMENT: tl.constexpr):
    """Note [Casts in PTX]. In the interpreter by comparisons, which NaN passes."""
    if _INTERPRETED:
        x = tl.where(x > LARGEST, LARGEST, x)
        cast = tl.where(x < -LARGEST, -LARGEST, x).to(ELEMENT)
    elif tl.float8e5 == ELEMENT:
        cast = tl.inline_asm_elementwise(_E5M2, _CONSTRAINTS, [x], dtype=tl.float8e5, is_pure=True, pack=_PACK)
    else:
        cast = tl.inline_asm_elementwise(_E4M3, _CONSTRAINTS, [x], dtype=tl.float8e4nv, is_pure=True, pack=_PACK)
    return cast


@triton.jit
def pairs(first, second):
    """Bytes of two tensors by turns, uint16."""
    if _INTERPRETED:
        both = second.to(tl.uint8, bitcast=True).to(tl.uint16) << 8 | first.to(tl.uint8, bitcast=True)
    else:
        both = tl.inline_asm_elementwise(
            _PAIRS, _PAIRS_CONSTRAINTS, [first, second], dtype=tl.uint16, is_pure=True, pack=_PAIRS_PACK
        )
    return both


@triton.jit
def quads(first, second, third, fourth):
    """Bytes of four tensors by turns, uint32."""
    return pairs(first, second).to(tl.uint32) | pairs(third, fourth).to(tl.uint32) << 16


@triton.jit
def exp_or_zero(x):
    """The exponential, zero where that is below 2**-126."""
    if _INTERPRETED:
        power = tl.exp(x)
    else:
        power = tl.inline_asm_elementwise(_EXP2, "=f,f", [x * _LOG2_E], dtype=tl.float32, is_pure=True, pack=1)
    return power
