"""``x @ w.T`` with a stored NVFP4 weight and up to 16 rows of x: straight from memory to the registers of its product.

A lane of a warp reads whole blocks of 16 values, 16 bytes at a time, of two rows that the tensor core gives it. Which
columns an instruction multiplies is free, as long as both operands agree; so nothing moves between threads, shared
memory is not used, and a scale is made ready once for its block. The loads of the next 256 columns start before these
are decoded: `AHEAD` blocks of them are on their way. x comes from the L1 cache, in the order of `fragments`, so that
what a warp loads lies in a row.

A scheduler of a multiprocessor has registers for four warps of 128, and for two of 255: configs are chosen for one
wave."""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from te_inductor.kernels import nvfp4_linear
from te_inductor.templates.triton.launcher import launcher
from te_inductor.templates.triton.nvfp4_decode import FACTOR, words
from te_inductor.templates.triton.nvfp4_groups import index

COLUMNS = gl.constexpr(nvfp4_linear.COLUMNS)  # of x and the weight that a warp multiplies in one turn

# ptxas moves no load across this, and of a warp alone it is next to nothing. Without it, loads that nobody waits for in
# this turn of the loop are put last.
_LOADED = gl.constexpr("bar.warp.sync 0xffffffff; // $0")


def fragments(x: Tensor) -> Tensor:  # (M, K) -> (K/32, M, 32); one row as it is
    """A chunk holds every fourth run of 8 columns of 128, for each row: what four lanes read at once."""
    m, k = x.shape
    if m == 1:
        return x
    return x.reshape(m, k // 128, 4, 4, 8).permute(1, 3, 0, 2, 4).reshape(k // 32, m, 32)


def launch(
    x: Tensor,  # `fragments`
    stored: Tensor,  # (N, K/2) uint8
    block_scale: Tensor,  # (N, K/16) e4m3
    tensor_scale: Tensor,  # () fp32
    out: Tensor,  # (splits, M, N)
    rows: int,  # of x in one program, 8 or 16; where M is more, neighbours read the same of the weight
    block_n: int,  # rows of the weight in one program, a multiple of 16, N at most
    warps: int,  # that share the K of a program
    ahead: int,  # blocks of columns
) -> None:
    splits, m, n = out.shape
    k = 2 * stored.shape[1]
    ahead = min(ahead, k // (COLUMNS.value * splits * warps))
    run = launcher(
        _linear, **constants(x.dim() == 3, m, k, rows, block_n, splits, warps, ahead), **options(block_n, warps)
    )
    run(
        triton.cdiv(m, rows) * splits * triton.cdiv(n, block_n),
        x,
        stored.view(torch.int32),
        block_scale.view(torch.uint16),
        tensor_scale,
        out,
        n,
    )


def options(block_n: int, warps: int) -> dict[str, Any]:
    return {"num_warps": warps, "launch_pdl": True, **({"maxnreg": 128} if block_n == 16 else {})}


def constants(
    arranged: bool, m: int, k: int, rows: int, block_n: int, splits: int, warps: int, ahead: int
) -> dict[str, Any]:
    """The kernel's, by name. M is one: loads at distances that are known take no arithmetic."""
    product = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])
    tiles = block_n // 16
    # Dimensions: warp, tile of 16 rows, upper or lower 8, row, lane of a row, and what a lane reads.
    lanes = [(4, 1), (4, 2), (3, 1), (3, 2), (3, 4)]
    unit = _layout((warps, tiles, 2, 8, 4, 2, 4), [(6, 1), (6, 2), (2, 1), (5, 1), *_bits(1, tiles)], lanes)
    scale = _layout((warps, tiles, 2, 8, 4, 2, 1), [(2, 1), (5, 1), *_bits(1, tiles)], lanes)
    # warp, 8 rows, row, lane of a row; block, its half, column
    lanes = [(3, 1), (3, 2), (2, 1), (2, 2), (2, 4)]
    of_x = _layout((warps, rows // 8, 8, 4, 2, 2, 8), [*_bits(6, 8), (5, 1), (4, 1), *_bits(1, rows // 8)], lanes)
    return {
        "ARRANGED": arranged, "M": m,
        "K": k, "ROWS": rows, "BLOCK_N": block_n, "SPLITS": splits, "AHEAD": ahead, "FACTOR": FACTOR,
        "PRODUCT": product, "UNIT": unit, "SCALE": scale, "OF_X": of_x,
    }  # fmt: skip


def _layout(shape: tuple[int, ...], registers: list[tuple[int, int]], lanes: list[tuple[int, int]]) -> Any:
    """Says which bit of which dimension each bit of a register's and a lane's number is; dimension 0 is the warp's."""

    def bases(bits: list[tuple[int, int]]) -> list[list[int]]:
        return [[bit if place == dim else 0 for place in range(len(shape))] for dim, bit in bits]

    return gl.DistributedLinearLayout(bases(registers), bases(lanes), bases(_bits(0, shape[0])), [], list(shape))


def _bits(dim: int, size: int) -> list[tuple[int, int]]:
    return [(dim, 1 << bit) for bit in range(size.bit_length() - 1)]


@gluon.jit
def _loaded(loaded, weight, turn, SHARES: gl.constexpr):
    """Loads one block of columns more."""
    units = gl.load(weight[0] + turn * (SHARES * COLUMNS // 8) + weight[1], eviction_policy="evict_first")
    scales = gl.load(weight[2] + turn * (SHARES * COLUMNS // 32) + weight[3])
    gl.inline_asm_elementwise(_LOADED, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    loaded += ((units, scales.to(gl.int32)),)
    return loaded


@gluon.jit
def _operand(pairs, PRODUCT: gl.constexpr, dtype: gl.constexpr):
    """Registers of two values each to the left operand (warps, rows of the weight, 32), columns in the order: unit of a
    block, lane, block, value of a pair."""
    WARPS: gl.constexpr = pairs.shape[0]
    ROWS: gl.constexpr = pairs.shape[1] * 16
    values = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(gl.bfloat16, bitcast=True)
    values = gl.permute(gl.reshape(values, (WARPS, ROWS, 4, 2, 2, 2)), (0, 1, 4, 2, 3, 5))
    values = gl.reshape(values, (WARPS, ROWS, 32))
    return gl.convert_layout(values, gl.DotOperandLayout(0, PRODUCT, 4), assert_trivial=True).to(dtype)


@gluon.jit
def _planes(x, PRODUCT: gl.constexpr):
    """The planes of 128 columns, for the four products of a unit: right operands, (warps, 32, rows)."""
    WARPS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1] * 8
    # lane, block, i / 2, i % 2, unit, value
    x = gl.reshape(x, (WARPS, ROWS, 4, 2, 2, 2, 2, 2))
    x02, x13 = gl.split(gl.permute(x, (0, 1, 6, 2, 3, 7, 4, 5)))
    x0, x2 = gl.split(x02)
    x1, x3 = gl.split(x13)
    return _right(x0, PRODUCT), _right(x1, PRODUCT), _right(x2, PRODUCT), _right(x3, PRODUCT)


@gluon.jit
def _right(x, PRODUCT: gl.constexpr):
    x = gl.permute(gl.reshape(x, (x.shape[0], x.shape[1], 32)), (0, 2, 1))
    return gl.convert_layout(x, gl.DotOperandLayout(1, PRODUCT, 4), assert_trivial=True)


@gluon.jit
def _multiplied(y, z, units, scales, x, PRODUCT: gl.constexpr):
    """128 columns more: two sums, so that half as many products wait for each other."""
    w0, w1, w2, w3 = words(units, scales)
    x0, x1, x2, x3 = _planes(x, PRODUCT)
    y = mma_v2(_operand(w0, PRODUCT, x.dtype), x0, y)
    z = mma_v2(_operand(w1, PRODUCT, x.dtype), x1, z)
    y = mma_v2(_operand(w2, PRODUCT, x.dtype), x2, y)
    z = mma_v2(_operand(w3, PRODUCT, x.dtype), x3, z)
    return y, z


@gluon.jit
def _turned(y, z, loaded, x, HALF: gl.constexpr, PRODUCT: gl.constexpr):
    """256 columns more, in two halves, since x takes most registers."""
    units, scales = loaded
    u0, u1 = gl.split(gl.permute(units, (0, 1, 2, 3, 4, 6, 5)))
    s0, s1 = gl.split(gl.reshape(scales, (scales.shape[0], scales.shape[1], 2, 8, 4, 2)))
    y, z = _multiplied(y, z, u0, s0, gl.load(x), PRODUCT)
    return _multiplied(y, z, u1, s1, gl.load(x + HALF), PRODUCT)


@gluon.jit
def _linear(
    x,  # (K/32, M, 32) where ARRANGED, else (1, K)
    stored,  # (N, K/8) int32
    block_scale,  # (N, K/32) uint16
    tensor_scale,  # () fp32
    out,  # (SPLITS, M, N)
    N,
    ARRANGED: gl.constexpr,
    M: gl.constexpr,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    AHEAD: gl.constexpr,
    FACTOR: gl.constexpr,
    PRODUCT: gl.constexpr,
    UNIT: gl.constexpr,
    SCALE: gl.constexpr,
    OF_X: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    SHARES: gl.constexpr = SPLITS * WARPS  # of K; neighbours read neighbouring blocks of columns
    TURNS: gl.constexpr = K // (COLUMNS * SHARES)
    TILES: gl.constexpr = (M + ROWS - 1) // ROWS
    first = gl.program_id(0) % TILES * ROWS if TILES > 1 else 0
    split = gl.program_id(0) // TILES % SPLITS
    # The last program does rows of its neighbour again where they are fewer. What a lane adds to an address (0) and
    # what a register does (1) are kept apart: the second is a constant of a load.
    n = gl.minimum(gl.program_id(0) // (TILES * SPLITS) * BLOCK_N, N - BLOCK_N)
    unit0 = index(3, UNIT) * (K // 8) + index(4, UNIT) * 4 + index(0, UNIT) * (COLUMNS // 8)
    unit1 = (index(1, UNIT) * 16 + index(2, UNIT) * 8) * (K // 8) + index(5, UNIT) * 16 + index(6, UNIT)
    scale0 = index(3, SCALE) * (K // 32) + index(4, SCALE) + index(0, SCALE) * (COLUMNS // 32)
    scale1 = (index(1, SCALE) * 16 + index(2, SCALE) * 8) * (K // 32) + index(5, SCALE) * 4 + index(6, SCALE)
    stored += n.to(gl.int64) * (K // 8) + split * (WARPS * COLUMNS // 8)
    block_scale += n.to(gl.int64) * (K // 32) + split * (WARPS * COLUMNS // 32)
    weight = (stored + unit0, unit1, block_scale + scale0, scale1)
    row = gl.minimum(first + index(1, OF_X) * 8 + index(2, OF_X), M - 1)  # sums of the rows beyond are not stored
    LANE: gl.constexpr = 8 if ARRANGED else 32
    BLOCK: gl.constexpr = 64 * M if ARRANGED else 16
    EIGHT: gl.constexpr = 32 * M if ARRANGED else 8
    x0 = row * 32 + index(3, OF_X) * LANE + index(0, OF_X) * (COLUMNS * M)
    x1 = index(4, OF_X) * BLOCK + index(5, OF_X) * EIGHT + index(6, OF_X)
    x += split * (WARPS * COLUMNS * M)
    gdc_wait()
    y = gl.zeros((WARPS, BLOCK_N, ROWS), gl.float32, layout=PRODUCT)
    z = y
    loaded = _loaded((), weight, 0, SHARES)
    for turn in gl.static_range(1, AHEAD):
        loaded = _loaded(loaded, weight, turn, SHARES)
    # So many turns at once that what is loaded stays in its registers: to copy it would be to wait for it.
    WHOLE: gl.constexpr = (TURNS - AHEAD) // (AHEAD + 1) * (AHEAD + 1)
    for whole in range(0, WHOLE, AHEAD + 1):
        for turn in gl.static_range(AHEAD + 1):
            loaded = _loaded(loaded, weight, whole + turn + AHEAD, SHARES)
            y, z = _turned(
                y, z, loaded[0], x + (whole + turn) * (SHARES * COLUMNS * M) + x0 + x1, COLUMNS // 2 * M, PRODUCT
            )
            loaded = loaded[1:]
    for turn in gl.static_range(WHOLE, TURNS):
        if turn + AHEAD < TURNS:
            loaded = _loaded(loaded, weight, turn + AHEAD, SHARES)
        y, z = _turned(y, z, loaded[0], x + turn * (SHARES * COLUMNS * M) + x0 + x1, COLUMNS // 2 * M, PRODUCT)
        loaded = loaded[1:]
    gdc_launch_dependents()
    y = gl.sum(y + z, 0) * (gl.load(tensor_scale) * FACTOR)
    column = n + gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, y.type.layout)), 1)
    row = first + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, y.type.layout)), 0)
    gl.store(out + (split * M + row).to(gl.int64) * N + column, y.to(out.dtype.element_ty), mask=row < M)
