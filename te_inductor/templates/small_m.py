"""The FP8 GEMMs of few rows that have a kernel of ours, templates/triton/fp8_small_m.py, and how it cuts the work.

A tile of b is one program's where there are many tiles, else several programs share its K, as many as run at one time
(docs/performance.md, "FP8 weights and few rows"). All constants are read off `python -m benchmarks.few_rows --all --cast`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_inductor import targets
from te_inductor.recipes import Gemm
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import ROW, TENSOR

DTYPE = torch.float8_e4m3fn  # of both operands
LEAST_N = 64  # rows of b: what an instruction multiplies
SPLITS = 8  # of K, at most
MULTIPROCESSORS = 132  # of an H100 or H200
SHARED = 227 * 1024  # bytes of shared memory that a program may have
HALF = 113 * 1024  # of which two programs fit a multiprocessor


@dataclass(frozen=True)
class Way:
    """How one program multiplies, and how many of them a multiprocessor has where K is split."""

    block_n: int  # rows of b in one program
    rows: int  # of a
    block_k: int  # columns that it reads at a time where K is split and their number allows; else 128
    warps: int
    programs: int


# The ways, by the number of rows of a, at most.
WAYS = {
    16: Way(64, 16, 256, 4, programs=2),
    32: Way(64, 32, 256, 4, programs=2),
    64: Way(64, 64, 128, 4, programs=1),
    128: Way(64, 128, 128, 8, programs=1),
    256: Way(64, 128, 128, 8, programs=2),
}
ROWS = tuple(WAYS)
MANY = 96  # tiles of which each is better left to one program that has more in flight
FULL = 396  # tiles that fill the card with five programs on a multiprocessor
FEW = 64  # rows up to which the kernel is taken whatever N and K
# With more rows the kernel is taken where the result has at most so many of the library's tiles and K is so long; by
# the number of rows, at most.
TILE = 128  # rows and columns of the result
PAYS = {128: ((48, 2560),), 256: ((40, 4096),)}


@constant
class Config(Constant):
    """How the work is cut."""

    rows: int  # of a in one program
    block_k: int  # columns that it reads at a time
    splits: int  # programs that share the K of one tile
    stages: int  # of `block_k` columns on their way
    block_n: int = 64  # rows of b in one program
    warps: int = 4


def at_most(holds: Callable[[int], bool]) -> int | None:
    """The least of ROWS that a's rows are known not to exceed, if any; `holds` is asked of each."""
    return next((rows for rows in ROWS if holds(rows)), None)


def choose(
    device: torch.device,
    m: int | None,  # rows of a, at most; None where there may be any number
    sizes: tuple[object, ...],  # N and K, ints where they are known
    dtypes: tuple[torch.dtype, torch.dtype],
    gemm: Gemm,
) -> Config | None:
    """None where the kernel does not compute ``a[M, K] @ b[N, K].T``, or there may be too many rows for it to pay."""
    n, k = sizes
    known = m is not None and isinstance(n, int) and isinstance(k, int)
    if not known or not targets.of(device).hopper_kernels:
        return None
    fits = n >= LEAST_N and k % 128 == 0  # type: ignore[operator]
    scopes = all(scope in (TENSOR, ROW) for scope in gemm.granularities)
    if not (fits and scopes and dtypes == (DTYPE, DTYPE) and pays(m, n, k)):  # type: ignore[arg-type]
        return None
    return cut(m, n, k)  # type: ignore[arg-type]


def pays(m: int, n: int, k: int) -> bool:
    """Whether it is taken for faster than the library's kernel, in which each tile is one program."""
    rows = at_most(lambda rows: m <= rows)
    if rows is None:
        return False
    tiles = _ceil(rows, TILE) * _ceil(n, TILE)
    return rows <= FEW or any(tiles <= most and k >= least for most, least in PAYS[rows])


def cut(m: int, n: int, k: int, way: Way | None = None) -> Config:
    """Cuts a K that is a multiple of 128, and any number of rows; in another way than that of WAYS, if one is given."""
    way = way or WAYS[at_most(lambda rows: m <= rows) or ROWS[-1]]
    tiles = _ceil(n, way.block_n) * _ceil(m, way.rows)
    parts = 1 if tiles >= MANY else min(SPLITS, way.programs * MULTIPROCESSORS // tiles)
    block_k = way.block_k if parts > 1 and k % way.block_k == 0 else 128
    splits = min(max(parts, 1), k // block_k)
    stages = _stages(tiles, splits, (way.block_n + way.rows) * block_k, block_k)
    return Config(way.rows, block_k, splits, stages, way.block_n, way.warps)


def _stages(tiles: int, splits: int, stage: int, block_k: int) -> int:
    """Returns as many stages as take more than half of a multiprocessor's memory where each can have one program.
    Programs that start early are placed while the kernel in front still has some multiprocessors: two would share one,
    and others have none."""
    if tiles * splits <= MULTIPROCESSORS:
        return HALF // stage + 1
    return min(4 if tiles >= FULL or block_k > 128 else 8, HALF // stage)


def _ceil(size: int, by: int) -> int:
    return -(-size // by)
