"""Causal attention forward in FP8 on Hopper, for `benchmarks.attention_fp8`: one warp loads, two warp groups have 64 rows
each (Gluon).

While a warp group computes the softmax of a tile of scores, the tensor core multiplies the probabilities of the tile
before with V. Where there are TURNS, the two groups issue their products one after the other, so that one has the
tensor core while the other computes a softmax. Tiles come from the diagonal to the left: only the first one is
masked."""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_inductor.templates.triton.nvfp4_groups import barriers, copy

TILE = gl.constexpr(128)  # rows and columns of scores
ROWS = gl.constexpr(64)  # of a warp group
WIDTH = gl.constexpr(128)  # of a head
OFFSET = gl.constexpr(8.0)  # probabilities are cast as p * 2**8: e4m3 then reaches down to 2**-17
REGISTERS, LOADER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
START_REGISTERS = 168  # as the kernel starts: a third of what both and the loader, which takes as much room, have
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 4))
KEEP = gl.constexpr("mov.b32 $0, $1;")
FINISH = gl.constexpr(
    "{ .reg .pred p; .reg .b32 a; setp.lt.f32 p, $1, 0f00000000; mov.b32 a, 0; @p st.shared.f32 [a], $1; mov.b32 $0, a; }"
)
STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _probabilities(scores, highest, total, to_bits):
    """The operand of the product with V, the maximum and the sum of each row so far, and what the sum before shrinks by.

    In each 16 columns the first product leaves a thread columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; an FP8 operand is four
    neighbours, 4 t to 4 t + 3. V's tokens are stored in the same order, so that no value moves between threads."""
    now = gl.maximum(highest, gl.max(scores, 1) * to_bits)
    p = gl.exp2(scores * to_bits - gl.expand_dims(now - OFFSET, 1))
    shrink = gl.exp2(highest - now)
    total = total * shrink + gl.sum(p, 1)
    p = gl.reshape(gl.permute(gl.reshape(p, (ROWS, TILE // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (ROWS, TILE))
    return gl.convert_layout(p, OPERAND, assert_trivial=True).to(gl.float8e4nv), now, total, shrink


@gluon.jit
def _keep(p):
    """Has an operand stay in its registers until here: LLVM does not know that a product still reads them."""
    gl.inline_asm_elementwise(KEEP, "=r,r", [p], dtype=gl.float8e4nv, is_pure=False, pack=4)


@gluon.jit
def _finish(total):
    """Has a softmax end here: ptxas would wait for the product before most of it. No sum is negative."""
    gl.inline_asm_elementwise(FINISH, "=r,f", [total], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_all(q, k, v, memory, row, keys, channels, steps, STAGES: gl.constexpr):
    """The loading warp."""
    at_q, at_k, at_v, q_full, k_full, k_empty, v_full, v_empty, _ = memory
    mbarrier.expect(q_full.index(0), TILE * WIDTH)
    copy(q, [row, 0], q_full.index(0), at_q.index(0))
    for step in range(steps):
        place, free, start = step % STAGES, (step // STAGES & 1) ^ 1, (steps - 1 - step) * TILE
        mbarrier.wait(k_empty.index(place), free)
        mbarrier.expect(k_full.index(place), TILE * WIDTH)
        copy(k, [keys + start, 0], k_full.index(place), at_k.index(place))
        mbarrier.wait(v_empty.index(place), free)
        mbarrier.expect(v_full.index(place), TILE * WIDTH)
        copy(v, [channels, start], v_full.index(place), at_v.index(place))


@gluon.jit
def _attend(out, to_bits, v_scale, memory, row, steps, WHO: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    """A warp group: 64 rows."""
    at_q, at_k, at_v, q_full, k_full, k_empty, v_full, v_empty, turns = memory
    left = at_q.index(0).slice(WHO * ROWS, ROWS)
    zeros = gl.zeros((ROWS, TILE), gl.float32, layout=PRODUCT)
    acc = warpgroup_mma_init(gl.zeros((ROWS, WIDTH), gl.float32, layout=PRODUCT))
    if TURNS and WHO == 1:
        mbarrier.arrive(turns.index(0))
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(left, at_k.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0))
    below = WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, PRODUCT))
    right = gl.arange(0, TILE, layout=gl.SliceLayout(0, PRODUCT))
    scores = gl.where(gl.expand_dims(below, 1) >= gl.expand_dims(right, 0), scores, float("-inf"))
    highest = gl.full((ROWS,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, PRODUCT))
    total = gl.zeros((ROWS,), gl.float32, layout=gl.SliceLayout(1, PRODUCT))
    p, highest, total, _ = _probabilities(scores, highest, total, to_bits)
    for step in range(1, steps):
        place, phase = step % STAGES, step // STAGES & 1
        before, before_phase = (step - 1) % STAGES, (step - 1) // STAGES & 1
        mbarrier.wait(k_full.index(place), phase)
        mbarrier.wait(v_full.index(before), before_phase)
        if TURNS:
            mbarrier.wait(turns.index(WHO), (step - 1) & 1)
        scores = warpgroup_mma(left, at_k.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, at_v.index(before).permute((1, 0)), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHO))
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(place))
        following, highest, total, shrink = _probabilities(scores, highest, total, to_bits)
        _finish(total)
        summed = warpgroup_mma_wait(0, deps=[acc])
        _keep(p)
        mbarrier.arrive(v_empty.index(before))
        acc = warpgroup_mma_init(summed * gl.expand_dims(shrink, 1))
        p = following
    last = steps - 1
    mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
    acc = warpgroup_mma(p, at_v.index(last % STAGES).permute((1, 0)), acc, is_async=True)
    summed = warpgroup_mma_wait(0, deps=[acc])
    y = gl.convert_layout((summed * gl.expand_dims(v_scale / total, 1)).to(out.dtype.element_ty), STORED)
    down = gl.expand_dims(row + WHO * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED)), 1)
    across = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STORED)), 0)
    gl.store(out + (down * WIDTH + across), y)


@gluon.jit
def attention(
    q,  # descriptor of (heads * tokens, WIDTH) e4m3
    k,  # descriptor of (KV heads * tokens, WIDTH) e4m3
    v,  # descriptor of (KV heads * WIDTH, tokens) e4m3, tokens reordered
    out,  # (heads * tokens, WIDTH) bf16
    q_scale,  # (heads,) fp32: q ~= data * scale
    k_scale,  # (KV heads,) fp32
    v_scale,  # (KV heads,) fp32
    tokens,  # a multiple of TILE
    heads,
    factor,  # of scores, times log2(e)
    GROUP: gl.constexpr,  # heads of a KV head
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):
    number = gl.program_id(0)
    head = number % heads
    kv = head // GROUP
    steps = tokens // TILE - number // heads  # the longest rows begin
    row = head * tokens + (steps - 1) * TILE
    to_bits = gl.load(q_scale + head) * gl.load(k_scale + kv) * factor
    at_q = gl.allocate_shared_memory(q.dtype, [1, TILE, WIDTH], q.layout)
    at_k = gl.allocate_shared_memory(k.dtype, [STAGES, TILE, WIDTH], k.layout)
    at_v = gl.allocate_shared_memory(v.dtype, [STAGES, WIDTH, TILE], v.layout)
    q_full, turns = barriers(1, 1)[0], barriers(2, 1)[0]
    k_full, k_empty = barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 2)
    memory = at_q, at_k, at_v, q_full, k_full, k_empty, v_full, v_empty, turns
    of_v = gl.load(v_scale + kv)
    gl.warp_specialize(
        [
            (_attend, (out, to_bits, of_v, memory, row, steps, 0, STAGES, TURNS)),
            (_attend, (out, to_bits, of_v, memory, row, steps, 1, STAGES, TURNS)),
            (_load_all, (q, k, v, memory, row, kv * tokens, kv * WIDTH, steps, STAGES)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )


def options() -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": START_REGISTERS}


def box() -> tuple[list[int], Any]:
    """What one copy brings, of any operand."""
    return [TILE.value, WIDTH.value], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def launch(operands: tuple[Tensor, ...], out: Tensor, stages: int, turns: bool) -> Tensor:
    """Attends, with what `benchmarks.attention_fp8.prepare` made; `out` is (heads, tokens, WIDTH) bf16."""
    q, k, v, *scales = operands
    heads, tokens, width = out.shape
    if tokens % TILE.value or out.dtype is not torch.bfloat16:
        raise ValueError(f"{tokens} tokens, {out.dtype}; expected a multiple of {TILE.value}, bf16")
    described = [TensorDescriptor.from_tensor(x, *box()) for x in (q, k, v)]
    attention[(heads * tokens // TILE.value,)](
        *described, out, *scales, tokens, heads, width**-0.5 * 1.4426950408889634, heads * tokens // len(k), stages,
        turns, **options(),
    )  # fmt: skip
    return out
