"""The kernels of kept weights, which kept_weights.py launches. They serve all weights of a graph at once, and find them by
tables of addresses."""

import torch
import triton
import triton.language as tl

from te_inductor.runtime.eager import EXPONENT_MASK
from te_inductor.runtime.kept_weights import GOLDEN, MIX, STEP
from te_inductor.templates.triton.ptx import (
    CAST_CONSTRAINTS,
    CAST_PACK,
    CASTS,
    PAIRS,
    PAIRS_CONSTRAINTS,
    PAIRS_PACK,
)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(_signed(value)) for value in (GOLDEN, *MIX))
_EXPONENT_MASK = tl.constexpr(EXPONENT_MASK)
_INFINITY = tl.constexpr(float("inf"))
_ONE, _INFINITY_BITS = tl.constexpr(127 << 23), tl.constexpr(255 << 23)  # of fp32
_E4M3, _E5M2 = (tl.constexpr(CASTS[dtype]) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
_CONSTRAINTS, _PACK = tl.constexpr(CAST_CONSTRAINTS), tl.constexpr(CAST_PACK)
_PAIRS, _PAIRS_CONSTRAINTS, _PAIRS_PACK = tl.constexpr(PAIRS), tl.constexpr(PAIRS_CONSTRAINTS), tl.constexpr(PAIRS_PACK)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_STEP = tl.constexpr(STEP)

# Columns of the table of parameters, and of that of weights (kept_weights.py, `_Table`).
(
    _SOURCE,
    _WEIGHT,
    _ROWS,
    _COLUMNS,
    _PROGRAM,
    _FIRST_TILE,
    _SEEN,
    _DATA,
    _LEADING,
    _DATA_T,
    _LEADING_T,
    _ABOVE,
    _ALL_ROWS,
    _AMAXES,
    _SCALE_INV,
    _SCALE_INV_T,
    _GIVEN_SCALE,
    _AMAX,
) = (tl.constexpr(place) for place in range(18))
_PARAMETER_COLUMNS = tl.constexpr(18)
_W_SEEN, _W_SCALE_INV, _W_SCALE_INV_T, _W_AMAX, _W_AMAXES, _W_ROWS, _W_COLUMNS = (tl.constexpr(i) for i in range(7))
_WEIGHT_COLUMNS = tl.constexpr(7)
# What has to be a multiple of 16 where a kernel is told so (ALIGNED).
ALIGNED_COLUMNS = tuple(column.value for column in (_SOURCE, _ROWS, _COLUMNS, _DATA, _LEADING, _DATA_T, _LEADING_T))


@triton.jit
def kept_weights_scan(
    parameters,  # (P, 18) int64
    programs,  # int32, the parameter of each program
    digest,  # (W,) int64, zeros
    amax,  # (W,) int32, zeros: bits without the sign, as all amaxes here
    amaxes,  # int32, zeros, where BY_ROW: of each weight its rows' and its columns'
    INPUT: tl.constexpr,
    TILE: tl.constexpr,
    BY_ROW: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = parameters + tl.load(programs + tl.program_id(0)) * _PARAMETER_COLUMNS
    found, first, second, third, fourth, rows = _look(row, INPUT, TILE, True, BY_ROW, ALIGNED)
    weight = tl.load(row + _WEIGHT)
    tl.atomic_add(digest + weight, found, sem="relaxed")
    if BY_ROW:
        top, left, ROWS, COLUMNS = _place(row, TILE, ALIGNED)
        of_rows = amaxes + tl.load(row + _AMAXES)
        of_columns = of_rows + tl.load(row + _ALL_ROWS) + left
        of_rows += tl.load(row + _ABOVE) + top
        r = tl.arange(0, _STEP)[:, None] + tl.arange(0, TILE // _STEP)[None, :] * _STEP
        tl.atomic_max(of_rows + r, rows, mask=r < ROWS - top, sem="relaxed")
        c = tl.arange(0, TILE)
        columns = tl.max(_of_columns(first, second, third, fourth, INPUT, TILE), 0)
        tl.atomic_max(of_columns + c, _bits(columns, INPUT), mask=c < COLUMNS - left, sem="relaxed")
    else:
        _raise_amax(amax + weight, _bits(_largest(first, second, third, fourth), INPUT))


@triton.jit
def kept_weights_decide(
    weights,  # (W, 7) int64
    digest,  # (W,) int64
    amax,  # (W,) int32
    stale,  # (W,) int32: 1 where the copies are to be made
    scale,  # (W,) fp32, where WHOLE
    WHOLE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,  # whether the copies have an amax beside their scales
    LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    POWER_2: tl.constexpr,
):
    weight = tl.program_id(0)
    row = weights + weight * _WEIGHT_COLUMNS
    seen = tl.load(row + _W_SEEN).to(tl.pointer_type(tl.int64))
    differs = _mark(seen, tl.load(seen), tl.load(digest + weight))
    tl.store(stale + weight, differs.to(tl.int32))
    if differs:
        largest = tl.load(amax + weight).to(tl.float32, bitcast=True)
        if TWO_LEVEL:
            tl.store(tl.load(row + _W_AMAX).to(tl.pointer_type(tl.float32)), largest)
        if WHOLE:
            factor = _encode(largest, LARGEST, EPSILON, LARGEST_SCALE, POWER_2)
            tl.store(scale + weight, factor)
            _store_inverse(tl.load(row + _W_SCALE_INV), tl.load(row + _W_SCALE_INV_T), factor)


@triton.jit
def kept_weights_scales(
    weights,  # (W, 7) int64
    stale,  # (W,) int32
    amaxes,  # int32: of each weight its rows' and its columns', which become encode scales
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    POWER_2: tl.constexpr,
):
    row = weights + tl.program_id(0) * _WEIGHT_COLUMNS
    if tl.load(stale + tl.program_id(0)) == 0:
        return
    place, ROWS = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.load(row + _W_ROWS)
    inside = place < ROWS + tl.load(row + _W_COLUMNS)
    pointer = amaxes + tl.load(row + _W_AMAXES) + place
    bits = tl.load(pointer, mask=inside, other=0)
    factor = _encode(bits.to(tl.float32, bitcast=True), LARGEST, EPSILON, LARGEST_SCALE, POWER_2)
    tl.store(pointer, factor.to(tl.int32, bitcast=True), mask=inside)
    data, data_t = tl.load(row + _W_SCALE_INV), tl.load(row + _W_SCALE_INV_T)
    tl.store(data.to(tl.pointer_type(tl.float32)) + place, _inverse(factor), mask=(place < ROWS) & (data != 0))
    pointer = data_t.to(tl.pointer_type(tl.float32)) + (place - ROWS)
    tl.store(pointer, _inverse(factor), mask=inside & (place >= ROWS) & (data_t != 0))


@triton.jit
def kept_weights_cast(
    parameters,  # (P, 18) int64
    programs,  # int32, the parameter of each program
    stale,  # (W,) int32, of weights with one mark
    scale,  # (W,) fp32, where WHOLE and not KNOWN
    scales,  # fp32, where BY_ROW: of each weight its rows' and its columns'
    INPUT: tl.constexpr,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    BY_ROW: tl.constexpr,
    KNOWN: tl.constexpr,  # whether delayed scaling gives the scale
    ALIGNED: tl.constexpr,
    LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    POWER_2: tl.constexpr,
):
    row = parameters + tl.load(programs + tl.program_id(0)) * _PARAMETER_COLUMNS
    if BY_ROW or (WHOLE and not KNOWN):
        if tl.load(stale + tl.load(row + _WEIGHT)) == 0:
            return
    else:
        # Before the look, which takes longer.
        seen = _seen(row)
        before = tl.load(seen)
        if KNOWN:
            given = tl.load(tl.load(row + _GIVEN_SCALE).to(tl.pointer_type(tl.int32)))
            state = tl.load(row + _AMAX)
        mark, first, second, third, fourth, _ = _look(row, INPUT, TILE, KNOWN, False, ALIGNED)
        if KNOWN:
            mark += given.to(tl.int64) * _GOLDEN
            if state != 0:
                bits = _bits(_largest(first, second, third, fourth), INPUT)
                _raise_amax(state.to(tl.pointer_type(tl.int32)), bits)
        if not _mark(seen, before, mark):
            return
    top, left, ROWS, COLUMNS = _place(row, TILE, ALIGNED)
    # Neighbours of a column in one thread: Note [Pairs of rows] in lowerings/column_pairs.py.
    even, c = 2 * tl.arange(0, TILE // 2), tl.arange(0, TILE)
    source = _corner(tl.load(row + _SOURCE), top, left, COLUMNS, INPUT, ALIGNED)
    x0 = _elements(source, even, c, ROWS - top, COLUMNS - left, COLUMNS)
    x1 = _elements(source, even + 1, c, ROWS - top, COLUMNS - left, COLUMNS)
    if BY_ROW:
        scales += tl.load(row + _AMAXES)
        of_rows, of_columns = scales + tl.load(row + _ABOVE) + top, scales + tl.load(row + _ALL_ROWS) + left
        f0 = tl.load(of_rows + even, mask=even < ROWS - top, other=0.0)[:, None]
        f1 = tl.load(of_rows + even + 1, mask=even + 1 < ROWS - top, other=0.0)[:, None]
        f_t = tl.load(of_columns + c, mask=c < COLUMNS - left, other=0.0)[None, :]
    else:
        if WHOLE and KNOWN:
            f0 = given.to(tl.float32, bitcast=True)
            if (top == 0) & (left == 0):
                _store_inverse(tl.load(row + _SCALE_INV), tl.load(row + _SCALE_INV_T), f0)
        elif WHOLE:
            f0 = tl.load(scale + tl.load(row + _WEIGHT))
        else:
            largest = tl.max(_larger(_magnitudes(x0), _magnitudes(x1))).to(tl.float32, bitcast=True)
            f0 = _encode(largest, LARGEST, EPSILON, LARGEST_SCALE, POWER_2)
            _store_block(row, _inverse(f0), top // TILE, left // TILE, COLUMNS, TILE)
        f1 = f0
    cast0, cast1 = _cast(x0 * f0, LARGEST, ELEMENT), _cast(x1 * f1, LARGEST, ELEMENT)
    data, has_data, leading = _target(row + _DATA, row + _LEADING, top, left, ELEMENT, ALIGNED)
    if has_data:
        inside = c[None, :] < COLUMNS - left
        tl.store(data + even[:, None] * leading + c[None, :], cast0, mask=(even[:, None] < ROWS - top) & inside)
        tl.store(
            data + (even[:, None] + 1) * leading + c[None, :], cast1, mask=(even[:, None] + 1 < ROWS - top) & inside
        )
    data_t, has_data_t, leading_t = _target(row + _DATA_T, row + _LEADING_T, left, top, ELEMENT, ALIGNED)
    if has_data_t:
        if BY_ROW:
            cast0, cast1 = _cast(x0 * f_t, LARGEST, ELEMENT), _cast(x1 * f_t, LARGEST, ELEMENT)
        _store_columns(cast0, cast1, data_t, leading_t, ROWS - top, COLUMNS - left, TILE, ALIGNED)


@triton.jit
def _place(row, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a program's tile begins, and the parameter's sizes."""
    ROWS, COLUMNS = tl.load(row + _ROWS).to(tl.int32), tl.load(row + _COLUMNS).to(tl.int32)
    if ALIGNED:
        ROWS, COLUMNS = tl.multiple_of(ROWS, 16), tl.multiple_of(COLUMNS, 16)
    across = tl.cdiv(COLUMNS, TILE)
    place = tl.program_id(0) - tl.load(row + _PROGRAM).to(tl.int32)
    return place // across * TILE, place % across * TILE, ROWS, COLUMNS


@triton.jit
def _corner(address, top, left, leading, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a tile begins in memory. Places in it are counted from there, in 32 bits."""
    pointer = address.to(tl.pointer_type(ELEMENT)) + (top.to(tl.int64) * leading + left)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _target(place, leading_place, top, left, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a tile of a copy goes, whether it is wanted, and its leading dimension."""
    address, leading = tl.load(place), tl.load(leading_place).to(tl.int32)
    if ALIGNED:
        leading = tl.multiple_of(leading, 16)
    return _corner(address, top, left, leading, ELEMENT, ALIGNED), address != 0, leading


@triton.jit
def _elements(source, r, c, high, wide, COLUMNS):
    """Of a tile, fp32, zeros outside."""
    inside = (r[:, None] < high) & (c[None, :] < wide)
    return tl.load(source + r[:, None] * COLUMNS + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _look(
    row,
    INPUT: tl.constexpr,
    TILE: tl.constexpr,
    AMAX: tl.constexpr,
    BY_ROW: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One read of a tile: its digest, and where AMAX the largest magnitudes of its columns, (STEP, words) int32 each, of
    the first elements of words, the second, third and fourth; where BY_ROW those of row ``16 * j + i`` at ``[i, j]``."""
    BITS: tl.constexpr = INPUT.primitive_bitwidth
    WORDS: tl.constexpr = TILE * BITS // 64
    top, left, ROWS, COLUMNS = _place(row, TILE, ALIGNED)
    ELEMENT: tl.constexpr = tl.int64 if ALIGNED else (tl.int16 if BITS == 16 else tl.int32)
    source, wide, leading = tl.load(row + _SOURCE), left, COLUMNS
    if ALIGNED:
        wide, leading = left // (64 // BITS), tl.multiple_of(COLUMNS // (64 // BITS), BITS // 4)
    source = _corner(source, top, wide, leading, ELEMENT, ALIGNED)
    place = tl.arange(0, _STEP)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    value = (_tile(row) * (_STEP * WORDS) + place + 1) * _GOLDEN
    first = tl.zeros((_STEP, WORDS), tl.int32)
    second, third, fourth = first, first, first
    rows = tl.zeros((_STEP, TILE // _STEP), tl.int32)
    for step in tl.static_range(TILE // _STEP):
        r = step * _STEP + tl.arange(0, _STEP)
        words = _words(source, r, ROWS - top, COLUMNS - left, leading, BITS, WORDS, ALIGNED)
        value = (value ^ _high(value)) * _MIX_1 + words
        if AMAX:
            low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
            if BITS == 16:
                a, b = (low << 16) & 0x7FFFFFFF, low & 0x7FFF0000
                c, d = (high << 16) & 0x7FFFFFFF, high & 0x7FFF0000
            else:
                a, b = low & 0x7FFFFFFF, high & 0x7FFFFFFF
                c, d = a, b
            first, second, third, fourth = _larger(first, a), _larger(second, b), _larger(third, c), _larger(fourth, d)
            if BY_ROW:
                bits = tl.max(_larger(_larger(a, b), _larger(c, d)), 1, keep_dims=True)
                rows = tl.where(tl.arange(0, TILE // _STEP)[None, :] == step, bits, rows)
    value = (value ^ _high(value)) * _MIX_1
    value = (value ^ _high(value)) * _MIX_2
    return tl.sum(value ^ _high(value)), first, second, third, fourth, _bits(rows, INPUT)


@triton.jit
def _words(source, r, high, wide, leading, BITS: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """Rows of a tile, (rows, WORDS) int64, zeros outside. Where addresses are not those of words, of single elements."""
    COUNT: tl.constexpr = 64 // BITS
    inside, c = r[:, None] < high, tl.arange(0, WORDS)
    if ALIGNED:
        inside &= c[None, :] < tl.multiple_of(wide // COUNT, 16 // COUNT)
        words = tl.load(source + r[:, None] * leading + c[None, :], mask=inside, other=0)
    else:
        c *= COUNT
        words = tl.zeros((r.shape[0], WORDS), tl.int64)
        for place in tl.static_range(COUNT):
            there = inside & (c[None, :] + place < wide)
            piece = tl.load(source + r[:, None] * leading + (c[None, :] + place), mask=there, other=0)
            words |= (piece.to(tl.int64) & ((1 << BITS) - 1)) << (BITS * place)
    return words


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _largest(first, second, third, fourth):
    return tl.max(_larger(_larger(first, second), _larger(third, fourth)))


@triton.jit
def _of_columns(first, second, third, fourth, INPUT: tl.constexpr, TILE: tl.constexpr):
    """In the order of columns, (STEP, TILE)"""
    if INPUT.primitive_bitwidth == 16:
        columns = tl.join(tl.join(first, third), tl.join(second, fourth))
    else:
        columns = tl.join(first, second)
    return tl.reshape(columns, (_STEP, TILE))


@triton.jit
def _bits(found, INPUT: tl.constexpr):
    """Of fp32, where 16 bits of an element lie in the upper half."""
    if tl.float16 == INPUT:
        found = (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return found


@triton.jit
def _high(value):
    """A logical shift by half a word."""
    return (value >> 32) & 0xFFFFFFFF


@triton.jit
def _tile(row):
    """Which tile of its weight a program has."""
    return tl.load(row + _FIRST_TILE) + tl.program_id(0) - tl.load(row + _PROGRAM)


@triton.jit
def _seen(row):
    """Where the mark of a program's tile is."""
    return tl.load(row + _SEEN).to(tl.pointer_type(tl.int64)) + (tl.program_id(0) - tl.load(row + _PROGRAM))


@triton.jit
def _mark(seen, before, digest):
    """Whether `before`, which is there, is not the mark of this; from now on it is."""
    digest = tl.where(digest == 0, 1, digest)
    if before != digest:
        tl.debug_barrier()  # All warps have read it.
        tl.store(seen, digest)
    return before != digest


@triton.jit
def _magnitudes(x):
    """Bits of fp32 values without the sign, whose order is that of magnitudes, NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _raise_amax(pointer, bits):
    """Of a tensor, which most tiles do not."""
    tl.atomic_max(pointer, bits, mask=bits > tl.load(pointer), sem="relaxed")


@triton.jit
def _encode(amax, LARGEST: tl.constexpr, EPSILON: tl.constexpr, LARGEST_SCALE: tl.constexpr, POWER_2: tl.constexpr):
    """As `runtime.eager.encode_scale`. The double quotient of fp32 values, rounded to fp32, is the correctly rounded one;
    Triton's own fp32 division may be off by 2 ulp. A power of two is found without one, as by `lowerings.values`."""
    amax = tl.where(amax < EPSILON, EPSILON, amax)
    if POWER_2:
        quotient = tl.full((), LARGEST, tl.float32).to(tl.int32, bitcast=True) - amax.to(tl.int32, bitcast=True)
        most = tl.full((), LARGEST_SCALE, tl.float32).to(tl.int32, bitcast=True)
        factor = tl.where(quotient < _INFINITY_BITS - _ONE, quotient + _ONE, most) & _EXPONENT_MASK
        factor = factor.to(tl.float32, bitcast=True)
    else:
        factor = (LARGEST / amax.to(tl.float64)).to(tl.float32)
        factor = tl.where(factor < _INFINITY, factor, LARGEST_SCALE)
    return tl.where((amax > 0.0) & (amax < _INFINITY), factor, 1.0)


@triton.jit
def _inverse(factor):
    return (1.0 / factor.to(tl.float64)).to(tl.float32)


@triton.jit
def _cast(x, LARGEST: tl.constexpr, ELEMENT: tl.constexpr):
    """Note [Casts in PTX]. In the interpreter by comparisons, which NaN passes."""
    if _INTERPRETED:
        x = tl.where(x > LARGEST, LARGEST, x)
        cast = tl.where(x < -LARGEST, -LARGEST, x).to(ELEMENT)
    elif tl.float8e5 == ELEMENT:
        cast = tl.inline_asm_elementwise(_E5M2, _CONSTRAINTS, [x], dtype=tl.float8e5, is_pure=True, pack=_PACK)
    else:
        cast = tl.inline_asm_elementwise(_E4M3, _CONSTRAINTS, [x], dtype=tl.float8e4nv, is_pure=True, pack=_PACK)
    return cast


@triton.jit
def _store_columns(cast0, cast1, data_t, leading_t, high, wide, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """The transpose of a tile of which these are the even rows and the odd ones."""
    c, pair = tl.arange(0, TILE), tl.arange(0, TILE // 2)
    inside = c[:, None] < wide
    if ALIGNED:
        if _INTERPRETED:
            pairs = cast1.to(tl.uint8, bitcast=True).to(tl.uint16) << 8 | cast0.to(tl.uint8, bitcast=True)
        else:
            pairs = tl.inline_asm_elementwise(
                _PAIRS, _PAIRS_CONSTRAINTS, [cast0, cast1], dtype=tl.uint16, is_pure=True, pack=_PAIRS_PACK
            )
        data_t = tl.multiple_of(data_t.to(tl.pointer_type(tl.uint16)), 16)
        place = c[:, None] * tl.multiple_of(leading_t // 2, 8) + pair[None, :]
        inside &= pair[None, :] < tl.multiple_of(high // 2, 8)
        tl.store(data_t + place, tl.trans(pairs), mask=inside)
    else:
        place = data_t + c[:, None] * leading_t + 2 * pair[None, :]
        tl.store(place, tl.trans(cast0), mask=inside & (2 * pair[None, :] < high))
        tl.store(place + 1, tl.trans(cast1), mask=inside & (2 * pair[None, :] + 1 < high))


@triton.jit
def _store_inverse(data, data_t, factor):
    """The scale of a tensor; addresses."""
    tl.store(data.to(tl.pointer_type(tl.float32)), _inverse(factor), mask=data != 0)
    tl.store(data_t.to(tl.pointer_type(tl.float32)), _inverse(factor), mask=data_t != 0)


@triton.jit
def _store_block(row, inverse, down, across, COLUMNS, TILE: tl.constexpr):
    """The scale of one block, in both copies' orders. Parameters above others are of whole blocks."""
    down += tl.load(row + _ABOVE) // TILE
    data, data_t = tl.load(row + _SCALE_INV), tl.load(row + _SCALE_INV_T)
    pointer = data.to(tl.pointer_type(tl.float32)) + down * tl.cdiv(COLUMNS, TILE) + across
    tl.store(pointer, inverse, mask=data != 0)
    pointer = data_t.to(tl.pointer_type(tl.float32)) + across * tl.cdiv(tl.load(row + _ALL_ROWS), TILE) + down
    tl.store(pointer, inverse, mask=data_t != 0)
