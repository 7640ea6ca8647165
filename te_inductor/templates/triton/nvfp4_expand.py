"""A stored NVFP4 weight written out: in E4M3 with one scale a row, for FP8 GEMMs, or in bf16 or fp16.

Bound by memory: 4.5 bits are read and 8 or 16 written for each weight.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.recipes.formats import E2M1, E4M3
from te_inductor.templates.triton.launcher import launcher
from te_inductor.templates.triton.nvfp4_decode import FACTOR, e4m3_values, values

_ROWS, _COLUMNS, _STEPS, _WARPS = 8, 512, 4, 4  # a program writes so many rows, columns at a time, and times
LARGEST = tl.constexpr(E2M1.max)  # of a stored value
LIMIT = tl.constexpr(E4M3.max)  # of a value written


def recast(
    stored: Tensor,  # (N, K/2) uint8
    block_scale: Tensor,  # (N, K/16) e4m3
    tensor_scale: Tensor,  # () fp32
    assembly: bool = True,
) -> tuple[Tensor, Tensor]:  # data (N, K) e4m3, scale_inv (N, 1) fp32
    """Computes what `numerics.nvfp4.recast` does, bit for bit."""
    n, k = stored.shape[0], 2 * stored.shape[1]
    data = stored.new_empty((n, k), dtype=torch.float8_e4m3fn)
    scale_inv = tensor_scale.new_empty((n, 1))
    run = launcher(
        _recast, BLOCKS=k // 16, ROWS=_ROWS, BLOCK=_COLUMNS // 16, STEPS=_STEPS, ASSEMBLY=assembly, num_warps=_WARPS
    )
    run(
        _programs(n, k),
        stored.view(torch.int64),
        block_scale.view(torch.uint8),
        tensor_scale,
        data.view(torch.int32),
        scale_inv,
        n,
    )
    return data, scale_inv


def dequantize(
    stored: Tensor,  # (N, K/2) uint8, or of E matrices (E, N, K/2), and so are the others
    block_scale: Tensor,  # (N, K/16) e4m3
    tensor_scale: Tensor,  # () fp32
    k: int,
    dtype: torch.dtype,
    assembly: bool = True,
) -> Tensor:  # (N, k)
    """Computes what `numerics.nvfp4.dequantize` does, bit for bit."""
    n, padded = math.prod(stored.shape[:-1]), 2 * stored.shape[-1]
    data = stored.new_empty((*stored.shape[:-1], k), dtype=dtype)
    run = launcher(
        _expand,
        K=padded,
        COLUMNS=k,
        ROWS=_ROWS,
        BLOCK_K=_COLUMNS,
        STEPS=_STEPS,
        FACTOR=FACTOR,
        ASSEMBLY=assembly,
        num_warps=_WARPS,
    )
    run(
        _programs(n, padded),
        stored.view(torch.int16),
        block_scale.view(torch.uint8),
        tensor_scale,
        data,
        n,
        stored.shape[-2],
    )
    return data


def _programs(n: int, k: int) -> int:
    return triton.cdiv(n, _ROWS) * triton.cdiv(k, _COLUMNS * _STEPS)


@triton.jit
def _recast(
    stored,  # (N, K/16) int64
    block_scale,  # (N, K/16) uint8
    tensor_scale,  # () fp32
    data,  # (N, K/4) int32
    scale_inv,  # (N, 1) fp32
    N,
    BLOCKS: tl.constexpr,  # of a row
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """A thread writes whole blocks, 16 bytes."""
    ACROSS: tl.constexpr = (BLOCKS + BLOCK * STEPS - 1) // (BLOCK * STEPS)  # programs of a row
    first = tl.program_id(0) % ACROSS * (BLOCK * STEPS)
    n = tl.program_id(0) // ACROSS * ROWS + tl.arange(0, ROWS)
    row = n.to(tl.int64)[:, None]
    inside = n[:, None] < N
    power = _powers(block_scale + row * BLOCKS, inside, BLOCKS, ROWS, 256)
    if first == 0:
        tl.store(scale_inv + n, tl.load(tensor_scale) / power, mask=n < N)
    for step in tl.static_range(0, BLOCK * STEPS, BLOCK):
        b = first + step + tl.arange(0, BLOCK)[None, :]
        mask = inside & (b < BLOCKS)
        blocks = tl.load(stored + row * BLOCKS + b, mask=mask, other=0)
        scales = tl.load(block_scale + row * BLOCKS + b, mask=mask, other=0)
        w0, w1, w2, w3 = e4m3_values(blocks, scales, power[:, None], ASSEMBLY)
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, 4 * BLOCK))
        j = 4 * (first + step) + tl.arange(0, 4 * BLOCK)[None, :]
        tl.store(data + row * (4 * BLOCKS) + j, words, mask=inside & (j < 4 * BLOCKS))


@triton.jit
def _expand(
    stored,  # (N, K/4) int16
    block_scale,  # (N, K/16) uint8
    tensor_scale,  # (N / EACH,) fp32
    data,  # (N, COLUMNS)
    N,
    EACH,  # rows that share a tensor's scale
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    ACROSS: tl.constexpr = (K + BLOCK_K * STEPS - 1) // (BLOCK_K * STEPS)  # programs of a row
    first = tl.program_id(0) % ACROSS * (BLOCK_K * STEPS)
    n = tl.program_id(0) // ACROSS * ROWS + tl.arange(0, ROWS)
    row = n.to(tl.int64)[:, None]
    inside = n[:, None] < N
    factor = tl.load(tensor_scale + n // EACH, mask=n < N)[:, None]
    for k in range(first, first + BLOCK_K * STEPS, BLOCK_K):
        j = k // 4 + tl.arange(0, BLOCK_K // 4)[None, :]
        b = k // 16 + tl.arange(0, BLOCK_K // 16)[None, :]
        column = k + tl.arange(0, BLOCK_K)[None, :]
        words = tl.load(stored + row * (K // 4) + j, mask=inside & (j < K // 4), other=0)
        scales = tl.load(block_scale + row * (K // 16) + b, mask=inside & (b < K // 16), other=0)
        w0, w1, w2, w3 = values(words, scales, ASSEMBLY)
        wide = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        wide = tl.permute(tl.reshape(wide, (ROWS, BLOCK_K // 16, 4, 4)), (0, 1, 3, 2))
        wide = tl.reshape(wide, (ROWS, BLOCK_K)).to(tl.float32) * FACTOR * factor
        tl.store(data + row * COLUMNS + column, wide.to(data.dtype.element_ty), mask=inside & (column < COLUMNS))


@triton.jit
def _powers(scale, inside, BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Finds, for each row, the largest power of two that its largest block scale allows. The quotient is never near a
    power of two, so that it does not matter how the division rounds."""
    largest = tl.zeros((ROWS,), dtype=tl.float32)
    for first in range(0, BLOCKS, BLOCK):
        b = first + tl.arange(0, BLOCK)[None, :]
        scales = tl.load(scale + b, mask=inside & (b < BLOCKS), other=0)
        largest = tl.maximum(largest, tl.max(scales.to(tl.float8e4nv, bitcast=True).to(tl.float32), axis=1))
    quotient = LIMIT / tl.where(largest > 0.0, LARGEST * largest, LIMIT)
    return (quotient.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
