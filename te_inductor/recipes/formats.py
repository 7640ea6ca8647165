"""Element formats and scopes of scales as data. A format is always named, never inferred from a dtype or a shape."""

import enum
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Element:
    """One low-precision number format.

    Every finite value is ``m * 2**e`` with ``m`` an integer of `mantissa_bits + 1` bits; rounding is to nearest even.
    """

    name: str
    dtype: torch.dtype
    max: float  # largest finite magnitude; casts saturate to it
    mantissa_bits: int  # stored bits, without the implicit one
    min_exponent: int  # exponent of the smallest normal value

    @property
    def epsilon(self) -> float:
        """Spacing of normal values relative to their magnitude: a rounding is off by at most half of it."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_step(self) -> float:
        """Spacing of subnormal values (absolute)."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


# OCP 8-bit Floating Point Specification, revision 1.0, table 1.
E4M3 = Element("e4m3", torch.float8_e4m3fn, max=448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = Element("e5m2", torch.float8_e5m2, max=57344.0, mantissa_bits=2, min_exponent=-14)

ELEMENTS = {element.name: element for element in (E4M3, E5M2)}


@dataclass(frozen=True)
class Scope:
    """Which elements of an (R, C) tensor share one scale: those that its amax is taken over."""

    name: str
    reduced: tuple[int, ...]  # dimensions of the amax
    transposes: bool  # the transpose has the same scales

    @property
    def keepdim(self) -> bool:
        """Whether scales are laid out so as to broadcast along the reduced dimension."""
        return not self.transposes

    def scale_shape(self, rows: int) -> tuple[int, ...]:
        """Of the scales of an (R, C) tensor: () or (R, 1), which broadcasts to it."""
        return (rows, 1) if self.keepdim else ()


TENSOR = Scope("tensor", reduced=(0, 1), transposes=True)
ROW = Scope("row", reduced=(1,), transposes=False)

SCOPES = {scope.name: scope for scope in (TENSOR, ROW)}


class Format(enum.Enum):
    """Which element forward tensors and gradients use; TransformerEngine's names."""

    E4M3 = ("e4m3", "e4m3")
    HYBRID = ("e4m3", "e5m2")

    @property
    def forward(self) -> Element:
        return ELEMENTS[self.value[0]]

    @property
    def backward(self) -> Element:
        return ELEMENTS[self.value[1]]
