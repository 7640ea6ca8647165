"""What MXFP8, MXFP4 and NVFP4 want of Inductor IR besides `numerics/arithmetic.py`: random bits, the random Hadamard
transform for one value at a time, and the code of a place in a byte."""

# mypy: disable-error-code="no-untyped-def"

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.virtualized import ops as prims

from te_inductor.lowerings.casts.algebra import INDUCTOR
from te_inductor.numerics import arithmetic
from te_inductor.numerics.philox import BITS
from te_inductor.recipes.formats import HADAMARD, HADAMARD_SIGNS, Element


def random_bits(seed, place):
    """Returns what `philox.random_bits` does; `place` is an index."""
    bounds = (prims.index_expr(sympy.Integer(bound), torch.int64) for bound in (0, 2**BITS))
    return prims.randint64(seed, prims.index_expr(place, torch.int32), *bounds)


def hadamard(sixteen, place):
    """One of the 16 results of 16 values, `place` its index, as a value of bf16 in fp32."""
    place = prims.index_expr(place, torch.int32)
    sums = [
        value if sign > 0 else value * INDUCTOR.fp32(-1.0) for value, sign in zip(sixteen, HADAMARD_SIGNS, strict=True)
    ]
    apart = 1
    while len(sums) > 1:
        sign = INDUCTOR.where(
            (place & INDUCTOR.int32(apart)) != INDUCTOR.int32(0), INDUCTOR.fp32(-1.0), INDUCTOR.fp32(1.0)
        )
        sums = [a + b * sign for a, b in zip(sums[::2], sums[1::2], strict=True)]
        apart *= 2
    return _bf16(sums[0] * INDUCTOR.fp32(HADAMARD**-0.5))


def _bf16(value):
    """Rounded to bf16. On the bits: what Inductor stores as bf16 and reads again in the same kernel, it does not
    round."""
    bits = INDUCTOR.bits(value)
    odd = INDUCTOR.shift_right(bits, 16) & INDUCTOR.int32(1)
    rounded = (bits + (odd + INDUCTOR.int32(0x7FFF))) & INDUCTOR.int32(-0x10000)
    return INDUCTOR.where(value == value, INDUCTOR.from_bits(rounded), value)


def unpack(byte, place, element: Element):
    """The fp32 value of a byte's code; of two the first, or the second, where `place` (an index) is 1."""
    byte = prims.to_dtype(byte, torch.int32)
    if element.packed == 1:
        return arithmetic.decode_value(INDUCTOR, byte, element)
    second = prims.eq(prims.index_expr(place, torch.int32), INDUCTOR.int32(1))
    code = INDUCTOR.where(second, INDUCTOR.shift_right(byte, 4), byte & INDUCTOR.int32(15))
    return arithmetic.decode_value(INDUCTOR, code, element)
