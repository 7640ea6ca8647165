"""Few rows by a weight that is stored in NVFP4, in bf16 or fp16: templates/triton/nvfp4_linear.py. Which of its three
kernels, and how it cuts the work, says a table of what was measured (nvfp4_linear.json)."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.kernels.family import Choice, KernelFamily
from te_inductor.kernels.problem import STORED, Problem, Program, Sizes, Stored
from te_inductor.recipes import Gemm
from te_inductor.recipes.constants import Constant, constant
from te_inductor.recipes.formats import E2M1
from te_inductor.targets import Ability, Target

TABLE = Path(__file__).with_suffix(".json")
DTYPES = (torch.bfloat16, torch.float16)
# Up to DECODE_ROWS of x a GPU multiplies with the stored NVFP4 values, above it casts them first: docs/performance.md.
# On Hopper, where rows may be cast, that ends at FEW_ROWS: nvfp4_fp8.py.
DECODE_ROWS, FEW_ROWS = 128, 64
# The FP8 GEMM of large batches: scales of rows, powers of two, so that a stored value is rounded once and rarely.
PREFILL = Gemm("fprop", fast_accum=True, scopes=("row", "row"))
PROMPT_COLUMNS = 256  # K is a multiple of: what templates/triton/nvfp4_fp8.py takes at a time
DIRECT, STREAMED, PLAIN = "direct", "streamed", "plain"
_LEAST_K = 64  # columns at a time: 16 of each of four products
COLUMNS = 256  # that a warp of the direct kernel multiplies in one turn
# Columns of a stage of the streamed kernel, and rows of the weight of a warp group.
BLOCK_K, GROUP = 256, 64
MOST_ROWS = {2: 128, 4: 32}  # of x, by its warp groups: with more, products wait for each other for want of registers


def problem(
    target: Target,
    sizes: Sizes,
    rows: torch.dtype,  # of x
    out: torch.dtype,
    casts_rows: bool = True,
    leaves: bool = False,
) -> Problem:
    """The product of M rows of x and a stored weight, (N, K)."""
    stored = Stored(E2M1.name, rows, casts_rows)
    return Problem(target, sizes, PREFILL, out, program=Program(leaves=leaves), stored=stored)


@constant
class NVFP4Config(Constant):
    """How the work is cut."""

    kind: str  # which kernel; each wants x in another order (`arranged`)
    rows: int  # of x in one program
    block_n: int  # rows of the weight in one program
    block_k: int  # columns that it reads at a time
    splits: int  # programs that share the K of one tile
    warps: int  # of a program that multiply
    shares: int  # parts of a program's K, each of as many warps
    stages: int  # of `block_k` columns on their way, direct: in registers

    def __str__(self) -> str:
        tile, parts = (
            f"{self.kind}, {self.rows} x {self.block_n} x {self.block_k}",
            f"{self.splits} x {self.shares} parts",
        )
        return f"{tile}, {parts}, {self.warps} warps, {self.stages} stages"

    @property
    def shared_memory(self) -> int:
        """Bytes, where it is the plain kernel's."""
        weight = self.block_n * self.block_k * 9 // 16
        return self.stages * (weight + 2 * self.rows * self.block_k)


def supports(config: NVFP4Config, problem: Problem) -> Refusal | None:
    """Why the kernel does not compute this problem so, or would be wrong to."""
    k, parts = problem.sizes.k, config.splits * config.shares
    if k % (config.block_k * parts):
        return Refusal("K=%d is not a multiple of %d x %d parts of %d", k, config.splits, config.shares, config.block_k)
    return refuses_rows(problem) or _SUPPORTS[config.kind](config, problem)


def _supports_plain(config: NVFP4Config, problem: Problem) -> Refusal | None:
    most = problem.target.limits.shared_memory
    if config.shared_memory > most:
        return Refusal("%d bytes of shared memory, an SM has %d", config.shared_memory, most)
    if config.warps % 4 or config.block_n % 64 or config.rows < 16:
        return Refusal("wgmma is of 4 warps, 64 rows of the weight and 16 of x")
    return None


def _supports_direct(config: NVFP4Config, problem: Problem) -> Refusal | None:
    if config.rows not in (8, 16):
        return Refusal("%d rows of x, the tensor core takes 8 or 16", config.rows)
    n = problem.sizes.n
    if n < config.block_n or config.block_n % 16:
        return Refusal("N=%d for a program of %d rows, a multiple of 16", n, config.block_n)
    if config.block_k != COLUMNS:
        return Refusal("a warp takes %d columns at a time", COLUMNS)
    return None


def _supports_streamed(config: NVFP4Config, problem: Problem) -> Refusal | None:
    if Ability.HOPPER_KERNELS not in problem.target.can:
        return Refusal("wgmma is of compute capability 9.0")
    if config.block_k != BLOCK_K:
        return Refusal("a stage has %d columns", BLOCK_K)
    groups = config.warps // 4
    if groups not in MOST_ROWS or config.block_n * config.shares != groups * GROUP:
        return Refusal("%d warps for %d rows of the weight in %d parts", config.warps, config.block_n, config.shares)
    if config.stages % config.shares or config.stages < 2 * config.shares:
        return Refusal(
            "%d stages for %d parts, which have stages of their own, two at least", config.stages, config.shares
        )
    if not 8 <= config.rows <= MOST_ROWS[groups] or config.rows.bit_count() > 1:
        return Refusal("%d rows of x for %d warps", config.rows, config.warps)
    memory, most = streamed_memory(config.rows, config.block_n, config.shares, config.stages), problem.target.limits
    if memory > most.shared_memory:
        return Refusal("%d bytes of shared memory, an SM has %d", memory, most.shared_memory)
    return None


def streamed_memory(rows: int, block_n: int, shares: int, stages: int) -> int:
    """Bytes of shared memory of a program of the streamed kernel, barriers and all."""
    stage = block_n * BLOCK_K * 9 // 16 + 2 * rows * BLOCK_K
    return stages * stage + (shares - 1) * block_n * rows * 4 + 1024


_SUPPORTS = {PLAIN: _supports_plain, DIRECT: _supports_direct, STREAMED: _supports_streamed}


@functools.cache
def table() -> dict[str, Any]:
    """``device``, ``date``, versions, and ``rows``: a problem, its config, microseconds of it and of bf16."""
    with TABLE.open() as file:
        return json.load(file)  # type: ignore[no-any-return]


@functools.lru_cache(1024)  # also eager layers ask, at each call
def configured(problem: Problem) -> NVFP4Config | None:
    """The config of the nearest measured problem that this one supports, with fewer splits where K is short; None where
    nothing fits, or the device runs none of the kernels."""
    if not runs(problem.target):
        return None
    for row in sorted(table()["rows"], key=lambda row: _distance(row, problem.sizes)):
        config = _fitted(NVFP4Config(**row["config"]), problem)
        if supports(config, problem) is None:
            return config
    return None


def _fitted(config: NVFP4Config, problem: Problem) -> NVFP4Config:
    """The config with parts of K that it can be cut into."""
    k = problem.sizes.k
    if config.kind == PLAIN and k % _LEAST_K == 0:
        config = replace(config, block_k=math.gcd(config.block_k, k))
    blocks = max(1, k // config.block_k)
    if config.kind == DIRECT:
        warps = math.gcd(config.warps, blocks)
        config = replace(config, warps=warps, shares=warps)
    blocks //= config.shares
    return replace(config, splits=max(s for s in range(1, config.splits + 1) if blocks % s == 0))


def _distance(row: dict[str, Any], sizes: Sizes) -> tuple[int, int, float, float]:
    """First how often the weight is read, then how many rows of x a tile has for nothing; then the weight's shape,
    which decides the splits: tiles of N must fill the card."""
    rows = row["config"]["rows"]
    pairs: Any = (row["m"], max(1, sizes.m)), (row["n"], sizes.n), (row["k"], sizes.k)
    m, n, k = (max(pair) / min(pair) for pair in pairs)
    return -(-sizes.m // rows), rows, n + k, m


def runs(target: Target) -> bool:
    """Whether a device runs the kernels, and those that write stored values out."""
    return Ability.NVFP4_KERNELS in target.can


def refuses_rows(problem: Problem) -> Refusal | None:
    """Why no kernel of ours takes the rows."""
    assert problem.stored is not None
    rows = problem.stored.rows
    if rows not in DTYPES:
        return Refusal("input dtype %s is not bfloat16 or float16", str(rows).removeprefix("torch."))
    return None


def casts_rows(problem: Problem) -> bool:
    """Whether many rows are cast to FP8."""
    return problem.stored is not None and problem.stored.casts_rows and Ability.FP8 in problem.target.can


def decodes(problem: Problem) -> bool:
    """Whether more rows than few have a kernel that decodes the weight as it multiplies: nvfp4_fp8.py."""
    hopper = Ability.HOPPER_KERNELS in problem.target.can
    return casts_rows(problem) and hopper and problem.sizes.k % PROMPT_COLUMNS == 0


def is_few(problem: Problem) -> bool:
    """Whether the stored values are multiplied as they are."""
    m = problem.sizes.m
    return m is not None and bool(m <= (FEW_ROWS if decodes(problem) else DECODE_ROWS))


def _supports(problem: Problem) -> Refusal | None:
    if not runs(problem.target) or problem.program.leaves:
        return Refusal("%s runs none of the kernels, or a program without them is asked for", problem.target.name)
    return refuses_rows(problem) or (None if is_few(problem) else Refusal("many rows"))


def _measured(problem: Problem) -> Choice | None:
    sizes = problem.sizes
    if isinstance(sizes.m, int):
        config = configured(problem)
        return None if config is None else Choice(FAMILY, config)
    # Whether there is a config does not depend on M; which it is, the lowering asks.
    exists = configured(replace(problem, sizes=replace(sizes, m=1))) is not None
    return Choice(FAMILY) if exists else None


FAMILY = KernelFamily("triton:nvfp4_linear", (STORED,), _supports, _measured)
