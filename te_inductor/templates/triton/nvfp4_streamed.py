"""``x @ w.T`` with a stored NVFP4 weight and few rows of x, on Hopper: one warp loads, the others decode and multiply.

The loading warp copies blocks of the weight, their scales and x by tensor descriptors, as far ahead as there is room:
what is on its way costs no registers, and x comes once for all warps of a program. A warp group makes of a stage's
weights, 64 rows of them, the left operand of its products in registers, while the tensor core reads x where it lies.
Which column of K is where in a product is free, as long as both operands agree; so a thread reads two whole blocks of
16 values, 16 bytes, and makes of them what it holds of eight products, and x comes `arranged`. The products of 128
columns run while the next are decoded. Where a loop begins anew ptxas lets no product be under way, so that the end of
a turn waits for the last.

Kernels start early: Note [Kernels that start early] in lowerings/codegen/programmatic_launch.py. To load the weight
before that wait was no faster (docs/ledger.md)."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from te_inductor.kernels.nvfp4_linear import streamed_memory
from te_inductor.targets import sm90
from te_inductor.templates.triton.launcher import Box, Described, launcher
from te_inductor.templates.triton.nvfp4_decode import FACTOR, words
from te_inductor.templates.triton.nvfp4_groups import (
    BLOCK_K,
    GROUP,
    HALF_K,
    UNITS,
    barriers,
    copy,
    layout,
    store,
    to_stored,
)

_LOADER = gl.constexpr(24)  # registers of a thread of the loading warp, which takes a warp group's room
_REGISTERS = 65536  # of a multiprocessor


def arranged(x: Tensor) -> Tensor:  # (M, K), K a multiple of 128
    """Arranges, in each 128 columns, 4 lanes of 2 blocks of 4 words of 2 units of 2 values: the lanes come last but for
    the values."""
    m, k = x.shape
    return x.reshape(m, k // 128, 4, 2, 4, 2, 2).permute(0, 1, 3, 4, 5, 2, 6).reshape(m, k)


def launch(
    x: Tensor,  # (M, K), `arranged`
    stored: Tensor,  # (N, K/2) uint8
    block_scale: Tensor,  # (N, K/16) e4m3
    tensor_scale: Tensor,  # () fp32
    out: Tensor,  # (splits, M, N)
    rows: int,  # of x in one program, a power of two, 8 at least
    block_n: int,  # rows of the weight in one program
    shares: int,  # warp groups that share the K of the same rows
    stages: int,
) -> None:
    splits, m, n = out.shape
    k = x.shape[1]
    copied = zip((x, stored.view(torch.int32), block_scale.view(torch.int16)), boxes(rows, block_n), strict=True)
    run = launcher(_linear, **constants(rows, block_n, shares, stages), **options(rows, block_n, shares, stages))
    run(
        triton.cdiv(m, rows) * splits * triton.cdiv(n, block_n),
        *(Described(tensor, box) for tensor, box in copied),
        tensor_scale,
        out,
        m,
        n,
        splits,
        k // (BLOCK_K.value * splits),
    )


def _registers(rows: int, block_n: int, shares: int, stages: int) -> tuple[int, int]:
    """The registers of a thread as it starts, and when the loading warp has given away what it does not need."""
    groups = block_n // GROUP.value * shares
    two = groups == 2 and rows <= 16 and 2 * streamed_memory(rows, block_n, shares, stages) <= sm90.LIMITS.shared_memory
    programs = 2 if two else 1
    start = min(168, _REGISTERS // programs // (128 * (groups + 1)) // 8 * 8)
    return start, min(232, (start * (groups + 1) - _LOADER.value) // groups // 8 * 8)


def options(rows: int, block_n: int, shares: int, stages: int) -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": _registers(rows, block_n, shares, stages)[0], "launch_pdl": True}


@functools.cache
def boxes(rows: int, block_n: int) -> tuple[Box, ...]:
    """What one copy brings of x, the weight's units and pairs of its block scales."""
    return (
        Box((rows, HALF_K.value), gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)),
        Box((block_n, BLOCK_K.value // 8), gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)),
        Box((block_n, BLOCK_K.value // 32), gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)),
    )


def constants(rows: int, block_n: int, shares: int, stages: int) -> dict[str, Any]:
    """The kernel's, by name: one is compiled for weights of all sizes."""
    return {
        "ROWS": rows, "BLOCK_N": block_n, "SHARES": shares, "STAGES": stages, "FACTOR": FACTOR,
        "REGISTERS": _registers(rows, block_n, shares, stages)[1],
        "UNITS": UNITS, "SCALES": layout(1, [[1, 0], [0, 4]], BLOCK_K.value // 32),
    }  # fmt: skip


@gluon.jit
def _next(place, phase, STEP: gl.constexpr, STAGES: gl.constexpr):
    """The stage so many further on, which divide their number, and the parity of its filling."""
    place += STEP
    around = gl.where(place >= STAGES, 1, 0)
    return place - around * STAGES, phase ^ around


@gluon.jit
def _copy_stage(x, units, scales, xs, ws, ss, full, m, n, column, place):
    mbarrier.expect(full.index(place), units.block_type.nbytes + scales.block_type.nbytes + 2 * x.block_type.nbytes)
    copy(units, [n, column // 8], full.index(place), ws.index(place))
    copy(scales, [n, column // 32], full.index(place), ss.index(place))
    copy(x, [m, column], full.index(place), xs.index(2 * place))
    copy(x, [m, column + HALF_K], full.index(place), xs.index(2 * place + 1))


@gluon.jit
def _load_all(x, units, scales, memory, m, n, split, turns, STAGES: gl.constexpr):
    """The loading warp."""
    xs, ws, ss, full, empty, _, _ = memory
    first = split * turns * BLOCK_K
    last = first + turns * BLOCK_K
    ahead = gl.minimum(first + STAGES * BLOCK_K, last)
    gdc_wait()
    for column in range(first, ahead, BLOCK_K):
        _copy_stage(x, units, scales, xs, ws, ss, full, m, n, column, (column - first) // BLOCK_K)
    place, phase = 0, 0
    for column in range(ahead, last, BLOCK_K):
        mbarrier.wait(empty.index(place), phase)
        _copy_stage(x, units, scales, xs, ws, ss, full, m, n, column, place)
        place, phase = _next(place, phase, 1, STAGES)


@gluon.jit
def _fetched(ws, ss, full, place, phase, ROW: gl.constexpr, UNITS: gl.constexpr, SCALES: gl.constexpr):
    """A turn's units and pairs of block scales, in halves of 128 columns."""
    mbarrier.wait(full.index(place), phase)
    units = ws.index(place).slice(ROW, GROUP).load(UNITS)
    pairs = ss.index(place).slice(ROW, GROUP).load(SCALES).to(gl.int32)
    u0, u1 = gl.split(gl.permute(gl.reshape(units, (GROUP, 2, HALF_K // 8)), (0, 2, 1)))
    s0, s1 = gl.split(gl.permute(gl.reshape(pairs, (GROUP, 2, HALF_K // 32)), (0, 2, 1)))
    return u0, u1, s0, s1


@gluon.jit
def _decoded(units, pairs, PRODUCT: gl.constexpr, dtype: gl.constexpr):
    """(64, 16) units, (64, 4) pairs of scales -> the left operand of 128 columns."""
    w0, w1, w2, w3 = words(gl.reshape(units, (GROUP, 4, 2, 2)), pairs)
    values = gl.join(gl.join(_two(w0), _two(w2)), gl.join(_two(w1), _two(w3)))
    # Rows: the two that a lane holds are neighbours in memory, eight apart in a product. Then lane, block, unit, value,
    # i.
    values = gl.reshape(values, (4, 2, 2, 2, 2, 4, 2, 2, 2, 2, 2))
    values = gl.reshape(gl.permute(values, (0, 4, 1, 3, 2, 6, 9, 10, 7, 5, 8)), (GROUP, HALF_K))
    return gl.convert_layout(values, gl.DotOperandLayout(0, PRODUCT, 2), assert_trivial=True).to(dtype)


@gluon.jit
def _two(pairs):
    """Registers of two values, as they are."""
    return gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _multiplied(y, weight, x):
    return warpgroup_mma(weight, x.permute((1, 0)), y, is_async=True)


@gluon.jit
def _multiply_all(
    memory, result,
    WHO: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, SHARES: gl.constexpr, STAGES: gl.constexpr,
    FACTOR: gl.constexpr, UNITS: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """A warp group: 64 columns of y, of every turn or of one in SHARES. STAGES is a multiple of SHARES: a stage is
    always of one share, and who waits for its next filling has seen the last, as one bit tells them apart."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    xs, ws, ss, full, empty, done, sums = memory
    tensor_scale, out, m, n, split, turns, M, N = result
    ACROSS: gl.constexpr = BLOCK_N // GROUP
    PLACE: gl.constexpr = WHO % ACROSS
    SHARE: gl.constexpr = WHO // ACROSS
    ROW: gl.constexpr = PLACE * GROUP
    place, phase = SHARE, 0
    y = warpgroup_mma_init(gl.zeros((GROUP, ROWS), gl.float32, layout=PRODUCT))
    u0, u1, s0, s1 = _fetched(ws, ss, full, place, phase, ROW, UNITS, SCALES)
    w0 = _decoded(u0, s0, PRODUCT, xs.dtype)
    for _ in range(SHARES, turns, SHARES):
        y = _multiplied(y, w0, xs.index(2 * place))
        w1 = _decoded(u1, s1, PRODUCT, xs.dtype)
        y = _multiplied(y, w1, xs.index(2 * place + 1))
        multiplied = place
        place, phase = _next(place, phase, SHARES, STAGES)
        u0, u1, s0, s1 = _fetched(ws, ss, full, place, phase, ROW, UNITS, SCALES)
        y = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[y]))
        w0 = _decoded(u0, s0, PRODUCT, xs.dtype)
        y = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[y]))
        mbarrier.arrive(empty.index(multiplied))
    y = _multiplied(y, w0, xs.index(2 * place))
    w1 = _decoded(u1, s1, PRODUCT, xs.dtype)
    y = _multiplied(y, w1, xs.index(2 * place + 1))
    y = warpgroup_mma_wait(0, deps=[y])
    if SHARE > 0:
        sums.index((SHARE - 1) * ACROSS + PLACE).store(y)
        mbarrier.arrive(done.index(PLACE))
    else:
        gdc_launch_dependents()
        if SHARES > 1:
            mbarrier.wait(done.index(PLACE), 0)
        for share in gl.static_range(SHARES - 1):
            y += sums.index(share * ACROSS + PLACE).load(PRODUCT)
        y = to_stored(y * (gl.load(tensor_scale) * FACTOR))
        store(y, out, m, n + ROW, split, M, N, True)


@gluon.jit(do_not_specialize=["M", "SPLITS", "TURNS"])
def _linear(
    x,  # (M, K), a descriptor of it
    units,  # (N, K/8) int32, a descriptor
    scales,  # (N, K/32) int16, a descriptor
    tensor_scale,  # () fp32
    out,  # (SPLITS, M, N)
    M,
    N,
    SPLITS,
    TURNS,  # of a part of K
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SHARES: gl.constexpr,
    STAGES: gl.constexpr,
    FACTOR: gl.constexpr,
    REGISTERS: gl.constexpr,
    UNITS: gl.constexpr,
    SCALES: gl.constexpr,
):
    # Neighbours read the same of the weight for other rows of x.
    tiles = (M + ROWS - 1) // ROWS
    m = gl.program_id(0) % tiles * ROWS
    split = gl.program_id(0) // tiles % SPLITS
    n = gl.program_id(0) // (tiles * SPLITS) * BLOCK_N
    ACROSS: gl.constexpr = BLOCK_N // GROUP
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, HALF_K], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, BLOCK_K // 8], units.layout)
    ss = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, BLOCK_K // 32], scales.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [max(SHARES - 1, 1) * ACROSS, GROUP, ROWS], PLAIN)
    full, empty = barriers(STAGES, ACROSS)
    done = gl.allocate_shared_memory(gl.int64, [ACROSS, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(ACROSS):
        mbarrier.init(done.index(place), count=max(SHARES - 1, 1))
    memory = xs, ws, ss, full, empty, done, sums
    result = tensor_scale, out, m, n, split, TURNS, M, N
    if ACROSS * SHARES == 2:
        gl.warp_specialize(
            [
                (_multiply_all, (memory, result, 0, ROWS, BLOCK_N, SHARES, STAGES, FACTOR, UNITS, SCALES)),
                (_multiply_all, (memory, result, 1, ROWS, BLOCK_N, SHARES, STAGES, FACTOR, UNITS, SCALES)),
                (_load_all, (x, units, scales, memory, m, n, split, TURNS, STAGES)),
            ],
            [4, 1],
            [REGISTERS, _LOADER],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_all, (memory, result, 0, ROWS, BLOCK_N, SHARES, STAGES, FACTOR, UNITS, SCALES)),
                (_multiply_all, (memory, result, 1, ROWS, BLOCK_N, SHARES, STAGES, FACTOR, UNITS, SCALES)),
                (_multiply_all, (memory, result, 2, ROWS, BLOCK_N, SHARES, STAGES, FACTOR, UNITS, SCALES)),
                (_multiply_all, (memory, result, 3, ROWS, BLOCK_N, SHARES, STAGES, FACTOR, UNITS, SCALES)),
                (_load_all, (x, units, scales, memory, m, n, split, TURNS, STAGES)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, _LOADER],
        )
