"""CUTLASS's GEMMs: which kernels there are, and what each computes.

`cutlass_tables.py` says where one is faster than cuBLASLt. Nothing is timed when a model is compiled, except under
max-autotune, where all of `CANDIDATES` take part. Those of Blackwell have never been measured or run: cuBLASLt
multiplies there unless max-autotune finds one of them to be faster."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from te_inductor.kernels import cutlass_packages
from te_inductor.kernels.problem import ANOTHER, NOTHING, OUTPUT, Problem
from te_inductor.numerics.activation import PointwiseStep
from te_inductor.numerics.scaled_products import BLOCK_SCALES
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import (
    BLOCK_1X128,
    BLOCK_128X128,
    E2M1,
    E4M3,
    E5M2,
    MX_1X32,
    NV_1X16,
    ROW,
    TENSOR,
)

# What kernels there are for, by `Target.cutlass`: the scopes of scales.
ARCHITECTURES = {
    "90": (TENSOR.name, ROW.name, BLOCK_1X128.name, BLOCK_128X128.name),
    "100": (MX_1X32.name, NV_1X16.name),
    "120": (MX_1X32.name, NV_1X16.name),
}
FP8 = (E4M3.dtype, E5M2.dtype)
OPERANDS = {**dict.fromkeys(ARCHITECTURES["90"], FP8), MX_1X32.name: FP8, NV_1X16.name: (E2M1.library,)}
# dtypes of the output, by what is added to the product.
OUTPUTS = {
    NOTHING: (torch.bfloat16, torch.float16),
    OUTPUT: (torch.float32,),
    ANOTHER: (torch.bfloat16, torch.float16),
}
ROUNDED = torch.bfloat16  # what the sum is rounded to before an activation reads it and a cast to FP8 is stored
# Accumulators that a thread may hold, by how many warp groups multiply: of its 240, or 160 registers.
REGISTERS = {1: 208, 2: 208, 3: 136}
# What the tensor memory accelerator asks of strides and bases, in bytes. cuBLASLt, which multiplies where a kernel
# could not be built, asks for as many columns.
ALIGNED = 16

Shape = tuple[int, int, int, int, bool, int]  # the fields of a `Tile`
Steps = tuple[tuple[PointwiseStep, ...], tuple[int, int]]  # the steps and the results of a `Gating`


@constant
class Tile(Constant):
    """How the output is cut, and by how many warp groups a piece is made."""

    m: int  # rows of the output that one thread block computes at a time
    n: int  # columns
    cluster_m: int  # thread blocks along M that share what they load of b
    cluster_n: int  # along N, of a
    pingpong: bool  # two warp groups take turns, one storing a tile while the other multiplies; else they share a tile
    swizzle: int  # how many tiles along one dimension follow each other, so that L2 serves the other operand

    @property
    def shape(self) -> Shape:
        return self.m, self.n, self.cluster_m, self.cluster_n, self.pingpong, self.swizzle

    def __str__(self) -> str:
        way = "pingpong" if self.pingpong else "cooperative"
        return f"{self.m}x{self.n} cluster {self.cluster_m}x{self.cluster_n} {way} swizzle {self.swizzle}"


# Split accumulation holds a second accumulator in registers: smaller tiles.
FAST_TILES = (
    Tile(128, 192, 2, 1, True, 8),
    Tile(128, 192, 2, 1, True, 16),
    Tile(128, 192, 1, 2, True, 8),
    Tile(128, 192, 1, 2, True, 16),
    Tile(192, 128, 1, 2, True, 8),
    Tile(192, 128, 2, 1, True, 16),
    Tile(256, 160, 2, 1, False, 8),
)
SPLIT_TILES = (
    Tile(192, 128, 1, 2, False, 8),
    Tile(192, 128, 2, 1, False, 8),
    Tile(128, 192, 2, 1, False, 8),
    Tile(128, 128, 2, 1, False, 8),
)
# The tiles with an activation and a cast in the epilogue: larger ones, whose registers it spills, lost at every shape.
QUANTIZED_TILES = (
    Tile(128, 160, 2, 1, True, 8),
    Tile(128, 128, 2, 1, True, 8),
    Tile(256, 128, 2, 1, False, 8),
)
# The tile of the kernel for scales of blocks (block_scaled.py), which is made for one tile.
BLOCK_TILE = (256, 128)
BLOCK_TILES = (
    Tile(*BLOCK_TILE, 1, 2, False, 8),
    Tile(*BLOCK_TILE, 2, 1, False, 8),
    Tile(*BLOCK_TILE, 1, 1, False, 8),
)
# quack's defaults, by size: not measured, never run. Two thread blocks of a cluster are one tile of 256 rows.
SM100_TILES = (
    Tile(256, 256, 2, 1, False, 8),
    Tile(256, 192, 2, 1, False, 8),
    Tile(256, 128, 2, 1, False, 8),
    Tile(128, 128, 1, 1, False, 8),
)
SM120_TILES = (
    Tile(128, 128, 1, 1, True, 8),
    Tile(128, 128, 1, 1, False, 8),
)
# What max-autotune measures, by architecture and `fast_accum`; BLOCK_TILES it does not.
CANDIDATES = {
    ("90", True): FAST_TILES,
    ("90", False): SPLIT_TILES,
    ("100", False): SM100_TILES,
    ("120", False): SM120_TILES,
}


def architecture(problem: Problem) -> str | None:
    """The key of ARCHITECTURES; None where there are no kernels for it, or CUTLASS is not installed."""
    usable = not problem.program.cpp_wrapper and cutlass_packages.missing() is None
    return problem.target.cutlass if usable else None


def scope_of(problem: Problem) -> str | None:
    """What has one scale in a and in b, but a has blocks of one row where b has square ones; None where there is no
    kernel: square blocks on the left, scales of one block."""
    a, b = problem.gemm.granularities
    if not problem.gemm.blocked:
        return a.name
    if problem.gemm.microscaled:  # square blocks are spread to rows' for the tensor core
        return f"1x{a.block[1]}"
    blocks = -(-problem.sizes.k // a.alignment)
    if not a.one_row or blocks == 1:
        return None
    return BLOCK_1X128.name if blocks % BLOCK_SCALES else b.name  # as `block_operands` spreads them


def operands(problem: Problem) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes that kernels read."""
    a, b = problem.gemm.formats
    return (a.library, b.library) if problem.gemm.microscaled else (a.dtype, b.dtype)


def supports(tile: Tile, problem: Problem) -> bool:
    """Whether the kernel of this tile computes this problem, of known sizes, and is worth building for it."""
    arch, scope, (m, n, k) = problem.target.cutlass, scope_of(problem), _sizes(problem)
    return (
        arch is not None
        and scope in ARCHITECTURES[arch]
        and set(operands(problem)) <= set(OPERANDS[scope])
        and _stores(problem)
        and k % (ALIGNED * problem.gemm.packed) == 0
        and n % ALIGNED == 0
        and m >= tile.m * tile.cluster_m // (2 if _is_of_two(tile, arch) else 1)
        and n >= tile.n * tile.cluster_n
        and (_fits_hopper if arch == "90" else _fits_blackwell)(tile, problem)
    )


def _sizes(problem: Problem) -> tuple[int, int, int]:
    sizes = problem.sizes
    return sizes.m, sizes.n, sizes.k


def _stores(problem: Problem) -> bool:
    """Whether there is an epilogue that makes this output."""
    more = problem.epilogue
    if more.activation is None and more.gating is None:
        return problem.out in OUTPUTS[more.added]
    scope = TENSOR if more.gating is None else BLOCK_128X128
    made = (problem.target.cutlass, scope_of(problem), more.added)
    return problem.out in FP8 and made == ("90", scope.name, NOTHING)


def _is_of_two(tile: Tile, arch: str) -> bool:
    """Whether two thread blocks of a cluster make one tile."""
    return arch == "100" and tile.m == 256 and tile.cluster_m % 2 == 0


def _fits_blackwell(tile: Tile, problem: Problem) -> bool:
    """What quack 0.6.5 takes with scales of blocks (gemm_config.blockscaled_config_ok)."""
    clusters = (tile.cluster_m, tile.cluster_n)
    if problem.target.cutlass == "120":
        shape = tile.n in (128, 256) and clusters == (1, 1)
    else:
        shape = tile.n % 64 == 0 and 64 <= tile.n <= 256 and max(clusters) <= 4 and not tile.pingpong
    return shape and tile.m in (128, 256) and not problem.gemm.fast_accum


def _fits_hopper(tile: Tile, problem: Problem) -> bool:
    if problem.gemm.blocked:
        return _fits_blocks(tile, problem)
    fast = problem.gemm.fast_accum
    kept = (2 if not fast else 1) * tile.m * tile.n  # fp32 values in the registers of the warp groups
    groups = 1 if tile.pingpong else (3 if tile.m == 192 and tile.n <= 128 else 2)
    return kept // (groups * 128) <= REGISTERS[groups] and (fast or not tile.pingpong)


def _fits_blocks(tile: Tile, problem: Problem) -> bool:
    """Sizes that blocks and tiles divide, as the measured ones are; clusters too, where a tile is of two matrices."""
    more, (m, n, k) = problem.epilogue, _sizes(problem)
    plain = not (more.bias or problem.gemm.fast_accum or tile.pingpong) and more.added != OUTPUT
    across = (1, 1) if more.gating is None else (tile.cluster_m, tile.cluster_n)
    whole = m % (tile.m * across[0]) == n % (tile.n * across[1]) == 0 and k % BLOCK_1X128.alignment == 0
    return plain and whole and (tile.m, tile.n) == BLOCK_TILE and tile.cluster_m * tile.cluster_n <= 2


def tiles(problem: Problem) -> list[Tile]:
    """All that are measured."""
    arch, fast = problem.target.cutlass, problem.gemm.fast_accum
    of_blocks = arch == "90" and problem.gemm.blocked
    candidates = BLOCK_TILES if of_blocks else CANDIDATES.get((arch or "", fast), ())
    if problem.epilogue.activation is not None and fast:
        candidates = QUANTIZED_TILES
    return [tile for tile in candidates if supports(tile, problem)]


@dataclass(frozen=True)
class Kernel:
    """What one built library computes: everything of a problem and a tile but sizes and the order of tiles."""

    arch: str
    a: str  # dtypes, as torch spells them behind "torch."
    b: str
    out: str
    scope: str
    bias: bool
    fast_accum: bool
    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool
    added: str
    activation: tuple[PointwiseStep, ...] | None  # and a cast: an FP8 output
    gating: Steps | None = None  # of a `Gating`, and casts both ways

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def kernel(problem: Problem, tile: Tile) -> Kernel:
    """What has to be built to compute a problem so."""
    more, scope, arch = problem.epilogue, scope_of(problem), problem.target.cutlass
    assert scope is not None and arch is not None
    steps = None if more.activation is None else more.activation.steps
    gating = None if more.gating is None else (more.gating.steps, more.gating.results)
    kind: Any = (scope, more.bias, problem.gemm.fast_accum, more.added, steps, gating)
    return kernel_of(tile, arch, *operands(problem), problem.out, *kind)


def kernel_of(
    tile: Tile,
    arch: str,
    a: torch.dtype,
    b: torch.dtype,
    out: torch.dtype,
    scope: str,
    bias: bool,
    fast_accum: bool,
    added: str = NOTHING,
    activation: tuple[PointwiseStep, ...] | None = None,
    gating: Steps | None = None,
) -> Kernel:
    a_name, b_name, out_name = (str(dtype).removeprefix("torch.") for dtype in (a, b, out))
    shape = (tile.m, tile.n, tile.cluster_m, tile.cluster_n, tile.pingpong)
    return Kernel(arch, a_name, b_name, out_name, scope, bias, fast_accum, *shape, added, activation, gating)
