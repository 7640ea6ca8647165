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

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.kernels.nvfp4_linear import DIRECT, PLAIN, STREAMED, NVFP4Config
from te_inductor.templates.triton import nvfp4_direct, nvfp4_streamed
from te_inductor.templates.triton.launcher import launcher
from te_inductor.templates.triton.nvfp4_decode import FACTOR, values
from te_inductor.templates.triton.partial_sums import sum_dtype

__all__ = ["FACTOR", "arranged", "partial_sums", "planes"]


def planes(x: Tensor) -> Tensor:
    """(M, K) -> (M, 4, K/4): plane i holds columns ``16 b + 4 i`` to ``16 b + 4 i + 3`` of each block b."""
    m, k = x.shape
    return x.reshape(m, k // 16, 4, 4).transpose(1, 2).reshape(m, 4, k // 4)


def arranged(x: Tensor, config: NVFP4Config) -> Tensor:
    """x, (M, K), as this config's kernel reads it."""
    return _ARRANGED[config.kind](x)


_ARRANGED = {PLAIN: planes, DIRECT: nvfp4_direct.fragments, STREAMED: nvfp4_streamed.arranged}


def empty(x: Tensor, n: int, config: NVFP4Config, out_dtype: torch.dtype) -> Tensor:
    """What `partial_sums` writes, (splits, M, n)."""
    m = x.shape[0] if config.kind == PLAIN else x.shape[-2]
    return x.new_empty((config.splits, m, n), dtype=sum_dtype(config.splits, out_dtype))


def partial_sums(
    x: Tensor,  # `arranged`
    stored: Tensor,  # (N, K/2) uint8
    block_scale: Tensor,  # (N, K/16) e4m3
    tensor_scale: Tensor,  # () fp32
    config: NVFP4Config,
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
