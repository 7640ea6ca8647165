"""Rounding to one value of a format, and what else the oracle's files share. See `casts.py`."""

import ctypes
import math

import torch
from torch import Tensor

from te_inductor.recipes.formats import Element

FP32_MAX = (2 - 2.0**-23) * 2.0**127


def round_to_element(
    x: Tensor,  # (...) float64
    element: Element,
) -> Tensor:  # (...) float64, values of the element
    """Round to nearest, ties to even; saturate, infinities too; keep NaN and the sign of zero.

    Source: OCP 8-bit Floating Point Specification, revision 1.0, section 5.2.1 (saturating mode).
    """
    x = x.clamp(-element.max, element.max)  # max is a value of the element, so clamping first changes no rounding
    _, exponent = torch.frexp(torch.where(x.isnan(), 0.0, x))  # x = f * 2**exponent, 1/2 <= |f| < 1
    leading = (exponent - 1).clamp(min=element.min_exponent)  # exponent of the leading bit, or of a subnormal's
    step = _power_of_two(leading - element.mantissa_bits)
    return torch.round(x / step) * step  # torch.round takes ties to even; x / step is exact


def _power_of_two(exponent: Tensor) -> Tensor:
    """2.0**exponent for int exponents of normal float64 values, exact (`torch.pow` need not be)."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def fp32(value: float) -> float:
    """Round to fp32, to nearest even. Of a float64 quotient of two fp32 values this is the IEEE fp32 quotient: a
    quotient that is no tie differs from every tie (25 bits or fewer) by 2**-49 of itself, and float64 rounds to
    2**-53."""
    return ctypes.c_float(value).value


def amaxes(rows: Tensor) -> list[float]:
    """The largest magnitude of each row; NaN if any value is NaN; 0 of an empty row."""
    if rows.numel() == 0:
        return [0.0] * rows.shape[0]
    found = torch.maximum(-rows.min(1).values, rows.max(1).values).abs()  # of zeros +0
    return torch.where(rows.isnan().any(1), math.nan, found).tolist()  # type: ignore[no-any-return]


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """x with zeros below and to its right, up to multiples of `rows` and `columns`."""
    whole = x.new_zeros((-(-x.shape[0] // rows) * rows, -(-x.shape[1] // columns) * columns))
    whole[: x.shape[0], : x.shape[1]] = x
    return whole
