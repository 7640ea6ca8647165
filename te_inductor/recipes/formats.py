"""Element formats and scopes of scales as data. A format is always named, never inferred from a dtype or a shape.

An element is torch's dtype, which torch converts to, or it is stored as codes in bytes, which `numerics/arithmetic.py`
makes of its numbers. Kernels know the elements and the scopes that are here and no others: one that is not here is refused,
and does not run as if it were another."""

import enum
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from te_inductor.errors import RecipeError


@dataclass(frozen=True)
class Element:
    """One low-precision number format.

    Every finite value is ``m * 2**e`` with ``m`` an integer of `mantissa_bits + 1` bits; rounding is to nearest even. A
    code has a sign, an exponent, which is 1 of the smallest normal values, and the stored mantissa; all codes are finite.

    Raises:
        RecipeError: values that no cast to the dtype makes.
    """

    name: str
    dtype: torch.dtype
    max: float  # largest finite magnitude; casts saturate to it
    mantissa_bits: int  # stored bits, without the implicit one
    min_exponent: int  # exponent of the smallest normal value
    packed: int = 1  # values in one stored byte, the first in its low bits
    viewed: torch.dtype | None = None  # as what libraries ask for its bytes, where that is not dtype
    bits: int = 8  # of a value

    def __post_init__(self) -> None:
        found = Values(self.max, self.mantissa_bits, self.min_exponent)
        expected = found.of_codes(self.bits) if self.coded else Values.of(self.dtype) if self.dtype in _FP8 else None
        if found != expected or self.packed * self.bits > 8 or (self.packed > 1 and not self.coded):
            raise RecipeError(
                f"element {self.name!r} has {found}, and is stored {self.packed} a {self.dtype} of {self.bits} bits each,"
                f" whose casts make {expected or 'nothing'}; expected one of te_inductor.recipes.formats.ELEMENTS"
            )

    @property
    def coded(self) -> bool:
        """Whether it is stored as codes in bytes, of which torch has no dtype that it computes with."""
        return self.dtype == torch.uint8

    @property
    def library(self) -> torch.dtype:
        return self.viewed or self.dtype

    @property
    def epsilon(self) -> float:
        """Spacing of normal values relative to their magnitude: a rounding is off by at most half of it."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_step(self) -> float:
        """Spacing of subnormal values (absolute)."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


class Values(NamedTuple):
    """The finite values of an element, named as there."""

    max: float
    mantissa_bits: int
    min_exponent: int

    def __str__(self) -> str:
        return (
            f"values up to {self.max:g}, {self.mantissa_bits} bits of mantissa and exponents from {self.min_exponent}"
        )

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Values":
        """The values that torch converts to."""
        info = torch.finfo(dtype)
        return cls(info.max, -round(math.log2(info.eps)), round(math.log2(info.smallest_normal)))

    def of_codes(self, bits: int) -> "Values | None":
        """The values of codes of so many bits, with this mantissa and this smallest exponent."""
        exponents = 2 ** (bits - 1 - self.mantissa_bits) - 1  # of normal values
        if not 1 <= self.mantissa_bits < bits <= 8 or exponents < 1:
            return None
        return self._replace(max=(2 - 2.0**-self.mantissa_bits) * 2.0 ** (self.min_exponent + exponents - 1))


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # which kernels cast to, by the hardware's conversion

# OCP 8-bit Floating Point Specification, revision 1.0, table 1.
E4M3 = Element("e4m3", torch.float8_e4m3fn, max=448.0, mantissa_bits=3, min_exponent=-6)
E5M2 = Element("e5m2", torch.float8_e5m2, max=57344.0, mantissa_bits=2, min_exponent=-14)
# OCP Microscaling Formats Specification, revision 1.0, table 2: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, neither infinity
# nor NaN. torch.float4_e2m1fn_x2 has no arithmetic and no kernels yet: bytes, viewed as that dtype where a library
# asks.
E2M1 = Element(
    "e2m1", torch.uint8, 6.0, mantissa_bits=1, min_exponent=0, packed=2, viewed=torch.float4_e2m1fn_x2, bits=4
)

# The same table, FP6: neither infinity nor NaN, one a byte. No tensor core that is used here multiplies them.
E3M2 = Element("e3m2", torch.uint8, max=28.0, mantissa_bits=2, min_exponent=-2, bits=6)
E2M3 = Element("e2m3", torch.uint8, max=7.5, mantissa_bits=3, min_exponent=0, bits=6)

ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {element.name: element for element in (E4M3, E5M2, E2M1, E3M2, E2M3)}
)


@dataclass(frozen=True)
class ScaleFormat:
    """How `scale_inv`, which multiplies low-precision values, is stored."""

    name: str
    dtype: torch.dtype
    viewed: torch.dtype | None = None  # as what libraries ask for its bytes, where that is not dtype

    @property
    def library(self) -> torch.dtype:
        return self.viewed or self.dtype


FP32 = ScaleFormat("fp32", torch.float32)
# The value 2**(code - 127), NaN where the code is 255. Codes, and not torch.float8_e8m0fnu, which Inductor's C++ cannot
# store and its Triton code cannot compute (torch 2.13): a view where a library asks for that dtype costs nothing.
E8M0 = ScaleFormat("e8m0", torch.uint8, viewed=torch.float8_e8m0fnu)
# NVFP4's, of two levels: scale_inv of a block, in units of one fp32 factor of the whole tensor, `amax / (6 * 448)`.
# Invariant: ``x ~= data * expand(scale_inv) * factor``. The product of data and scale_inv is exact in bf16: of E2M1 and
# E4M3 values it has 6 significant bits, and lies between 2**-10 and 2688, or is 0.
TWO_LEVEL = ScaleFormat(E4M3.name, E4M3.dtype)

# The random Hadamard transform of NVFP4: 16 values along the contraction times these signs, times the
# Sylvester-Hadamard matrix of that size over 4. The signs are TransformerEngine's.
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
HADAMARD = len(HADAMARD_SIGNS)


# Both operands of a GEMM are stored with their contraction dimension last and padded with zeros to this many elements:
# cuBLASLt's fp8 GEMM wants 16-byte rows. A zero contributes nothing to a sum, so padding is exact.
ALIGNMENT = 16
# The most rows or columns of a weight: kernels count places inside a tile, which is up to 256 rows long, in 32 bits.
LONGEST = 2**23

FP16_OVERFLOW = 65520.0  # what is rounded to fp16 is infinite from here on

# How sizes are divided; of Inductor's symbols `FloorDiv`, as their own `//` makes a fraction, which torch takes for no
# size that it knows.
Division = Callable[[int, int], int]


def padded(size: int, alignment: int = ALIGNMENT, *, floordiv: Division = operator.floordiv) -> int:
    """`size` rounded up to a multiple of `alignment`; works on symbolic sizes, and leaves known multiples as they
    are."""
    return floordiv(size + alignment - 1, alignment) * alignment


@dataclass(frozen=True)
class Scope:
    """A choice of which elements of an (R, C) tensor share one scale: those of a block of it. A GEMM contracts C.

    Blocks at the edge may be cut off: the rest of them is zeros. Scales are stored () of the tensor, (R, 1) of its
    rows. Of blocks they are a matrix (R/rows, C/columns), where `row_last` its transpose, so that those of all rows lie
    beside each other; it is stored in one dimension, row by row. With two, torch would compile an R or C of one block
    apart from those of several: it guards on each size that may be 1."""

    name: str
    block: tuple[int, int]  # its rows and columns; 0: all there are
    alignment: int = ALIGNMENT  # what C is padded to
    scale: ScaleFormat = FP32
    elements: tuple[str, ...] = ("e4m3", "e5m2")  # what may be scaled so
    row_last: bool = False

    @property
    def transposes(self) -> bool:
        """Whether the transpose has the same blocks, hence the transposed scales and the transposed values."""
        return self.block[0] == self.block[1]

    @property
    def whole(self) -> bool:
        """Whether the tensor has one scale."""
        return self.block == (0, 0)

    @property
    def blocked(self) -> bool:
        """Whether one row has several scales, so that a GEMM has to apply them inside its sum."""
        return self.block[1] != 0

    @property
    def one_row(self) -> bool:
        """Whether it is blocks of one row that have the scales."""
        return self.blocked and self.block[0] == 1

    @property
    def microscaled(self) -> bool:
        """Whether it is one of the formats that Blackwell's tensor cores scale themselves."""
        return self.scale is not FP32

    @property
    def two_level(self) -> bool:
        """Whether the tensor has a factor besides the scales of its blocks."""
        return self.scale is TWO_LEVEL

    def blocks(self, rows: int, columns: int, *, floordiv: Division = operator.floordiv) -> tuple[int, int]:
        """How many blocks there are along each dimension, those of padding too; works on symbolic sizes."""
        high, wide = self.block

        def count(size: int, block: int) -> int:
            return floordiv(size + self.alignment - 1, self.alignment) * (self.alignment // block)

        down = (rows if high == 1 else count(rows, high)) if high else 1
        return down, count(columns, wide) if wide else 1

    def scale_matrix(self, rows: int, columns: int, *, floordiv: Division = operator.floordiv) -> tuple[int, int]:
        """The matrix that scales of blocks are, of an (R, C) tensor."""
        down, across = self.blocks(rows, columns, floordiv=floordiv)
        return (across, down) if self.row_last else (down, across)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the stored scales of an (R, C) tensor."""
        if self.whole:
            return ()
        down, across = self.blocks(rows, columns)
        return (down * across,) if self.blocked else (down, across)


TENSOR = Scope("tensor", block=(0, 0))
ROW = Scope("row", block=(1, 0))
# cuBLASLt's K need only be a multiple of 16 here too; of 128 is what TransformerEngine asks for and what PyTorch tests.
BLOCK_1X128 = Scope("1x128", block=(1, 128), alignment=128, row_last=True)
BLOCK_128X128 = Scope("128x128", block=(128, 128), alignment=128)
# OCP Microscaling Formats, MXFP8, MXFP6 and MXFP4. Square blocks are TransformerEngine's, of weights.
_MX = tuple(ELEMENTS)
MX_1X32 = Scope("1x32", block=(1, 32), alignment=32, scale=E8M0, elements=_MX)
MX_32X32 = Scope("32x32", block=(32, 32), alignment=32, scale=E8M0, elements=_MX)
# NVFP4, of training and of stored weights (1 x 16). 32 values are the 16 bytes that a row of a GEMM operand must be a
# multiple of; stored weights, which no library multiplies, are padded to a block.
NV_1X16 = Scope("1x16", block=(1, 16), alignment=32, scale=TWO_LEVEL, elements=(E2M1.name,))
NV_16X16 = Scope("16x16", block=(16, 16), alignment=32, scale=TWO_LEVEL, elements=(E2M1.name,))

SCOPES: Mapping[str, Scope] = MappingProxyType(
    {scope.name: scope for scope in (TENSOR, ROW, BLOCK_1X128, BLOCK_128X128, MX_1X32, MX_32X32, NV_1X16, NV_16X16)}
)


class Format(enum.Enum):
    """The elements that forward tensors and gradients use, by TransformerEngine's names."""

    E4M3 = ("e4m3", "e4m3")
    HYBRID = ("e4m3", "e5m2")
    E2M1 = ("e2m1", "e2m1")

    @property
    def forward(self) -> Element:
        return ELEMENTS[self.value[0]]

    @property
    def backward(self) -> Element:
        return ELEMENTS[self.value[1]]
