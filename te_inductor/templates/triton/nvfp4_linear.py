"""``x @ w.T`` with a stored NVFP4 weight and few rows of x: as fast as 4.5 bits a weight can be read.

The weight is the tensor core's left operand, so its N fills the 64 or 16 rows of an instruction and x's rows the other
side, 8 of them or a multiple. There are three kernels: `nvfp4_streamed`, Hopper's; `nvfp4_direct`, for one or two rows
of x, or 16 elsewhere; and a plain one, here, for any number and a K that is a multiple of 64. What they share is here
too. Four values in one 16-bit word are operands of four products, whose x is every fourth run of four columns: nothing
moves between threads. See `nvfp4_decode` for the arithmetic and docs/ledger.md for what was measured.

Blocks of K go to `splits` programs in turn, so that what runs at one time reads neighbouring bytes. Each writes
its partial sums in fp32; whoever reads them adds them up in their order, in Inductor's code together with what comes
next, in eager code `partial_sums.add_up`. Where there is one split its sums are the result. Kernels start early: Note
[Kernels that start early] in lowerings/codegen/programmatic_launch.py."""

import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor import targets
from te_inductor.diagnostics import Refusal
from te_inductor.recipes.constants import Constant, constant
from te_inductor.templates.triton import nvfp4_direct, nvfp4_groups, nvfp4_streamed
from te_inductor.templates.triton.launcher import launcher
from te_inductor.templates.triton.nvfp4_decode import FACTOR, values
from te_inductor.templates.triton.partial_sums import sum_dtype

__all__ = ["FACTOR", "Config", "Problem", "arranged", "choose", "partial_sums", "planes", "supports"]

TABLE = Path(__file__).with_suffix(".json")
DTYPES = (torch.bfloat16, torch.float16)
DIRECT, STREAMED, PLAIN = "direct", "streamed", "plain"
_LEAST_K = 64  # columns at a time: 16 of each of four products


@dataclass(frozen=True)
class Problem:
    """``y[M, N] = x[M, K] @ w[N, K].T``"""

    m: int
    n: int
    k: int
    dtype: torch.dtype  # of x
    hopper: bool = True  # whether kernels of wgmma run: `Target.hopper_kernels`


@constant
class Config(Constant):
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


def supports(config: Config, problem: Problem) -> Refusal | None:
    """Why the kernel does not compute this problem so, or would be wrong to."""
    if problem.dtype not in DTYPES:
        return Refusal("input dtype %s is not bfloat16 or float16", str(problem.dtype).removeprefix("torch."))
    if problem.k % (config.block_k * config.splits * config.shares):
        return Refusal(
            "K=%d is not a multiple of %d x %d parts of %d", problem.k, config.splits, config.shares, config.block_k
        )
    return _SUPPORTS[config.kind](config, problem)


def _supports_plain(config: Config, problem: Problem) -> Refusal | None:
    if config.shared_memory > nvfp4_streamed.SHARED:
        return Refusal("%d bytes of shared memory, an SM has %d", config.shared_memory, nvfp4_streamed.SHARED)
    if config.warps % 4 or config.block_n % 64 or config.rows < 16:
        return Refusal("wgmma is of 4 warps, 64 rows of the weight and 16 of x")
    return None


def _supports_direct(config: Config, problem: Problem) -> Refusal | None:
    if config.rows not in (8, 16):
        return Refusal("%d rows of x, the tensor core takes 8 or 16", config.rows)
    if problem.n < config.block_n or config.block_n % 16:
        return Refusal("N=%d for a program of %d rows, a multiple of 16", problem.n, config.block_n)
    if config.block_k != nvfp4_direct.COLUMNS.value:
        return Refusal("a warp takes %d columns at a time", nvfp4_direct.COLUMNS.value)
    return None


def _supports_streamed(config: Config, problem: Problem) -> Refusal | None:
    if not problem.hopper:
        return Refusal("wgmma is of compute capability 9.0")
    if config.block_k != nvfp4_groups.BLOCK_K.value:
        return Refusal("a stage has %d columns", nvfp4_groups.BLOCK_K.value)
    groups = config.warps // 4
    if groups not in nvfp4_streamed.MOST_ROWS or config.block_n * config.shares != groups * nvfp4_groups.GROUP.value:
        return Refusal("%d warps for %d rows of the weight in %d parts", config.warps, config.block_n, config.shares)
    if config.stages % config.shares or config.stages < 2 * config.shares:
        return Refusal(
            "%d stages for %d parts, which have stages of their own, two at least", config.stages, config.shares
        )
    if not 8 <= config.rows <= nvfp4_streamed.MOST_ROWS[groups] or config.rows.bit_count() > 1:
        return Refusal("%d rows of x for %d warps", config.rows, config.warps)
    memory = nvfp4_streamed.shared_memory(config.rows, config.block_n, config.shares, config.stages)
    if memory > nvfp4_streamed.SHARED:
        return Refusal("%d bytes of shared memory, an SM has %d", memory, nvfp4_streamed.SHARED)
    return None


_SUPPORTS = {PLAIN: _supports_plain, DIRECT: _supports_direct, STREAMED: _supports_streamed}


@functools.cache
def table() -> dict[str, Any]:
    """``device``, ``date``, versions, and ``rows``: a problem, its config, microseconds of it and of bf16."""
    with TABLE.open() as file:
        return json.load(file)  # type: ignore[no-any-return]


def choose(problem: Problem) -> Config | None:
    """The config of the nearest measured problem that this one supports, with fewer splits where K is short; None where
    nothing fits."""
    for row in sorted(table()["rows"], key=lambda row: _distance(row, problem)):
        config = _fitted(Config(**row["config"]), problem)
        if supports(config, problem) is None:
            return config
    return None


def choose_on(device: torch.device, m: int, n: int, k: int, dtype: torch.dtype) -> Config | None:
    """`choose` for a device; None also where it runs none of the kernels."""
    target = targets.of(device)
    return choose(Problem(m, n, k, dtype, target.hopper_kernels)) if target.nvfp4_kernels else None


def _fitted(config: Config, problem: Problem) -> Config:
    """The config with parts of K that it can be cut into."""
    if config.kind == PLAIN and problem.k % _LEAST_K == 0:
        config = replace(config, block_k=math.gcd(config.block_k, problem.k))
    blocks = max(1, problem.k // config.block_k)
    if config.kind == DIRECT:
        warps = math.gcd(config.warps, blocks)
        config = replace(config, warps=warps, shares=warps)
    blocks //= config.shares
    return replace(config, splits=max(s for s in range(1, config.splits + 1) if blocks % s == 0))


def _distance(row: dict[str, Any], problem: Problem) -> tuple[int, int, float, float]:
    """First how often the weight is read, then how many rows of x a tile has for nothing; then the weight's shape,
    which decides the splits: tiles of N must fill the card."""
    rows = row["config"]["rows"]
    sizes = (row["m"], max(1, problem.m)), (row["n"], problem.n), (row["k"], problem.k)
    m, n, k = (max(pair) / min(pair) for pair in sizes)
    return -(-problem.m // rows), rows, n + k, m


def planes(x: Tensor) -> Tensor:
    """(M, K) -> (M, 4, K/4): plane i holds columns ``16 b + 4 i`` to ``16 b + 4 i + 3`` of each block b."""
    m, k = x.shape
    return x.reshape(m, k // 16, 4, 4).transpose(1, 2).reshape(m, 4, k // 4)


def arranged(x: Tensor, config: Config) -> Tensor:
    """x, (M, K), as this config's kernel reads it."""
    return _ARRANGED[config.kind](x)


_ARRANGED = {PLAIN: planes, DIRECT: nvfp4_direct.fragments, STREAMED: nvfp4_streamed.arranged}


def empty(x: Tensor, n: int, config: Config, out_dtype: torch.dtype) -> Tensor:
    """What `partial_sums` writes, (splits, M, n)."""
    m = x.shape[0] if config.kind == PLAIN else x.shape[-2]
    return x.new_empty((config.splits, m, n), dtype=sum_dtype(config.splits, out_dtype))


def partial_sums(
    x: Tensor,  # `arranged`
    stored: Tensor,  # (N, K/2) uint8
    block_scale: Tensor,  # (N, K/16) e4m3
    tensor_scale: Tensor,  # () fp32
    config: Config,
    out_dtype: torch.dtype,  # of the result, where there is one split
    assembly: bool = True,
) -> Tensor:  # (splits, M, N), fp32 if there are several
    """Returns parts, whose sum over the first dimension is the product."""
    n, k = stored.shape[0], 2 * stored.shape[1]
    out = empty(x, n, config, out_dtype)
    m, given = out.shape[1], (x, stored, block_scale, tensor_scale, out, config.rows, config.block_n)
    if m == 0:
        return out
    if config.kind == DIRECT:
        nvfp4_direct.launch(*given, config.warps, config.stages - 1)
        return out
    if config.kind == STREAMED:
        nvfp4_streamed.launch(*given, config.shares, config.stages)
        return out
    programs = config.splits * triton.cdiv(m, config.rows) * triton.cdiv(n, config.block_n)
    run = launcher(
        _partial_sums,
        K=k,
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLITS=config.splits,
        STAGES=config.stages,
        FACTOR=FACTOR,
        ASSEMBLY=assembly,
        num_warps=config.warps,
        launch_pdl=assembly,
    )
    run(programs, x, stored.view(torch.int16), block_scale.view(torch.uint8), tensor_scale, out, m, n)
    return out


@triton.jit
def _partial_sums(
    x,  # (M, 4, K/4)
    stored,  # (N, K/4) int16
    block_scale,  # (N, K/16) uint8
    tensor_scale,  # () fp32
    out,  # (SPLITS, M, N)
    M,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    # Neighbouring programs read the same part of the weight for other rows of x, so that memory is read once.
    tiles = tl.cdiv(M, ROWS)
    part = tl.program_id(0) // tiles % SPLITS
    m = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // (tiles * SPLITS) * BLOCK_N + tl.arange(0, BLOCK_N)
    WORDS: tl.constexpr = BLOCK_K // 4
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    word = stored + row * (K // 4) + part * WORDS + tl.arange(0, WORDS)[None, :]
    scale = block_scale + row * (K // 16) + part * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)[None, :]
    if ASSEMBLY:
        tl.extra.cuda.gdc_wait()
    column = x + m.to(tl.int64)[None, :] * K + part * WORDS + tl.arange(0, WORDS)[:, None]
    inside = m[None, :] < M
    y = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    # The loop runs as often for every part. Where Triton knows how often, it lets wgmma run while it makes the next
    # ones' operands: 15% faster with 16 rows, and wrong by 1e-3 of the norm with 64 (Triton 3.6, H200, 64 x 128 x 128,
    # 8 splits, 4 warps, 3 stages). In a loop whose bounds it does not know it waits for each.
    first = part * BLOCK_K
    for _ in tl.range(first, K + first, SPLITS * BLOCK_K, num_stages=STAGES):
        words = tl.load(word, eviction_policy="evict_first")
        scales = tl.load(scale, eviction_policy="evict_first")
        x0 = tl.load(column, mask=inside, other=0.0)
        x1 = tl.load(column + K // 4, mask=inside, other=0.0)
        x2 = tl.load(column + 2 * (K // 4), mask=inside, other=0.0)
        x3 = tl.load(column + 3 * (K // 4), mask=inside, other=0.0)
        w0, w1, w2, w3 = values(words, scales, ASSEMBLY)
        y = tl.dot(w0.to(x0.dtype), x0, y)
        y = tl.dot(w1.to(x0.dtype), x1, y)
        y = tl.dot(w2.to(x0.dtype), x2, y)
        y = tl.dot(w3.to(x0.dtype), x3, y)
        word += SPLITS * WORDS
        scale += SPLITS * (BLOCK_K // 16)
        column += SPLITS * WORDS
    if ASSEMBLY:
        tl.extra.cuda.gdc_launch_dependents()
    place = out + (part * M + m[None, :]).to(tl.int64) * N + n[:, None]
    y = y * (tl.load(tensor_scale) * FACTOR)
    tl.store(place, y.to(out.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))
