"""fp8 GEMMs with one scale a tensor or one a row, on Hopper: which tile, and where one is faster than cuBLASLt.

`scaled_mm.json` holds what was measured (`python -m benchmarks.tune_gemm`); nothing is timed when a model is compiled,
except under max-autotune, where all of `TILES` take part.
"""

import functools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from te_inductor.templates import cutlass

TABLE = Path(__file__).with_suffix(".json")
NEAR = 2.0  # a measured shape stands for those whose M, N and K are each within this factor of it
OPERANDS = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUTS = (torch.bfloat16, torch.float16)
# Accumulators that a thread may hold, by how many warp groups multiply: of its 240, or 160 registers.
REGISTERS = {1: 208, 2: 208, 3: 136}
# What the tensor memory accelerator asks of strides and bases, in bytes.
ALIGNED = 16


@dataclass(frozen=True)
class Tile:
    """How the output is cut, and by how many warp groups a piece is made."""

    m: int  # rows of the output that one thread block computes at a time
    n: int  # columns
    cluster_m: int  # thread blocks along M that share what they load of b
    cluster_n: int  # along N, of a
    pingpong: bool  # two warp groups take turns, one storing a tile while the other multiplies; else they share a tile
    swizzle: int  # how many tiles along one dimension follow each other, so that L2 serves the other operand

    def __str__(self) -> str:
        way = "pingpong" if self.pingpong else "cooperative"
        return f"{self.m}x{self.n} cluster {self.cluster_m}x{self.cluster_n} {way} swizzle {self.swizzle}"


@dataclass(frozen=True)
class Problem:
    """``out[M, N] = (a * a_scale)[M, K] @ (b * b_scale)[N, K].T + bias``, a and b contiguous along K."""

    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    by_row: bool  # one scale a row of a and one a row of b; else one for each tensor
    bias: bool
    fast_accum: bool  # in the tensor core's own precision; else promoted to fp32 every 128 elements of K

    def kernel(self, tile: Tile) -> "Kernel":
        """What has to be built to compute it so."""
        return kernel_of(tile, self.a, self.b, self.out, self.by_row, self.bias, self.fast_accum)


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


def supports(tile: Tile, problem: Problem) -> bool:
    """Whether the kernel of this tile computes this problem, and is worth building for it."""
    kept = (2 if not problem.fast_accum else 1) * tile.m * tile.n  # fp32 values in the registers of the warp groups
    groups = 1 if tile.pingpong else (3 if tile.m == 192 and tile.n <= 128 else 2)
    return (
        problem.a in OPERANDS
        and problem.b in OPERANDS
        and problem.out in OUTPUTS
        and problem.k % ALIGNED == 0
        and problem.n * problem.out.itemsize % ALIGNED == 0
        and problem.m >= tile.m * tile.cluster_m
        and problem.n >= tile.n * tile.cluster_n
        and kept // (groups * 128) <= REGISTERS[groups]
        and (problem.fast_accum or not tile.pingpong)
    )


def tiles(problem: Problem) -> list[Tile]:
    """All that max-autotune measures."""
    return [t for t in (FAST_TILES if problem.fast_accum else SPLIT_TILES) if supports(t, problem)]


def choose(problem: Problem, device: torch.device) -> Tile | None:
    """The tile that was measured to beat cuBLASLt at the nearest shape; None where cuBLASLt is as fast, or nothing near was
    measured, or CUTLASS is not installed."""
    if not runs_on(device):
        return None
    rows = [row for row in table()["rows"] if _alike(row, problem)]
    near = min(rows, key=lambda row: _distance(row, problem), default=None)
    if near is None or near["tile"] is None or _distance(near, problem) > math.log2(NEAR):
        return None
    tile = Tile(**near["tile"])
    return tile if supports(tile, problem) else None


def runs_on(device: torch.device) -> bool:
    return cutlass.missing() is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def table() -> dict[str, Any]:
    """``device``, ``date``, versions, and ``rows``: a problem, the tile (None: cuBLASLt), microseconds of both."""
    with TABLE.open() as file:
        return json.load(file)


def _alike(row: dict[str, Any], problem: Problem) -> bool:
    # Which 8-bit format an operand has is nothing to the tensor core; that the accumulation is split is.
    return row["fast_accum"] == problem.fast_accum and row["by_row"] == problem.by_row


def _distance(row: dict[str, Any], problem: Problem) -> float:
    """The largest of the factors between the sizes, as a power of two."""
    return max(abs(math.log2(row[size] / getattr(problem, size))) for size in "mnk")


@dataclass(frozen=True)
class Kernel:
    """What one built library computes: everything of a problem and a tile but sizes and the order of tiles."""

    a: str  # dtypes, as torch spells them behind "torch."
    b: str
    out: str
    by_row: bool
    bias: bool
    fast_accum: bool
    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def kernel_of(
    tile: Tile, a: torch.dtype, b: torch.dtype, out: torch.dtype, by_row: bool, bias: bool, fast_accum: bool
) -> Kernel:
    a_name, b_name, out_name = (str(dtype).removeprefix("torch.") for dtype in (a, b, out))
    shape = (tile.m, tile.n, tile.cluster_m, tile.cluster_n, tile.pingpong)
    return Kernel(a_name, b_name, out_name, by_row, bias, fast_accum, *shape)
