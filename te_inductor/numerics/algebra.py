"""The operations that arithmetic is written in once, for torch's tensors and for Inductor IR.

An `Algebra` says how an operation is done; `arithmetic.py` says which. A value is a tensor here, every element alike, and
in lowerings (`lowerings/casts/algebra.py`) one element in a kernel. Of both, Python's own operators do what is left out
here: ``+ - * < <= > >= == != & |``, and ``<<``. On their right may stand a constant, on their left ``a - b`` alone takes
one."""

from typing import Any, Protocol

import torch
from torch import Tensor

Value = Any  # a tensor, or a value of Inductor IR


class Algebra(Protocol):
    def fp32(self, number: float) -> Value: ...

    def int32(self, number: int) -> Value: ...

    def where(self, condition: Value, a: Value, b: Value) -> Value: ...

    def decrement(self, code: Value, condition: Value) -> Value:
        """One less where the condition holds, of a code of few bits. For tensors apart from `where`, of which torch does
        a million in 3.3 ms on one core of a CPU, and subtractions of bytes in 0.1 ms (2026-11-26)."""

    def both(self, a: Value, b: Value) -> Value:
        """The conjunction of two conditions."""

    def convert(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in another dtype: to nearest, ties to even; to an integer, towards zero."""

    def bits(self, value: Value) -> Value:
        """The bit pattern of fp32, int32."""

    def from_bits(self, bits: Value) -> Value:
        """The fp32 value that has this bit pattern, int32."""

    def shift_right(self, bits: Value, count: int) -> Value:
        """Shifts int32. Values of Inductor IR have no ``>>``, whose name torch misspells (`OpsValue`, 2.11 to 2.13)."""

    def quotient(self, a: Value | float, b: Value | float) -> Value:
        """IEEE's, of fp32; one of both may be a number."""

    def square(self, value: Value) -> Value:
        """The square of fp32, rounded before anything is added to it."""


class Torch:
    """Constants are Python's numbers, which take their dtype from the tensor beside them."""

    def fp32(self, number: float) -> Value:
        return float(number)

    def int32(self, number: int) -> Value:
        return number

    def where(self, condition: Tensor, a: Value, b: Value) -> Tensor:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return torch.where(condition, a, b)
        dtype = torch.float32 if isinstance(a, float) else torch.int32  # and not what torch has for numbers alone
        a, b = (torch.full((), number, dtype=dtype, device=condition.device) for number in (a, b))
        return torch.where(condition, a, b)

    def decrement(self, code: Value, condition: Tensor) -> Tensor:
        return code - condition.to(torch.uint8)  # type: ignore[no-any-return]

    def both(self, a: Tensor, b: Tensor) -> Tensor:
        return a & b

    def convert(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype)

    def bits(self, value: Tensor) -> Tensor:
        return value.view(torch.int32)

    def from_bits(self, bits: Tensor) -> Tensor:
        return bits.view(torch.float32)

    def shift_right(self, bits: Tensor, count: int) -> Tensor:
        return bits >> count

    def quotient(self, a: Value | float, b: Value | float) -> Tensor:
        """Tensor by tensor: torch evaluates `number / tensor` as a product with the reciprocal, which rounds twice."""
        like: Value = a if isinstance(a, Tensor) else b
        a, b = (one if isinstance(one, Tensor) else torch.full_like(like, one) for one in (a, b))
        return a / b  # type: ignore[no-any-return]

    def square(self, value: Tensor) -> Tensor:
        return value * value


TORCH: Algebra = Torch()
