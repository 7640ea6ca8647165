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

# OCP Microscaling Formats Specification, revision 1.0, table 3. No infinity, no NaN. Bits: sign, two of exponent, one of
# mantissa; stored two a byte, the first value in the low nibble.
E2M1 = Element("e2m1", torch.uint8, max=6.0, mantissa_bits=1, min_exponent=0)

# Those of a byte each, with a dtype of their own.
ELEMENTS = {element.name: element for element in (E4M3, E5M2)}


@dataclass(frozen=True)
class TwoLevel:
    """A format with two levels of scales: one of `scale` a block, and one fp32 for the tensor.

    Invariant: ``x ~= data * expand(block_scale) * tensor_scale``. The product of data and block scale is exact in bf16: of
    E2M1 and E4M3 values it has 6 significant bits, and lies between 2**-10 and 2688, or is 0.
    """

    name: str
    element: Element
    scale: Element
    block: tuple[int, int]  # rows and columns that share one block scale; a GEMM contracts the columns


NVFP4 = TwoLevel("nvfp4", element=E2M1, scale=E4M3, block=(1, 16))


# Both operands of a GEMM are stored with their contraction dimension last and padded with zeros to this many elements:
# cuBLASLt's fp8 GEMM wants 16-byte rows. A zero contributes nothing to a sum, so padding is exact.
ALIGNMENT = 16


@dataclass(frozen=True)
class Scope:
    """Which elements of an (R, C) tensor share one scale: those of a block of it. A GEMM contracts C.

    Blocks at the edge may be cut off. Scales are stored as the GEMM library reads them: () of the tensor, (R, 1) of its
    rows; of blocks of whole columns of blocks (R/rows, C/columns), and of blocks of one row (C/columns, R), so that the
    scales of all rows lie beside each other.
    """

    name: str
    block: tuple[int, int]  # its rows and columns; 0: all there are
    alignment: int = ALIGNMENT  # what C is padded to

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
    def row_last(self) -> bool:
        """Whether scales are stored (C/columns, R)."""
        return self.blocked and self.block[0] == 1

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """How many blocks there are along each dimension; works on symbolic sizes."""
        sizes = zip((rows, columns), self.block, strict=True)
        down, across = ((size + block - 1) // block if block else 1 for size, block in sizes)
        return down, across

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Of the stored scales of an (R, C) tensor."""
        if self.whole:
            return ()
        down, across = self.blocks(rows, columns)
        return (across, down) if self.row_last else (down, across)


TENSOR = Scope("tensor", block=(0, 0))
ROW = Scope("row", block=(1, 0))
# cuBLASLt's K need only be a multiple of 16 here too; of 128 is what TransformerEngine asks for and what PyTorch tests.
BLOCK_1X128 = Scope("1x128", block=(1, 128), alignment=128)
BLOCK_128X128 = Scope("128x128", block=(128, 128), alignment=128)

SCOPES = {scope.name: scope for scope in (TENSOR, ROW, BLOCK_1X128, BLOCK_128X128)}


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
