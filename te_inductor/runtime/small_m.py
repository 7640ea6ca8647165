"""Which FP8 GEMMs of few rows have a kernel of ours, templates/triton/fp8_small_m.py, and how it cuts the work.

A tile of b is one program's where there are many tiles, else several programs share its K, as many as run at one time
(docs/performance.md, "FP8 weights and few rows").
"""

import math
from collections.abc import Callable

import torch

from te_inductor.compat import capability_of
from te_inductor.recipes import Gemm
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import ROW, TENSOR

CAPABILITY = (9, 0)  # wgmma, griddepcontrol; later ones are not measured
DTYPE = torch.float8_e4m3fn  # of both operands
ROWS = (16, 32, 64)  # of a in one program, and in all: more are not measured
BLOCK_N = 64  # rows of b in one program: the other side
FULL = 396  # tiles that fill the card with five programs on a multiprocessor, of an H200's 132
MANY = 96  # tiles of which each is better left to one program that has more in flight
RESIDENT = 264  # programs that run at one time with four stages of 256 columns
SPLITS = 8  # of K, at most
SHARED = 113 * 1024  # bytes of shared memory that a program may take for two to fit a multiprocessor


@constant
class Config(Constant):
    """How the work is cut."""

    rows: int  # of a in one program
    block_k: int  # columns that it reads at a time
    splits: int  # programs that share the K of one tile
    stages: int  # of `block_k` columns on their way


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
    if not known or device.type != "cuda" or capability_of(device) != CAPABILITY:
        return None
    fits = n >= BLOCK_N and k % 128 == 0  # type: ignore[operator]
    scopes = all(scope in (TENSOR, ROW) for scope in gemm.granularities)
    return cut(m, n, k) if fits and scopes and dtypes == (DTYPE, DTYPE) else None  # type: ignore[arg-type]


def cut(m: int, n: int, k: int) -> Config:
    """Of a K that is a multiple of 128, and any number of rows."""
    rows = at_most(lambda rows: m <= rows) or ROWS[-1]
    tiles = -(-n // BLOCK_N)
    block_k, splits, stages = 128, 1, 4 if tiles >= FULL else 8
    if tiles < MANY and k % 256 == 0:
        parts = min(SPLITS, 1 << (RESIDENT // tiles).bit_length() - 1)
        block_k, splits, stages = 256, math.gcd(parts, k // 256), 4
    return Config(rows, block_k, splits, min(stages, SHARED // ((BLOCK_N + rows) * block_k)))
