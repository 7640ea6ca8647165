"""The cast of cached weights in MXFP8 and NVFP4, in the place of `cached_weights_cast`: scales belong to small blocks,
which a tile holds whole. Arithmetic of `numerics/arithmetic.py`, bit for bit."""

import triton
import triton.language as tl

from te_inductor.numerics.arithmetic import (
    FP32_MAX,
    INFINITY_CODE,
    NAN_CODE,
    SMALLEST_BITS,
    TWO_LEVEL_MAX,
    reciprocal,
)
from te_inductor.recipes.formats import E2M1, E4M3
from te_inductor.templates.triton import cached_tiles as tiles
from te_inductor.templates.triton import casting
from te_inductor.templates.triton.casting import _INFINITY, _INFINITY_BITS, _ONE

_FP32_MAX, _TWO_LEVEL_MAX = tl.constexpr(FP32_MAX), tl.constexpr(TWO_LEVEL_MAX)
_E4M3_MAX, _E2M1_INVERSE = tl.constexpr(E4M3.max), tl.constexpr(reciprocal(E2M1.max))
_INFINITY_CODE, _NAN_CODE = tl.constexpr(INFINITY_CODE), tl.constexpr(NAN_CODE)
_SMALLEST_BITS = tl.constexpr(SMALLEST_BITS)
_HALVES = tl.constexpr(2.0**22)  # fp32 values from there on are halves
_PADDING = tl.constexpr(32)  # what copies are padded to, in elements


@triton.jit
def cached_weights_cast_microscaled(
    parameters,  # (P, 18) int64
    programs,  # int32, the parameter of each program
    stale,  # (W,) int32, where TWO_LEVEL
    INPUT: tl.constexpr,
    ELEMENT: tl.constexpr,  # FP8, or uint8, of two E2M1 values
    TWO_LEVEL: tl.constexpr,  # scales of NVFP4, else of E8M0
    PACKED: tl.constexpr,  # values in a byte
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,  # 1 / LARGEST
    DOWN: tl.constexpr,  # rows and columns of a block
    ACROSS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = parameters + tl.load(programs + tl.program_id(0)) * tiles.PARAMETER_COLUMNS
    amax = 0.0
    if TWO_LEVEL:
        if tl.load(stale + tl.load(row + tiles.P_WEIGHT)) == 0:
            return
        amax = tl.load(tl.load(row + tiles.P_AMAX).to(tl.pointer_type(tl.float32)))
    else:
        stored = tiles.address_of_digest(row)
        before = tl.load(stored)  # before the tile is read, which takes longer
        found, _, _, _, _, _ = tiles.look(row, INPUT, TILE, False, False, ALIGNED)
        if not tiles.replace_digest(stored, before, found):
            return
    top, left, ROWS, COLUMNS = tiles.place_of_tile(row, TILE, ALIGNED)
    source, place = tiles.corner(tl.load(row + tiles.P_SOURCE), top, left, COLUMNS, INPUT, ALIGNED), tl.arange(0, TILE)
    x = tiles.elements(source, place, place, ROWS - top, COLUMNS - left, COLUMNS)
    codes, scales = _codes(x, amax, ELEMENT, TWO_LEVEL, PACKED, LARGEST, INVERSE, DOWN, ACROSS, TILE)
    data, has_data, leading = tiles.target(
        row + tiles.P_DATA, row + tiles.P_LEADING, top, left // PACKED, ELEMENT, ALIGNED
    )
    if has_data:
        _store_scales(scales, tl.load(row + tiles.P_SCALE_INV), top, left, ROWS, COLUMNS, DOWN, ACROSS, TILE, False)
        _store(codes, data, leading, ROWS - top, leading - left // PACKED, PACKED, TILE)
    data_t, has_data_t, leading_t = tiles.target(
        row + tiles.P_DATA_T, row + tiles.P_LEADING_T, left, top // PACKED, ELEMENT, ALIGNED
    )
    if has_data_t:
        if DOWN == ACROSS:
            codes_t, scales_t = codes, scales
        else:
            codes_t, scales_t = _codes(x, amax, ELEMENT, TWO_LEVEL, PACKED, LARGEST, INVERSE, ACROSS, DOWN, TILE)
        _store_scales(scales_t, tl.load(row + tiles.P_SCALE_INV_T), top, left, ROWS, COLUMNS, ACROSS, DOWN, TILE, True)
        _store(tl.trans(codes_t), data_t, leading_t, COLUMNS - left, leading_t - top // PACKED, PACKED, TILE)


@triton.jit
def _codes(
    x,  # (TILE, TILE) fp32, zeros outside
    amax,  # of the tensor, where scales have two levels
    ELEMENT: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    PACKED: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    DOWN: tl.constexpr,  # rows and columns of x that share a scale
    ACROSS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of one copy as x lies, of which E2M1 values are not packed yet, and its scales."""
    HIGH: tl.constexpr = TILE // DOWN
    WIDE: tl.constexpr = TILE // ACROSS
    bits = tl.reshape(tiles.magnitudes(x), (HIGH, DOWN, WIDE, ACROSS))
    largest = tl.max(tl.max(bits, 3), 1).to(tl.float32, bitcast=True)
    if TWO_LEVEL:
        factor, scales = _two_level(largest, amax)
    else:
        factor, scales = _power_of_two(largest * INVERSE)
    factor = tl.reshape(tl.broadcast_to(factor[:, None, :, None], (HIGH, DOWN, WIDE, ACROSS)), (TILE, TILE))
    codes = _e2m1(x * factor).to(tl.uint8) if PACKED == 2 else casting.cast(tiles.product(x, factor), LARGEST, ELEMENT)
    return codes, scales


@triton.jit
def _store_scales(
    scales,  # (TILE / DOWN, TILE / ACROSS)
    address,
    top,
    left,
    ROWS,
    COLUMNS,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    TILE: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # whether the copy's rows are x's columns
):
    """The padding's too, zeros, or NaN where its block has one. A copy's columns are padded, and what has blocks."""
    down, across = top // DOWN + tl.arange(0, TILE // DOWN), left // ACROSS + tl.arange(0, TILE // ACROSS)
    high = ROWS if DOWN == 1 else tl.cdiv(ROWS, _PADDING) * (_PADDING // DOWN)
    wide = COLUMNS if ACROSS == 1 else tl.cdiv(COLUMNS, _PADDING) * (_PADDING // ACROSS)
    pointer = address.to(tl.pointer_type(scales.dtype))
    inside = (down[:, None] < high) & (across[None, :] < wide)
    if TRANSPOSED:
        tl.store(pointer + across[None, :] * high + down[:, None], scales, mask=inside)
    else:
        tl.store(pointer + down[:, None] * wide + across[None, :], scales, mask=inside)


@triton.jit
def _store(codes, data, leading, high, wide, PACKED: tl.constexpr, TILE: tl.constexpr):
    """One tile of one copy, and its padding along the columns."""
    r, c = tl.arange(0, TILE), tl.arange(0, TILE)
    if PACKED == 2:
        low, upper = tl.split(tl.reshape(codes, (TILE, TILE // 2, 2)))
        codes, c = low | (upper << 4), tl.arange(0, TILE // 2)
    tl.store(data + r[:, None] * leading + c[None, :], codes, mask=(r[:, None] < high) & (c[None, :] < wide))


@triton.jit
def _power_of_two(value):
    """The reciprocal of the smallest power of two that is no smaller, and its E8M0 code."""
    bits = value.to(tl.int32, bitcast=True)
    up = ((bits & 0x7FFFFF) != 0) & (bits > _SMALLEST_BITS)
    code = (bits >> 23) + up.to(tl.int32)
    code = tl.where(value == _INFINITY, _INFINITY_CODE, code)
    code = tl.where(value != value, _NAN_CODE, code)
    inverse = tl.where(code == _INFINITY_CODE, _SMALLEST_BITS, (254 - code) << 23)
    inverse = tl.where(code == _NAN_CODE, 0x7FC00000, inverse)
    return inverse.to(tl.float32, bitcast=True), code.to(tl.uint8)


@triton.jit
def first_scale(amax):
    """What the values of a tensor with this amax are multiplied by before their blocks' scales are found."""
    scale = (tl.full((), _TWO_LEVEL_MAX, tl.float64) / amax.to(tl.float64)).to(tl.float32)
    scale = tl.where(scale < _FP32_MAX, scale, _FP32_MAX)
    return tl.where((amax > 0.0) & (amax < _INFINITY), scale, 1.0)


@triton.jit
def _two_level(largest, amax):
    """The factor of values, and the E4M3 scale. Double quotients, as in `casting.encode`."""
    scale = first_scale(amax)
    stored = largest * (scale * _E2M1_INVERSE)
    stored = tl.where(stored > _E4M3_MAX, _E4M3_MAX, stored).to(tl.float8e4nv)
    decode = stored.to(tl.float32) * (1.0 / scale.to(tl.float64)).to(tl.float32)
    factor = (1.0 / decode.to(tl.float64)).to(tl.float32)
    return tl.where(factor < _FP32_MAX, factor, _FP32_MAX), stored


@triton.jit
def _e2m1(value):
    """Codes, one each, to nearest, ties to even; NaN is the largest."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 1 on a code is an exponent and one bit of the mantissa, as those of fp32 are; below it counts halves.
    normal = (magnitude + ((magnitude >> 22) & 1) + (0x1FFFFF - (252 << 22))) >> 22
    halves = (magnitude.to(tl.float32, bitcast=True) + _HALVES).to(tl.int32, bitcast=True) & 3
    code = tl.where(magnitude < _ONE, halves, tl.where(normal < 7, normal, 7))
    return code | tl.where(magnitude <= _INFINITY_BITS, (bits >> 28) & 8, 0)
