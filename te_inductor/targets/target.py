"""What the package asks about a device, as one record."""

import enum
from dataclasses import dataclass

from te_inductor.diagnostics import Refusal
from te_inductor.recipes import Gemm


@dataclass(frozen=True)
class Rates:
    """Rates of one product, by which the size rule weighs a graph (passes/pre_grad/decide/size_rule.py)."""

    product: str  # what the device's name begins with; "" is every other of the family
    source: str  # where they come from, as reports say it
    bf16_flops: float  # per second, of GEMMs in whole training steps
    fp8_flops: float  # the same, with scales of tensors or rows
    block_flops: float  # the same, with scales of blocks
    bytes: float  # per second, of kernels that cast
    launch: float  # seconds of the device that one more kernel costs
    host_launch: float  # seconds that Python takes to launch one kernel


@dataclass(frozen=True)
class Limits:
    """What kernels share of a device."""

    multiprocessors: int
    shared_memory: int  # bytes that one thread block may have
    l2: int  # bytes of cache


class Ability(enum.Flag):
    """What a device does, of things that it does or not."""

    NONE = 0
    FP8 = enum.auto()  # its tensor cores multiply FP8 operands
    BLOCK_SCALES = enum.auto()  # torch._scaled_mm takes fp32 scales of 1 x 128 and 128 x 128 blocks
    NVFP4_KERNELS = enum.auto()  # it runs the Triton kernels of stored NVFP4 weights: mul.bf16x2, griddepcontrol
    GROUPED_KERNELS = enum.auto()  # those of grouped FP8 GEMMs
    HOPPER_KERNELS = enum.auto()  # those of wgmma: FP8 GEMMs of few rows, NVFP4 values decoded to E4M3
    DECODE_ATTENTION = enum.auto()  # the kernel of few queries


@dataclass(frozen=True)
class Target:
    """A device, as far as the package is concerned. A field that is left out means that the device cannot do it."""

    name: str  # as messages have it: "cpu", "compute capability 9.0"
    capability: tuple[int, int] | None = None  # of an NVIDIA GPU
    cuda: str | None = None  # that torch was built for
    refusal: Refusal | None = None  # why no layer runs in low precision on it
    can: Ability = Ability.NONE
    # What torch._scaled_mm takes whose scales tensor cores apply: elements and scopes of rows.
    microscaled_mm: tuple[tuple[str, str], ...] = ()
    cutlass: str | None = None  # the architecture whose kernels templates/cutlass builds
    grouped_microscaled_mm: tuple[tuple[str, str], ...] = ()  # likewise of torch._scaled_grouped_mm and its v2
    rates: tuple[Rates, ...] = ()  # by product; none: nothing was measured, no layer is left out for its size
    product: str = ""  # the device's name, by which tables of measurements are found
    limits: Limits = Limits(0, 0, 0)

    def __hash__(self) -> int:
        return hash((self.name, self.cuda, self.product))  # what tells devices apart; eager layers hash it at each call

    @property
    def is_gpu(self) -> bool:
        """Whether it is one that kernels of ours are for."""
        return self.capability is not None

    def multiplies(self, gemm: Gemm) -> bool:
        """Whether tensor cores multiply a GEMM's operands, and torch's library applies their scales, or they do. Square
        blocks of microscaled operands are spread to rows'."""
        if gemm.microscaled:
            return set(_rows_of(gemm)) <= set(self.microscaled_mm)
        return (Ability.BLOCK_SCALES if gemm.blocked else Ability.FP8) in self.can

    def multiplies_groups(self, gemm: Gemm) -> bool:
        """The same of a product for each group, whose two operands are of one kind."""
        return len(kinds := set(_rows_of(gemm))) == 1 and kinds <= set(self.grouped_microscaled_mm)


def _rows_of(gemm: Gemm) -> list[tuple[str, str]]:
    """Returns each operand's element, and the scope of rows that has as many scales along K as its own."""
    return [(element, f"1x{scope.block[1]}") for element, scope in zip(gemm.elements, gemm.granularities, strict=True)]


def version(cuda: str | None) -> tuple[int, int]:
    """The version of a CUDA, to be compared; (0, 0) of none."""
    major, minor = (cuda or "0.0").split(".")[:2]
    return int(major), int(minor)


def named(capability: tuple[int, int]) -> str:
    return "compute capability {}.{}".format(*capability)
