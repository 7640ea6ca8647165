"""``a @ b.T`` with sums in one order: Note [One order of sums] in kernels/fixed_order.py.

A program makes a tile of the result from all of K. Where it reads more columns of FP8 at a time than the tensor core
keeps a sum of, `tl.dot` adds up as many sums as there are, in their order. Neighbouring programs read the same part of b
for other rows of a, so that memory is read once. Rows and columns that are not there are read as zeros, and not stored."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor import targets
from te_inductor.kernels.fixed_order import FixedOrderConfig, cut
from te_inductor.runtime.definition import implement_on_cuda
from te_inductor.runtime.eager.fixed_order import BLOCK
from te_inductor.targets import Limits, sm90
from te_inductor.templates.triton.launcher import launcher

PROMOTED = tl.constexpr(BLOCK)  # columns of FP8 whose sum the tensor core keeps
_NONE, _ROWS, _BLOCKS = range(3)  # what has a scale

__all__ = ["fixed_mm", "multiply"]


def fixed_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    blocked: bool,
    out_dtype: torch.dtype,
    turned: bool = False,
) -> Tensor:
    """Computes what the eager kernel does."""
    (batch, m, k), n = a.shape, b.shape[2 if turned else 1]
    config = cut(_limits(a.device), batch, m, n, k, a.itemsize, blocked and a_scale is not None)
    return multiply(a, b, a_scale, b_scale, blocked, out_dtype, config, turned)


@functools.cache
def _limits(device: torch.device) -> Limits:
    return targets.of(device).limits if device.type == "cuda" else sm90.LIMITS  # which the interpreter takes


def multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    blocked: bool,
    out_dtype: torch.dtype,
    config: FixedOrderConfig,
    turned: bool = False,
) -> Tensor:
    """Computes that in tiles of a given size."""
    (batch, m, k), n = a.shape, b.shape[2 if turned else 1]
    a, b, out = a.contiguous(), b.contiguous(), a.new_empty((batch, m, n), dtype=out_dtype)
    scales = _NONE if a_scale is None else _BLOCKS if blocked else _ROWS
    if a_scale is not None and b_scale is not None:
        a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    run = launcher(
        _fixed_mm,
        SCALES=scales,
        OF_ROWS=tuple(scale is not None and scale.ndim > 0 for scale in (a_scale, b_scale)),
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        TURNED=turned,
        num_warps=config.warps,
    )
    programs = batch * triton.cdiv(m, config.rows) * triton.cdiv(n, config.block_n)
    if programs:
        run(programs, a, a_scale, b, b_scale, out, m, n, k)
    return out


implement_on_cuda(fixed_mm=fixed_mm)


@triton.jit(do_not_specialize=["M"])  # one machine code, however many rows there are
def _fixed_mm(
    a,  # (B, M, K)
    a_scale,  # (M,), one, (K/128, M), or None
    b,  # (B, N, K), or (B, K, N) where it is turned
    b_scale,  # (N,), one, (K/128, N), or None
    out,  # (B, M, N)
    M,
    N,
    K,
    SCALES: tl.constexpr,
    OF_ROWS: tl.constexpr,  # whether a has scales of rows, whether b has
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
):
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (down * across)).to(tl.int64)
    tile = tl.program_id(0) % (down * across)
    m = tile % down * ROWS + tl.arange(0, ROWS)
    n = tile // down * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    of_a = a + (batch * M + m)[:, None] * K + column[None, :]
    if TURNED:
        of_b = b + batch * N * K + column[None, :] * N + n[:, None]
    else:
        of_b = b + (batch * N + n)[:, None] * K + column[None, :]
    y = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for turn in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        inside = (turn * BLOCK_K + column)[None, :] < K
        x = tl.load(of_a, mask=inside & (m < M)[:, None], other=0.0)
        w = tl.load(of_b, mask=inside & (n < N)[:, None], other=0.0)
        if SCALES == 2:
            part = tl.dot(x, tl.trans(w), max_num_imprecise_acc=PROMOTED)
            part *= tl.load(a_scale + turn * M + m, mask=m < M, other=0.0)[:, None]
            part *= tl.load(b_scale + turn * N + n, mask=n < N, other=0.0)[None, :]
            y += part
        else:
            y = tl.dot(x, tl.trans(w), y, input_precision="ieee", max_num_imprecise_acc=PROMOTED)
        of_a += BLOCK_K
        of_b += BLOCK_K * N if TURNED else BLOCK_K
    if SCALES == 1:
        y *= tl.load(a_scale + m * OF_ROWS[0], mask=m < M)[:, None]
        y *= tl.load(b_scale + n * OF_ROWS[1], mask=n < N)[None, :]
    place = out + (batch * M + m)[:, None] * N + n[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
