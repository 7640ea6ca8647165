"""`numerics/algebra.py` on values of Inductor IR, each one element in a kernel."""

# mypy: disable-error-code="no-untyped-def"

import torch
from torch._inductor.virtualized import ops as prims

from te_inductor.numerics.algebra import Algebra


class InductorIR:
    def fp32(self, number: float):
        return prims.constant(number, torch.float32)

    def int32(self, number: int):
        return prims.constant(number, torch.int32)

    def where(self, condition, a, b):
        return prims.where(condition, a, b)

    def decrement(self, code, condition):
        return prims.where(condition, code - self.int32(1), code)

    def both(self, a, b):
        return prims.and_(a, b)

    def convert(self, value, dtype: torch.dtype):
        return prims.to_dtype(value, dtype)

    def bits(self, value):
        return prims.to_dtype_bitcast(value, torch.int32, torch.float32)

    def from_bits(self, bits):
        return prims.to_dtype_bitcast(bits, torch.float32, torch.int32)

    def shift_right(self, bits, count: int):
        return prims.bitwise_right_shift(bits, self.int32(count))

    def quotient(self, a, b):
        """Divides alike on every device. Triton's own fp32 division may be off by 2 ulp; the double quotient of two
        fp32 values, rounded to fp32, is the correctly rounded quotient, since 53 >= 2 * 24 + 2 bits."""
        a, b = (prims.constant(one, torch.float64) if isinstance(one, int | float) else one for one in (a, b))
        return prims.to_dtype(prims.truediv(a, prims.to_dtype(b, torch.float64)), torch.float32)

    def square(self, value):
        """Squares by the product in double, whose conversion rounds it."""
        wide = prims.to_dtype(value, torch.float64)
        return prims.to_dtype(prims.mul(wide, wide), torch.float32)


INDUCTOR: Algebra = InductorIR()
