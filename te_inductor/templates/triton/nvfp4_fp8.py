"""``x @ w.T`` with a stored NVFP4 weight and x in E4M3, for prompts: the weight is decoded to E4M3 between its
products.

A program makes 128 columns of y for up to 256 rows of x, on Hopper: two warp groups of 64 rows of the weight each, and
a warp that loads. The weight is the tensor core's left operand, in registers. Which column of K is where in a product
is free, as long as both operands agree; so a thread reads two whole blocks of 16 values, 16 bytes, and makes of them
what it holds of four products, and x comes `arranged`. The products of one 128 columns run while the next are decoded.
Where a loop begins anew ptxas lets no product be under way, so that the end of a turn waits for the last. Rows of x
that are no power of two are two products, of one left operand.

The FP8 values are those of `numerics.nvfp4.recast`, each the value times a power of two of its row. Where K is split, it
is the largest that a part's own block scales allow."""

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

from te_inductor.kernels import nvfp4_fp8
from te_inductor.kernels.nvfp4_fp8 import NVFP4PromptConfig
from te_inductor.recipes.formats import E2M1, E4M3
from te_inductor.templates.triton.launcher import Box, Described, launcher
from te_inductor.templates.triton.nvfp4_decode import E4M3_VALUES, SCALE, TIMES
from te_inductor.templates.triton.nvfp4_groups import (
    BLOCK_K,
    GROUP,
    HALF_K,
    UNITS,
    barriers,
    copy,
    layout,
    store,
    stored,
    to_stored,
)
from te_inductor.templates.triton.partial_sums import sum_dtype

BLOCK_N = gl.constexpr(nvfp4_fp8.BLOCK_N)  # rows of the weight in a program
STAGES = {128: 6, 256: 5}  # of x, by the rows there is room for: what shared memory holds
WEIGHT_STAGES = 3
_REGISTERS = {"default": 168, "group": 240, "loader": 24}  # a thread; ptxas wants 154 at the least for 256 rows of x

_LARGEST = gl.constexpr(E2M1.max)  # of a stored value
_LIMIT = gl.constexpr(E4M3.max)  # of a value decoded
_SCALE = gl.constexpr(SCALE.value)
_TIMES = gl.constexpr(TIMES.value)
_VALUES = gl.constexpr(E4M3_VALUES.value)
# $4: four E4M3 bytes, none negative. The upper bytes of the halves hold the larger: of the odd bytes, of the even ones.
_LARGER = gl.constexpr("{ .reg .b32 t; max.u16x2 $0, $2, $4; shl.b32 t, $4, 8; max.u16x2 $1, $3, t; }")


def arranged(x: Tensor) -> Tensor:  # (M, K), K a multiple of 128
    """Arranges, in each 128 columns, 4 pairs of 2 blocks of 4 runs of 4: pairs and runs change places."""
    m, k = x.shape
    return x.reshape(m, k // 128, 4, 2, 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(m, k)


def partial_sums(
    x: Tensor,  # (M, K) e4m3, `arranged`
    x_scale: Tensor,  # (M, 1) fp32
    stored: Tensor,  # (N, K/2) uint8
    block_scale: Tensor,  # (N, K/16) e4m3
    tensor_scale: Tensor,  # () fp32
    config: NVFP4PromptConfig,
    out_dtype: torch.dtype,  # of the result, where there is one split
) -> Tensor:  # (splits, M, N), fp32 if there are several
    """Returns parts, whose sum over the first dimension is the product."""
    m, n, k = x.shape[0], stored.shape[0], 2 * stored.shape[1]
    out = x_scale.new_empty((config.splits, m, n), dtype=sum_dtype(config.splits, out_dtype))
    scales = block_scale.view(torch.uint8)
    copied = zip((x, stored.view(torch.int32), scales), boxes(config.rows), strict=True)
    run = launcher(_linear, **constants(n, k, config), **options())
    run(
        triton.cdiv(m, config.rows) * config.splits * triton.cdiv(n, BLOCK_N.value),
        *(Described(tensor, box) for tensor, box in copied),
        x_scale,
        scales.view(torch.int32),
        tensor_scale,
        out,
        m,
    )
    return out


def options() -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": _REGISTERS["default"]}


@functools.cache
def boxes(rows: int) -> tuple[Box, ...]:
    """What one copy brings of x, the weight's units and its block scales."""
    return (
        Box((_box(rows), HALF_K.value), gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)),
        Box(
            (BLOCK_N.value, BLOCK_K.value // 8),
            gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2),
        ),
        Box(
            (BLOCK_N.value, BLOCK_K.value // 16), gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2)
        ),
    )


def constants(n: int, k: int, config: NVFP4PromptConfig) -> dict[str, Any]:
    """The kernel's, by name."""
    room = triton.next_power_of_2(config.rows)
    return {
        "N": n, "K": k, "ROWS": config.rows, "ROOM": room, "SPLITS": config.splits, "STAGES": STAGES[room],
        "WEIGHT_STAGES": WEIGHT_STAGES,
        "GROUP_REGISTERS": _REGISTERS["group"], "LOADER_REGISTERS": _REGISTERS["loader"],
        "UNITS": UNITS,
        "SCALES": layout(2, [[0, 1], [1, 0], [0, 8]], BLOCK_K.value // 16),
        "POWERS": gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]),
    }  # fmt: skip


@gluon.constexpr_function
def _first(rows):
    """The rows of x in a program that are one product; the rest, if there is one, are another."""
    return 1 << rows.bit_length() - 1


@gluon.constexpr_function
def _box(rows):
    """Rows of x in a copy: what divides both products."""
    return rows - _first(rows) or rows


@gluon.constexpr_function
def _product(rows):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 32])


@gluon.jit
def _load_all(
    x_desc, w_desc, s_desc, xs, ws, ss, x_bars, w_bars, m, n, first, turns,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WEIGHT_STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: everything that the two warp groups multiply, as far ahead as there is room."""
    BOX: gl.constexpr = _box(ROWS)
    x_full, x_empty = x_bars
    w_full, w_empty = w_bars
    for turn in range(turns):
        place = turn % WEIGHT_STAGES
        mbarrier.wait(w_empty.index(place), (turn // WEIGHT_STAGES & 1) ^ 1)
        mbarrier.expect(w_full.index(place), w_desc.block_type.nbytes + s_desc.block_type.nbytes)
        column = (first + turn) * BLOCK_K
        copy(w_desc, [n, column // 8], w_full.index(place), ws.index(place))
        copy(s_desc, [n, column // 16], w_full.index(place), ss.index(place))
        for half in gl.static_range(2):
            step = 2 * turn + half
            place = step % STAGES
            mbarrier.wait(x_empty.index(place), (step // STAGES & 1) ^ 1)
            mbarrier.expect(x_full.index(place), ROWS * HALF_K)
            for part in gl.static_range(ROWS // BOX):
                into = xs.index(place).slice(part * BOX, BOX)
                copy(x_desc, [m + part * BOX, column + half * HALF_K], x_full.index(place), into)


@gluon.jit
def _powers(
    block_scale, n, first, turns, N: gl.constexpr, K: gl.constexpr, MOST: gl.constexpr, POWERS: gl.constexpr
):  # fmt: skip
    """Finds, for each row of a warp group, the largest power of two that the largest block scale of its columns allows,
    as its bits. The quotient is never near a power of two, so that it does not matter how the division rounds."""
    row = n + gl.arange(0, GROUP, layout=gl.SliceLayout(1, POWERS))
    word = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, POWERS)), 0)
    place = block_scale + gl.expand_dims(row.to(gl.int64) * (K // 64), 1) + first * (BLOCK_K // 64) + word
    odd = gl.zeros((GROUP, 16), gl.int32, layout=POWERS)
    even = odd
    for k in gl.static_range(0, MOST * BLOCK_K // 64, 16):
        mask = gl.expand_dims(row < N, 1) & (word + k < turns * (BLOCK_K // 64))
        scales = gl.load(place + k, mask=mask, other=0)
        odd, even = gl.inline_asm_elementwise(
            _LARGER, "=r,=r,r,r,r", [odd, even, scales], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    largest = gl.maximum(
        gl.maximum((odd >> 24) & 0xFF, (odd >> 8) & 0xFF), gl.maximum((even >> 24) & 0xFF, (even >> 8) & 0xFF)
    )
    largest = gl.max(largest, 1).to(gl.uint8).to(gl.float8e4nv, bitcast=True).to(gl.float32)
    quotient = _LIMIT / gl.where(largest > 0.0, _LARGEST * largest, _LIMIT)
    return quotient.to(gl.int32, bitcast=True) & 0x7F800000


@gluon.jit
def _fetched(
    ws, ss, w_bars, turn, WHO: gl.constexpr, WEIGHT_STAGES: gl.constexpr, UNITS: gl.constexpr, SCALES: gl.constexpr
):
    """A turn's units and block scales, in halves of 128 columns."""
    place = turn % WEIGHT_STAGES
    mbarrier.wait(w_bars[0].index(place), turn // WEIGHT_STAGES & 1)
    units = ws.index(place).slice(WHO * GROUP, GROUP).load(UNITS)
    scales = ss.index(place).slice(WHO * GROUP, GROUP).load(SCALES).to(gl.int32)
    mbarrier.arrive(w_bars[1].index(place))
    u0, u1 = gl.split(gl.permute(gl.reshape(units, (GROUP, 2, HALF_K // 8)), (0, 2, 1)))
    s0, s1 = gl.split(gl.permute(gl.reshape(scales, (GROUP, 2, HALF_K // 16)), (0, 2, 1)))
    return u0, u1, s0, s1


@gluon.jit
def _decoded(units, scales, power):
    """(64, 16) units, (64, 8) scales -> four (64, 8) int32, each of four neighbouring E4M3 values of a block."""
    pair = gl.inline_asm_elementwise(_SCALE, "=r,r", [scales], dtype=gl.int32, is_pure=True, pack=1)
    pair = gl.inline_asm_elementwise(_TIMES, "=r,r,r", [pair, power], dtype=gl.int32, is_pure=True, pack=1)
    low, high = gl.split(gl.reshape(units, (GROUP, HALF_K // 16, 2)))
    pair = gl.convert_layout(pair, low.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        _VALUES,
        "=r,=r,=r,=r,r,r,r",
        [low, high, pair],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _bytes(values):
    """(64, 8) int32 -> (64, 8, 2, 2) e4m3: half, byte of it. Registers as they are."""
    halves = gl.join(values.to(gl.int16), (values >> 16).to(gl.int16))
    return gl.join(halves.to(gl.int8), (halves >> 8).to(gl.int8)).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _operand(decoded, PRODUCT: gl.constexpr):
    """What `_decoded` made as the left operand of 128 columns: i, block of a pair, pair, value."""
    w0, w1, w2, w3 = decoded
    values = gl.join(gl.join(_bytes(w0), _bytes(w2)), gl.join(_bytes(w1), _bytes(w3)))
    # Rows: the two that a lane holds are neighbours in memory, and eight apart in a product.
    values = gl.reshape(values, (4, 2, 2, 2, 2, 4, 2, 4, 2, 2))
    values = gl.permute(values, (0, 4, 1, 3, 2, 8, 9, 6, 5, 7))
    values = gl.reshape(values, (GROUP, HALF_K))
    return gl.convert_layout(values, gl.DotOperandLayout(0, PRODUCT, 4), assert_trivial=True)


@gluon.jit
def _multiplied(ys, decoded, xs, x_bars, step, ROWS: gl.constexpr, STAGES: gl.constexpr):
    FIRST: gl.constexpr = _first(ROWS)
    place = step % STAGES
    mbarrier.wait(x_bars[0].index(place), step // STAGES & 1)
    x = xs.index(place)
    first = _product_of(decoded, x.slice(0, FIRST), ys[0])
    if len(ys) == 1:
        return (first,)
    else:
        return first, _product_of(decoded, x.slice(FIRST, ROWS - FIRST), ys[1])


@gluon.jit
def _product_of(decoded, x, y):
    left = _operand(decoded, _product(x.shape[0]))
    return warpgroup_mma(left, x.permute((1, 0)), y, is_async=True)


@gluon.jit
def _waited(ys, steps: gl.constexpr):
    """Waits until the products of no more than so many steps are under way."""
    if len(ys) == 1:
        return (warpgroup_mma_wait(steps, deps=[ys[0]]),)
    else:
        return warpgroup_mma_wait(2 * steps, deps=[ys[0], ys[1]])


@gluon.jit
def _again(ys):
    """Starts sums to be added to."""
    if len(ys) == 1:
        return (warpgroup_mma_init(ys[0]),)
    else:
        return warpgroup_mma_init(ys[0]), warpgroup_mma_init(ys[1])


@gluon.jit
def _zeros(ROWS: gl.constexpr):
    FIRST: gl.constexpr = _first(ROWS)
    REST: gl.constexpr = ROWS - FIRST
    first = gl.zeros((GROUP, FIRST), gl.float32, layout=_product(FIRST))
    if REST == 0:
        return (first,)
    else:
        return first, gl.zeros((GROUP, REST), gl.float32, layout=_product(REST))


@gluon.jit
def _multiply_all(
    x_scale, block_scale, tensor_scale, out, xs, ws, ss, rowwise, x_bars, w_bars, m, n, split, first, turns, M,
    WHO: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, WEIGHT_STAGES: gl.constexpr, UNITS: gl.constexpr, SCALES: gl.constexpr,
    POWERS: gl.constexpr,
):  # fmt: skip
    """A warp group: 64 columns of y."""
    ROOM: gl.constexpr = xs.shape[1]
    n += WHO * GROUP
    row = m + gl.arange(0, ROOM, layout=gl.BlockedLayout([ROOM // 128], [32], [4], [0]))
    x_scales = gl.load(x_scale + row, mask=row < M, other=0.0)
    rowwise.index(WHO).store(gl.reshape(x_scales, (ROOM // 8, 4, 2)))
    power = _powers(block_scale, n, first, turns, N, K, MOST, POWERS)
    # 2**-e has the bits of 2**e, taken from twice the exponent of 1.
    factor = gl.load(tensor_scale) * (0x7F000000 - power).to(gl.float32, bitcast=True)
    factor = gl.reshape(factor, (GROUP // 2, 2))
    ys = _again(_zeros(ROWS))
    u0, u1, s0, s1 = _fetched(ws, ss, w_bars, 0, WHO, WEIGHT_STAGES, UNITS, SCALES)
    power |= power >> 16  # bf16, in both halves
    power = gl.expand_dims(gl.convert_layout(power, gl.SliceLayout(1, s0.type.layout)), 1)
    w0 = _decoded(u0, s0, power)
    for turn in range(turns - 1):
        ys = _multiplied(ys, w0, xs, x_bars, 2 * turn, ROWS, STAGES)
        w1 = _decoded(u1, s1, power)
        ys = _multiplied(ys, w1, xs, x_bars, 2 * turn + 1, ROWS, STAGES)
        u0, u1, s0, s1 = _fetched(ws, ss, w_bars, turn + 1, WHO, WEIGHT_STAGES, UNITS, SCALES)
        ys = _again(_waited(ys, 1))
        mbarrier.arrive(x_bars[1].index(2 * turn % STAGES))
        w0 = _decoded(u0, s0, power)
        ys = _again(_waited(ys, 0))
        mbarrier.arrive(x_bars[1].index((2 * turn + 1) % STAGES))
    ys = _multiplied(ys, w0, xs, x_bars, 2 * turns - 2, ROWS, STAGES)
    w1 = _decoded(u1, s1, power)
    ys = _multiplied(ys, w1, xs, x_bars, 2 * turns - 1, ROWS, STAGES)
    ys = _waited(ys, 0)
    _store(ys[0], factor, rowwise.index(WHO), out, m, n, split, M, 0, N)
    if len(ys) > 1:
        _store(ys[1], factor, rowwise.index(WHO), out, m, n, split, M, _first(ROWS), N)


@gluon.jit
def _store(y, factor, rowwise, out, m, n, split, M, FIRST: gl.constexpr, N: gl.constexpr):
    """Rows of a program, from the first on."""
    ROWS: gl.constexpr = y.shape[1]
    STORED: gl.constexpr = stored(ROWS)
    y = to_stored(y)
    x_scales = rowwise.slice(FIRST // 8, ROWS // 8).load(gl.SliceLayout(0, gl.SliceLayout(4, STORED)))
    factor = gl.convert_layout(factor, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, STORED))))
    factor = gl.expand_dims(gl.expand_dims(gl.expand_dims(factor, 1), 2), 3)
    y = y * factor * gl.expand_dims(gl.expand_dims(x_scales, 0), 4)
    store(y, out, m + FIRST, n, split, M, N, N % BLOCK_N != 0)


@gluon.jit
def _linear(
    x,  # (M, K) e4m3, a descriptor of it
    units,  # (N, K/8) int32, a descriptor
    scales,  # (N, K/16) uint8, a descriptor
    x_scale,  # (M, 1) fp32
    block_scale,  # (N, K/64) int32
    tensor_scale,  # () fp32
    out,  # (SPLITS, M, N)
    M,
    N: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    ROOM: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    WEIGHT_STAGES: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    UNITS: gl.constexpr,
    SCALES: gl.constexpr,
    POWERS: gl.constexpr,
):
    # Neighbours read the same of the weight for other rows of x.
    tiles = (M + ROWS - 1) // ROWS
    m = gl.program_id(0) % tiles * ROWS
    split = gl.program_id(0) // tiles % SPLITS
    n = gl.program_id(0) // (tiles * SPLITS) * BLOCK_N
    BLOCKS: gl.constexpr = K // BLOCK_K
    MOST: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    if BLOCKS % SPLITS == 0:
        first, turns = split * MOST, MOST
    else:  # some parts have a block more than others
        first = split * BLOCKS // SPLITS
        turns = (split + 1) * BLOCKS // SPLITS - first
    xs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROOM, HALF_K], x.layout)
    ws = gl.allocate_shared_memory(gl.int32, [WEIGHT_STAGES, BLOCK_N, BLOCK_K // 8], units.layout)
    ss = gl.allocate_shared_memory(gl.uint8, [WEIGHT_STAGES, BLOCK_N, BLOCK_K // 16], scales.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    rowwise = gl.allocate_shared_memory(gl.float32, [2, ROOM // 8, 4, 2], PLAIN)
    x_bars = barriers(STAGES, 2)
    w_bars = barriers(WEIGHT_STAGES, 2)
    gl.warp_specialize(
        [
            (_multiply_all, (
                x_scale, block_scale, tensor_scale, out, xs, ws, ss, rowwise, x_bars, w_bars, m, n, split, first, turns,
                M, 0, N, K, ROWS, MOST, STAGES, WEIGHT_STAGES, UNITS, SCALES, POWERS,
            )),
            (_multiply_all, (
                x_scale, block_scale, tensor_scale, out, xs, ws, ss, rowwise, x_bars, w_bars, m, n, split, first, turns,
                M, 1, N, K, ROWS, MOST, STAGES, WEIGHT_STAGES, UNITS, SCALES, POWERS,
            )),
            (_load_all, (
                x, units, scales, xs, ws, ss, x_bars, w_bars, m, n, first, turns, ROWS, STAGES, WEIGHT_STAGES,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
