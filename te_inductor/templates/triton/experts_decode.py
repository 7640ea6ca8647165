"""Products of few rows with experts' stored weights: only the experts that have rows are read, and each of them once.

A program multiplies up to `rows` rows of one expert by `BLOCK_N` rows of its weight, which are the tensor core's left
operand, as in nvfp4_linear.py. Which expert and which rows it finds out itself, from numbers that are on the device
alone: there are as many programs as there can be tiles of rows, and those without rows end at once. So nothing waits
for the host, and a CUDA graph replays with other choices.

    by `ends`  rows stand by expert; program p takes the p-th tile of `rows` rows of one expert
    by `ids`   row p has expert ids[p]; program p takes the rows of that expert from p on if p is the first of a tile

Values become bf16 (or fp16) exactly, products are summed in fp32. Rows of no expert are zeros. Kernels start early:
Note [Kernels that start early] in lowerings/codegen/programmatic_launch.py."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.kernels.experts_decode import SCOPES, ExpertsConfig, cut
from te_inductor.recipes import Quantizer
from te_inductor.runtime.eager import experts
from te_inductor.templates.triton.launcher import Launcher, launcher
from te_inductor.templates.triton.nvfp4_decode import FACTOR, values

BLOCK_N = 64  # rows of a weight in one program: a wgmma's
MOST_IDS = 1024  # rows whose experts' numbers a program reads; more are sorted first


def tiles(m: int, count: int, rows: int) -> int:
    """Tiles of `rows` rows that m rows of `count` experts fill at most."""
    full = min(m, count)
    return full + (m - full) // rows


def nvfp4_product(
    x: Tensor,  # (M, K)
    ends: Tensor | None,  # (E,) int32
    ids: Tensor | None,  # (M,); one of the two
    stored: Tensor,  # (E, N, K/2) uint8
    block_scale: Tensor,  # (E, N, K/16) e4m3
    tensor_scale: Tensor,  # (E,) fp32
    out_dtype: torch.dtype,
    assembly: bool = True,
    config: ExpertsConfig | None = None,
) -> Tensor:  # (M, N)
    """Computes what `runtime.eager.experts.nvfp4_product` does, but for the order of sums."""

    def made(**named: Any) -> Launcher:
        return launcher(_nvfp4, STORED=2 * stored.shape[2], FACTOR=FACTOR, **named)

    parts = stored.view(torch.int16), block_scale.view(torch.uint8), tensor_scale
    return _product(made, x, ends, ids, parts, out_dtype, assembly, config)


def fp8_product(
    x: Tensor,  # (M, K)
    ends: Tensor | None,
    ids: Tensor | None,
    stored: Tensor,  # (E, N, K padded) e4m3
    scale_inv: Tensor,  # (E,), (E, N), or (E, what blocks of 128 x 128 store)
    quantizer: Quantizer,
    out_dtype: torch.dtype,
    assembly: bool = True,  # whether griddepcontrol is among the device's instructions
    config: ExpertsConfig | None = None,
) -> Tensor:  # (M, N)
    """Computes what `runtime.eager.experts.fp8_product` does, but for the order of sums."""

    def made(**named: Any) -> Launcher:
        return launcher(_fp8, STORED=stored.shape[2], SCOPE=SCOPES[quantizer.granularity], **named)

    return _product(made, x, ends, ids, (stored, scale_inv), out_dtype, assembly, config)


def _product(
    made: Callable[..., Launcher],  # what launches the kernel, of the constants that both have
    x: Tensor,  # (M, K)
    ends: Tensor | None,
    ids: Tensor | None,
    parts: tuple[Tensor, ...],  # the stored weight, (E, N, …), and its scales
    out_dtype: torch.dtype,
    assembly: bool,
    config: ExpertsConfig | None,
) -> Tensor:  # (M, N)
    (count, n), (m, k) = parts[0].shape[:2], x.shape
    if ids is not None and m > MOST_IDS:
        return experts.sorted_product(
            x, ids, count, lambda rows, ends: _product(made, rows, ends, None, parts, out_dtype, assembly, config)
        )
    config = config or cut(m, count, k, nvfp4=parts[0].dtype == torch.int16, by_ids=ids is not None)
    out = x.new_empty((m, n), dtype=out_dtype)
    if not m:
        return out
    run = made(
        EVEN=k % config.block_k == 0,
        ASSEMBLY=assembly,
        IDS=ids is not None,
        GROUPS=triton.next_power_of_2(count if ids is None else m),
        ROWS=config.rows,
        BLOCK_N=BLOCK_N,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        num_warps=config.warps,
        launch_pdl=assembly,
    )
    groups = ends if ids is None else ids
    assert groups is not None
    # One program more for rows behind the last group. Neighbours read the same of a weight that has several tiles.
    programs = m if ends is None else tiles(m, count, config.rows) + 1
    given = x, groups.contiguous(), *parts
    run(programs * triton.cdiv(n, BLOCK_N), *given, out, m, n, k, count, *x.stride())
    return out


@triton.jit
def _place(N, BLOCK_N: tl.constexpr):
    """Finds which tile of rows a program has, of how many, and its rows of a weight."""
    programs = tl.num_programs(0) // tl.cdiv(N, BLOCK_N)
    return tl.program_id(0) % programs, programs, tl.program_id(0) // programs * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _tile(p, groups, M, E, IDS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of program p, its rows of x (ROWS,), and which of these there are."""
    place = tl.arange(0, GROUPS)
    r = tl.arange(0, ROWS)
    if IDS:
        numbers = tl.load(groups + place, mask=place < M, other=-1).to(tl.int32)
        mine = tl.load(groups + p).to(tl.int32)
        same = (numbers == mine) & (place < M)
        rank = tl.cumsum(same.to(tl.int32), 0) - 1
        before = tl.sum((same & (place < p)).to(tl.int32), 0)
        count = tl.where(before % ROWS == 0, tl.sum(same.to(tl.int32), 0) - before, 0)
        chosen = same[None, :] & (rank[None, :] == before + r[:, None])
        row = tl.sum(tl.where(chosen, place[None, :], 0), 1)
        expert = tl.where(mine < 0, mine + E, mine)
    else:
        end = tl.load(groups + place, mask=place < E, other=0)
        begin = tl.load(groups + place - 1, mask=(place > 0) & (place < E), other=0)
        size = tl.where(place < E, end - begin, 0)
        tiles = (size + ROWS - 1) // ROWS
        last = tl.cumsum(tiles, 0)
        mine = (p < last) & (p >= last - tiles)
        expert = tl.sum(tl.where(mine, place, 0), 0)
        first = (p - tl.sum(tl.where(mine, last - tiles, 0), 0)) * ROWS
        count = tl.sum(tl.where(mine, size, 0), 0) - first
        row = tl.sum(tl.where(mine, begin, 0), 0) + first + r
        count = tl.where(p < tl.max(last, 0), count, 0)
    return expert, row, r < count, count


@triton.jit
def _clear(last, out, groups, M, N, E, n, ROWS: tl.constexpr):
    """Zeros for rows behind the last group, of which the last program takes care."""
    if last:
        for first in range(tl.load(groups + E - 1), M, ROWS):
            row = first + tl.arange(0, ROWS)[:, None]
            zeros = tl.zeros((ROWS, n.shape[0]), dtype=out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * N + n[None, :], zeros, mask=(row < M) & (n[None, :] < N))


@triton.jit
def _nvfp4(
    x,  # (M, K)
    groups,  # (E,) ends, or (M,) ids
    stored,  # (E, N, STORED/4) int16
    block_scale,  # (E, N, STORED/16) uint8
    tensor_scale,  # (E,) fp32
    out,  # (M, N)
    M,
    N,
    K,
    E,
    X_ROW,
    X_COLUMN,
    STORED: tl.constexpr,
    EVEN: tl.constexpr,  # whether K is a multiple of BLOCK_K
    FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    IDS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    p, programs, n = _place(N, BLOCK_N)
    if ASSEMBLY:
        tl.extra.cuda.gdc_wait()
    expert, row, inside, count = _tile(p, groups, M, E, IDS, GROUPS, ROWS)
    if not IDS:
        _clear(p == programs - 1, out, groups, M, N, E, n, ROWS)
    if count > 0:
        line = expert.to(tl.int64) * N + tl.minimum(n, N - 1)
        word = tl.arange(0, BLOCK_K // 4)
        block = tl.arange(0, BLOCK_K // 16)
        of_words = stored + line[:, None] * (STORED // 4) + word[None, :]
        of_scales = block_scale + line[:, None] * (STORED // 16) + block[None, :]
        # Value j of plane i is column 16 (j // 4) + 4 i + j % 4.
        column = (word // 4) * 16 + word % 4
        of_x = x + row.to(tl.int64)[None, :] * X_ROW
        y = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        # K is no constant: where Triton knows how often the loop runs, it was wrong (nvfp4_linear.py).
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            c = k + column[:, None]
            if EVEN:
                words = tl.load(of_words, eviction_policy="evict_first")
                scales = tl.load(of_scales, eviction_policy="evict_first")
                m0, m1, m2, m3 = inside[None, :], inside[None, :], inside[None, :], inside[None, :]
            else:
                words = tl.load(of_words, mask=k // 4 + word[None, :] < STORED // 4, other=0)
                scales = tl.load(of_scales, mask=k // 16 + block[None, :] < STORED // 16, other=0)
                m0, m1 = inside[None, :] & (c < K), inside[None, :] & (c + 4 < K)
                m2, m3 = inside[None, :] & (c + 8 < K), inside[None, :] & (c + 12 < K)
            x0 = tl.load(of_x + c.to(tl.int64) * X_COLUMN, mask=m0, other=0.0)
            x1 = tl.load(of_x + (c + 4).to(tl.int64) * X_COLUMN, mask=m1, other=0.0)
            x2 = tl.load(of_x + (c + 8).to(tl.int64) * X_COLUMN, mask=m2, other=0.0)
            x3 = tl.load(of_x + (c + 12).to(tl.int64) * X_COLUMN, mask=m3, other=0.0)
            w0, w1, w2, w3 = values(words, scales, ASSEMBLY)
            y = tl.dot(w0.to(x0.dtype), x0, y)
            y = tl.dot(w1.to(x0.dtype), x1, y)
            y = tl.dot(w2.to(x0.dtype), x2, y)
            y = tl.dot(w3.to(x0.dtype), x3, y)
            of_words += BLOCK_K // 4
            of_scales += BLOCK_K // 16
        if ASSEMBLY:
            tl.extra.cuda.gdc_launch_dependents()
        y *= tl.load(tensor_scale + expert) * FACTOR
        place = out + row.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, y.to(out.dtype.element_ty), mask=inside[None, :] & (n[:, None] < N))


@triton.jit
def _fp8(
    x,  # (M, K)
    groups,  # (E,) ends, or (M,) ids
    stored,  # (E, N, STORED) e4m3
    scale_inv,  # fp32: (E,), (E, N), or (E, blocks of 128 x 128 of a matrix)
    out,  # (M, N)
    M,
    N,
    K,
    E,
    X_ROW,
    X_COLUMN,
    STORED: tl.constexpr,
    EVEN: tl.constexpr,
    SCOPE: tl.constexpr,  # 0: an expert's scale, 1: a row's, 2: a block's, of BLOCK_K columns
    ASSEMBLY: tl.constexpr,
    IDS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    p, programs, n = _place(N, BLOCK_N)
    if ASSEMBLY:
        tl.extra.cuda.gdc_wait()
    expert, row, inside, count = _tile(p, groups, M, E, IDS, GROUPS, ROWS)
    if not IDS:
        _clear(p == programs - 1, out, groups, M, N, E, n, ROWS)
    if count > 0:
        BLOCKS: tl.constexpr = (STORED + 127) // 128  # of a row
        column = tl.arange(0, BLOCK_K)
        nearest = tl.minimum(n, N - 1)
        line = expert.to(tl.int64) * N + nearest
        of_w = stored + line[:, None] * STORED + column[None, :]
        of_scale = scale_inv + (expert * ((N + 127) // 128) + nearest // 128) * BLOCKS
        of_x = x + row.to(tl.int64)[None, :] * X_ROW
        y = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            c = k + column
            of_c = of_x + c.to(tl.int64)[:, None] * X_COLUMN
            if EVEN:
                w = tl.load(of_w, eviction_policy="evict_first")
                given = tl.load(of_c, mask=inside[None, :], other=0.0)
            else:
                w = tl.load(of_w, mask=c[None, :] < STORED, other=0.0)
                given = tl.load(of_c, mask=inside[None, :] & (c[:, None] < K), other=0.0)
            if SCOPE == 2:
                y += tl.dot(w.to(given.dtype), given) * tl.load(of_scale + k // 128)[:, None]
            else:
                y = tl.dot(w.to(given.dtype), given, y)
            of_w += BLOCK_K
        if ASSEMBLY:
            tl.extra.cuda.gdc_launch_dependents()
        if SCOPE == 1:
            y *= tl.load(scale_inv + line)[:, None]
        elif SCOPE == 0:
            y *= tl.load(scale_inv + expert)
        place = out + row.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(place, y.to(out.dtype.element_ty), mask=inside[None, :] & (n[:, None] < N))
