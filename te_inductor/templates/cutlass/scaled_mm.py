"""Low-precision GEMMs by CUTLASS: which kernels there are, and what each computes.

`tables.py` says where one is faster than cuBLASLt. Nothing is timed when a model is compiled, except under max-autotune,
where all of `CANDIDATES` take part. Those of Blackwell have never been measured or run: cuBLASLt multiplies there unless
max-autotune finds one of them to be faster."""

import json
from dataclasses import asdict, dataclass

import torch

from te_inductor import targets
from te_inductor.numerics.activation import Activation, Gating, PointwiseStep
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
    SCOPES,
    TENSOR,
)
from te_inductor.templates import cutlass

# What kernels there are for, by `Target.cutlass`: the scopes of scales.
ARCHITECTURES = {
    "90": (TENSOR.name, ROW.name, BLOCK_1X128.name, BLOCK_128X128.name),
    "100": (MX_1X32.name, NV_1X16.name),
    "120": (MX_1X32.name, NV_1X16.name),
}
FP8 = (E4M3.dtype, E5M2.dtype)
OPERANDS = {**dict.fromkeys(ARCHITECTURES["90"], FP8), MX_1X32.name: FP8, NV_1X16.name: (E2M1.library,)}
# dtypes of the output, by what is added to the product: nothing; what the output held, in place; another tensor like
# it.
NOTHING, OUTPUT, ANOTHER = "nothing", "output", "another"
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


@dataclass(frozen=True)
class Problem:
    """``out[M, N] = (a * a_scale)[M, K] @ (b * b_scale)[N, K].T * alpha + bias + added``, a and b contiguous along K;
    alpha, of scales of two levels, is what the tensors' factors come to. With an activation `out` is FP8, the cast of
    ``activation(rounded sum) * scale``; with a gating both copies of ``gating(sum, gate, up)``, side by side."""

    arch: str  # a key of ARCHITECTURES
    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    scope: str  # what has one scale in a and in b; but a has blocks of one row where b has square ones
    bias: bool
    fast_accum: bool  # Hopper: in the tensor core's own precision; else promoted to fp32 every 128 elements of K
    added: str = NOTHING  # a key of OUTPUTS
    activation: Activation | None = None
    gating: Gating | None = None

    def kernel(self, tile: Tile) -> "Kernel":
        """What has to be built to compute it so."""
        steps = None if self.activation is None else self.activation.steps
        gating = None if self.gating is None else (self.gating.steps, self.gating.results)
        kind = (self.scope, self.bias, self.fast_accum, self.added, steps, gating)
        return kernel_of(tile, self.arch, self.a, self.b, self.out, *kind)


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


def supports(tile: Tile, problem: Problem) -> bool:
    """Whether the kernel of this tile computes this problem, and is worth building for it."""
    fits = _fits_hopper if problem.arch == "90" else _fits_blackwell
    operands = OPERANDS[problem.scope]
    packed = E2M1.packed if problem.a == E2M1.library else 1
    return (
        problem.scope in ARCHITECTURES[problem.arch]
        and problem.a in operands
        and problem.b in operands
        and _stores(problem)
        and problem.k % (ALIGNED * packed) == 0
        and problem.n % ALIGNED == 0
        and problem.m >= tile.m * tile.cluster_m // (2 if _is_of_two(tile, problem) else 1)
        and problem.n >= tile.n * tile.cluster_n
        and fits(tile, problem)
    )


def _stores(problem: Problem) -> bool:
    """Whether there is an epilogue that makes this output."""
    if problem.activation is None and problem.gating is None:
        return problem.out in OUTPUTS[problem.added]
    scope = TENSOR if problem.gating is None else BLOCK_128X128
    return problem.out in FP8 and (problem.arch, problem.scope, problem.added) == ("90", scope.name, NOTHING)


def _is_of_two(tile: Tile, problem: Problem) -> bool:
    """Whether two thread blocks of a cluster make one tile."""
    return problem.arch == "100" and tile.m == 256 and tile.cluster_m % 2 == 0


def _fits_blackwell(tile: Tile, problem: Problem) -> bool:
    """What quack 0.6.5 takes with scales of blocks (gemm_config.blockscaled_config_ok)."""
    clusters = (tile.cluster_m, tile.cluster_n)
    if problem.arch == "120":
        shape = tile.n in (128, 256) and clusters == (1, 1)
    else:
        shape = tile.n % 64 == 0 and 64 <= tile.n <= 256 and max(clusters) <= 4 and not tile.pingpong
    return shape and tile.m in (128, 256) and not problem.fast_accum


def _fits_hopper(tile: Tile, problem: Problem) -> bool:
    if SCOPES[problem.scope].blocked:
        return _fits_blocks(tile, problem)
    kept = (2 if not problem.fast_accum else 1) * tile.m * tile.n  # fp32 values in the registers of the warp groups
    groups = 1 if tile.pingpong else (3 if tile.m == 192 and tile.n <= 128 else 2)
    return kept // (groups * 128) <= REGISTERS[groups] and (problem.fast_accum or not tile.pingpong)


def _fits_blocks(tile: Tile, problem: Problem) -> bool:
    """Sizes that blocks and tiles divide, as the measured ones are; clusters too, where a tile is of two matrices."""
    plain = not (problem.bias or problem.fast_accum or tile.pingpong) and problem.added != OUTPUT
    across = (1, 1) if problem.gating is None else (tile.cluster_m, tile.cluster_n)
    whole = problem.m % (tile.m * across[0]) == problem.n % (tile.n * across[1]) == 0
    whole = whole and problem.k % BLOCK_1X128.alignment == 0
    return plain and whole and (tile.m, tile.n) == BLOCK_TILE and tile.cluster_m * tile.cluster_n <= 2


def tiles(problem: Problem) -> list[Tile]:
    """All that are measured."""
    of_blocks = problem.arch == "90" and SCOPES[problem.scope].blocked
    candidates = BLOCK_TILES if of_blocks else CANDIDATES.get((problem.arch, problem.fast_accum), ())
    if problem.activation is not None and problem.fast_accum:
        candidates = QUANTIZED_TILES
    return [tile for tile in candidates if supports(tile, problem)]


def architecture(device: torch.device) -> str | None:
    """The device's key of ARCHITECTURES; None where there are no kernels for it, or CUTLASS is not installed."""
    return targets.of(device).cutlass if cutlass.missing() is None else None


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
    gating: tuple[tuple[PointwiseStep, ...], tuple[int, int]] | None = (
        None  # steps and results of a `Gating`, and casts both ways
    )

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


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
    gating: tuple[tuple[PointwiseStep, ...], tuple[int, int]] | None = None,
) -> Kernel:
    a_name, b_name, out_name = (str(dtype).removeprefix("torch.") for dtype in (a, b, out))
    shape = (tile.m, tile.n, tile.cluster_m, tile.cluster_n, tile.pingpong)
    return Kernel(arch, a_name, b_name, out_name, scope, bias, fast_accum, *shape, added, activation, gating)
