"""The FP8 GEMMs of few rows, of templates/triton/fp8_small_m.py, and how it cuts the work.

A tile of b is one program's where there are many tiles, else several programs share its K, as many as run at one time
(docs/performance.md, "FP8 weights and few rows"). All constants are read off `python -m benchmarks.few_rows --all --cast`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import Choice, KernelFamily
from te_inductor.kernels.problem import DENSE, Problem
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import E4M3, ROW, TENSOR
from te_inductor.targets import Ability, Limits, sm90

DTYPE = E4M3.dtype  # of both operands
LEAST_N = 64  # rows of b: what an instruction multiplies
SPLITS = 8  # of K, at most
RESERVED = 2**10  # bytes of shared memory that CUDA keeps of each program


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
class SmallMConfig(Constant):
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


def pays(m: int, n: int, k: int) -> bool:
    """Whether it is taken for faster than the library's kernel, in which each tile is one program."""
    rows = at_most(lambda rows: m <= rows)
    if rows is None:
        return False
    tiles = _ceil(rows, TILE) * _ceil(n, TILE)
    return rows <= FEW or any(tiles <= most and k >= least for most, least in PAYS[rows])


def half(limits: Limits) -> int:
    """Bytes of shared memory of each of two programs on a multiprocessor."""
    return (limits.shared_memory + RESERVED) // 2 - RESERVED


def cut(m: int, n: int, k: int, way: Way | None = None, limits: Limits = sm90.LIMITS) -> SmallMConfig:
    """The config for a K that is a multiple of 128, and any number of rows; in another way than that of WAYS, if one is
    given."""
    way = way or WAYS[at_most(lambda rows: m <= rows) or ROWS[-1]]
    tiles = _ceil(n, way.block_n) * _ceil(m, way.rows)
    parts = 1 if tiles >= MANY else min(SPLITS, way.programs * limits.multiprocessors // tiles)
    block_k = way.block_k if parts > 1 and k % way.block_k == 0 else 128
    splits = min(max(parts, 1), k // block_k)
    stages = _stages(tiles, splits, (way.block_n + way.rows) * block_k, block_k, limits)
    return SmallMConfig(way.rows, block_k, splits, stages, way.block_n, way.warps)


def _stages(tiles: int, splits: int, stage: int, block_k: int, limits: Limits) -> int:
    """Returns as many stages as take more than half of a multiprocessor's memory where each can have one program.
    Programs that start early are placed while the kernel in front still has some multiprocessors: two would share one,
    and others have none."""
    if tiles * splits <= limits.multiprocessors:
        return half(limits) // stage + 1
    return min(4 if tiles >= FULL or block_k > 128 else 8, half(limits) // stage)


def _ceil(size: int, by: int) -> int:
    return -(-size // by)


def _supports(problem: Problem) -> Refusal | None:
    hopper = Ability.HOPPER_KERNELS in problem.target.can
    if not hopper or problem.program.cpp_wrapper or not problem.epilogue.is_plain:
        return Refusal("no kernel on %s, for generated C++ or for more than a product", problem.target.name)
    gemm, (n, k) = problem.gemm, (problem.sizes.n, problem.sizes.k)
    if not isinstance(n, int) or not isinstance(k, int) or n < LEAST_N or k % 128:
        return Refusal("N=%s, K=%s, expected at least %d and a multiple of 128", n, k, LEAST_N)
    if not all(scope in (TENSOR, ROW) for scope in gemm.granularities) or set(gemm.formats) != {E4M3}:
        return Refusal("elements %s and %s with scales of %s and %s", *gemm.elements, *gemm.scopes)
    return None


def _measured(problem: Problem) -> Choice | None:
    """The choice under max-autotune too: it is near what memory allows."""
    m, n, k = problem.sizes.at_most, problem.sizes.n, problem.sizes.k
    if m is None or not pays(m, n, k):
        return None
    return Choice(FAMILY, cut(m, n, k, limits=problem.target.limits))


FAMILY = KernelFamily("triton:fp8_small_m", (DENSE,), _supports, _measured)
