"""Attention of few queries, in two kernels that start early: parts of the keys, and what they come to together.

As in `nvfp4_linear` the large operands, keys and values, are the tensor core's left ones, and the few queries of a KV
head are the 8 columns of its smaller side. A program takes some keys with their values, so that all of both are on
their way at one time; its result is relative to the largest score it saw. Both kernels start early: Note [Kernels that
start early] in lowerings/codegen/programmatic_launch.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.runtime.definition import implement_on_cuda
from te_inductor.runtime.eager import decode_attention as eager
from te_inductor.runtime.eager.decode_attention import QUERIES, WIDTHS
from te_inductor.templates.triton.launcher import launcher

_BLOCK, _STAGES, _WARPS = 64, 2, 4  # keys at a time, of them on their way
_PROGRAMS = 512  # of the first kernel, at most, where one takes more than a block of keys

__all__ = ["attention"]


def attention(
    q: Tensor,  # (B, H, M, D), D one of WIDTHS
    k: Tensor,  # (B, KV heads, N, D), with any strides; H / KV heads * M is at most QUERIES
    v: Tensor,  # (B, KV heads, N, D), with any strides
    keep: Tensor | None,  # (B or 1, N) bool
    scale: float,
    zeros: bool = False,
    assembly: bool = True,
) -> Tensor:  # (B, H, M, D)
    """Computes what the eager kernel does, with scores and sums in fp32."""
    (batch, heads, m, d), (kv_heads, n) = q.shape, k.shape[1:3]
    rows = heads // kv_heads * m
    if rows > QUERIES or d not in WIDTHS or n == 0:  # the first two by hand: the passes ask beforehand
        return eager.decode_attention(q, k, v, keep, scale, zeros)
    q = q.contiguous()
    groups = batch * kv_heads
    blocks = triton.cdiv(n, _BLOCK)
    share = _BLOCK * triton.next_power_of_2(triton.cdiv(blocks, max(1, _PROGRAMS // max(groups, 1))))
    chunks = triton.cdiv(n, share)
    sums, tops, totals = (q.new_empty((chunks, groups, rows, *last), dtype=torch.float32) for last in ((d,), (), ()))
    named = {"D": d, "ASSEMBLY": assembly, "num_warps": _WARPS, "launch_pdl": assembly}
    parts = launcher(_parts, ROWS=QUERIES, BLOCK=_BLOCK, STAGES=_STAGES, **named)
    keep_b = 0 if keep is None or keep.shape[0] == 1 else keep.stride(0)
    keep = keep if keep is None or keep.stride(1) == 1 else keep.contiguous()
    strides = (*k.stride(), *v.stride(), keep_b)
    parts(chunks * groups, q, k, v, keep, sums, tops, totals, rows, n, share, kv_heads, *strides, scale)
    out = torch.empty_like(q)
    together = launcher(_together, CHUNKS=triton.next_power_of_2(chunks), ZEROS=zeros, **named)
    together(groups * rows, sums, tops, totals, out, chunks)
    return out


implement_on_cuda(decode_attention=attention)


@triton.jit
def _parts(
    q,  # (B, HEADS, M, D)
    k,  # (B, HEADS, N, D)
    v,  # (B, HEADS, N, D)
    keep,  # (B or 1, N) bool, or None
    sums,  # (CHUNKS, B * HEADS, M, D) fp32: of exponentials times values
    tops,  # (CHUNKS, B * HEADS, M) fp32: the largest scores
    totals,  # (CHUNKS, B * HEADS, M) fp32: of exponentials
    M,  # queries of all heads that share their keys
    N,
    SHARE,  # keys of a program
    HEADS,  # of keys
    k_b,
    k_h,
    k_n,
    k_d,
    v_b,
    v_h,
    v_n,
    v_d,
    keep_b,
    scale,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    chunks = tl.cdiv(N, SHARE)
    chunk, group = tl.program_id(0) % chunks, (tl.program_id(0) // chunks).to(tl.int64)
    batch, head = group // HEADS, group % HEADS
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    m, d = tl.arange(0, ROWS), tl.arange(0, D).to(tl.int64)
    first = chunk * SHARE
    if ASSEMBLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(q + (group * M + m[None, :]) * D + d[:, None], mask=m[None, :] < M, other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((D, ROWS), tl.float32)
    for start in tl.range(first, first + SHARE, BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        far = n.to(tl.int64)
        seen = n < N
        keys = tl.load(k + far[:, None] * k_n + d[None, :] * k_d, mask=seen[:, None], other=0.0)
        values = tl.load(v + far[None, :] * v_n + d[:, None] * v_d, mask=seen[None, :], other=0.0)
        if keep is not None:
            seen = seen & (tl.load(keep + batch * keep_b + n, mask=seen, other=0) != 0)
        scores = tl.where(seen[:, None], tl.dot(keys, x) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weights = tl.exp(scores - base[None, :])
        shrunk = tl.exp(top - base)
        total = total * shrunk + tl.sum(weights, axis=0)
        y = tl.dot(values, weights.to(values.dtype), y * shrunk[None, :])
        top = higher
    row = (chunk.to(tl.int64) * (tl.num_programs(0) // chunks) + group) * M + m
    tl.store(tops + row, top, mask=m < M)
    tl.store(totals + row, total, mask=m < M)
    tl.store(sums + row[None, :] * D + d[:, None], y, mask=m[None, :] < M)


@triton.jit
def _together(
    sums,  # (count, R, D) fp32
    tops,  # (count, R) fp32
    totals,  # (count, R) fp32
    out,  # (R, D)
    count,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    ZEROS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk, d = tl.arange(0, CHUNKS), tl.arange(0, D)
    place = chunk.to(tl.int64) * tl.num_programs(0) + row
    inside = chunk < count
    if ASSEMBLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    top = tl.load(tops + place, mask=inside, other=float("-inf"))
    total = tl.load(totals + place, mask=inside, other=0.0)
    part = tl.load(sums + place[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    # Where no key is kept all are -inf: the result is NaN, as softmax's, or zeros. Maxima pass over NaN, so that scores
    # that are all NaN leave -inf too, and a total of NaN.
    highest = tl.max(top, axis=0)
    factor = tl.where(inside, tl.exp(top - highest), 0.0)
    y = tl.sum(part * factor[:, None], axis=0) / tl.sum(total * factor, axis=0)
    if ZEROS:
        y = tl.where((highest == float("-inf")) & (tl.sum(total, axis=0) == 0.0), 0.0, y)
    tl.store(out + row * D + d, y.to(out.dtype.element_ty))
