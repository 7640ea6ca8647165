"""The kernels of kept weights, which kept_weights.py launches. They serve all weights of a graph at once, and find them by
tables of addresses."""

import torch
import triton
import triton.language as tl

from te_inductor.runtime.eager import EXPONENT_MASK
from te_inductor.runtime.kept_weights import GOLDEN, MIX
from te_inductor.templates.triton.ptx import CAST_CONSTRAINTS, CAST_PACK, CASTS


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(_signed(value)) for value in (GOLDEN, *MIX))
_EXPONENT_MASK = tl.constexpr(EXPONENT_MASK)
_INFINITY = tl.constexpr(float("inf"))
_ONE, _INFINITY_BITS = tl.constexpr(127 << 23), tl.constexpr(255 << 23)  # of fp32
_E4M3, _E5M2 = (tl.constexpr(CASTS[dtype]) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))
_CONSTRAINTS, _PACK = tl.constexpr(CAST_CONSTRAINTS), tl.constexpr(CAST_PACK)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Columns of the table of parameters, and of that of weights (kept_weights.py, `_Table`).
(
    _SOURCE,
    _WORDS,
    _FIRST_WORD,
    _FIRST_SCAN,
    _WEIGHT,
    _ROWS,
    _COLUMNS,
    _FIRST_CAST,
    _DATA,
    _LEADING,
    _DATA_T,
    _LEADING_T,
    _ABOVE,
    _ALL_ROWS,
    _AMAXES,
) = (tl.constexpr(place) for place in range(15))
_SEEN, _SCALE_INV, _SCALE_INV_T, _GIVEN_SCALE, _AMAX = (tl.constexpr(place) for place in range(5))
_PARAMETER_COLUMNS, _WEIGHT_COLUMNS = tl.constexpr(15), tl.constexpr(5)
# What has to be a multiple of 16 where a kernel is told so (ALIGNED).
ALIGNED_COLUMNS = tuple(column.value for column in (_SOURCE, _ROWS, _COLUMNS, _DATA, _LEADING, _DATA_T, _LEADING_T))


@triton.jit
def kept_weights_scan(
    parameters,  # (P, 15) int64
    programs,  # int32, the parameter of each program
    digest,  # (W,) int64, zeros
    amax,  # (W,) int32, zeros: bits without the sign
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,  # of an element
    AMAX: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    program = tl.program_id(0)
    row = parameters + tl.load(programs + program) * _PARAMETER_COLUMNS
    source, count = _pointer(row + _SOURCE, tl.int64, ALIGNED), tl.load(row + _WORDS)
    if ALIGNED:
        count = tl.multiple_of(count, 2)
    weight = tl.load(row + _WEIGHT)
    first = (program - tl.load(row + _FIRST_SCAN)) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = first + place < count
    words = tl.load(source + first + place, mask=inside, other=0)
    value = words + ((tl.load(row + _FIRST_WORD) + first + 1) * _GOLDEN + place.to(tl.int64) * _GOLDEN)
    value = (value ^ _high(value)) * _MIX_1
    value = (value ^ _high(value)) * _MIX_2
    value = tl.where(inside, value ^ _high(value), 0)
    tl.atomic_add(digest + weight, tl.sum(value), sem="relaxed")
    if AMAX:
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
        if BITS == 16:
            largest = _larger(
                _larger(low & 0x7FFF, (low >> 16) & 0x7FFF), _larger(high & 0x7FFF, (high >> 16) & 0x7FFF)
            )
        else:
            largest = _larger(low & 0x7FFFFFFF, high & 0x7FFFFFFF)
        largest = tl.max(largest)
        tl.atomic_max(amax + weight, largest, mask=largest > tl.load(amax + weight), sem="relaxed")


@triton.jit
def _pointer(place, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """An address of a table."""
    pointer = tl.load(place).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _high(value):
    """A logical shift by half a word."""
    return (value >> 32) & 0xFFFFFFFF


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def kept_weights_decide(
    weights,  # (W, 5) int64
    digest,  # (W,) int64
    amax,  # (W,) int32
    stale,  # (W,) int32: 1 where the copies are to be made
    scale,  # (W,) fp32, where WHOLE
    INPUT: tl.constexpr,
    WHOLE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,  # whether the copies have an amax beside their scales
    KNOWN: tl.constexpr,  # whether delayed scaling gives the scale
    LOOK: tl.constexpr,  # whether the digest, and the amax, have been found
    LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    POWER_2: tl.constexpr,
):
    weight = tl.program_id(0)
    row = weights + weight * _WEIGHT_COLUMNS
    seen = tl.load(row + _SEEN).to(tl.pointer_type(tl.int64))
    found = tl.load(digest + weight)
    differs = (tl.load(seen) != found) | (tl.load(seen + 1) != 1)
    if not LOOK:
        differs = differs | True
    if WHOLE or TWO_LEVEL:
        bits = tl.load(amax + weight)
        if tl.float32 == INPUT:
            largest = bits.to(tl.float32, bitcast=True)
        else:
            largest = bits.to(tl.int16).to(INPUT, bitcast=True).to(tl.float32)
    if KNOWN:
        given = tl.load(tl.load(row + _GIVEN_SCALE).to(tl.pointer_type(tl.int32)))
        differs = differs | (tl.load(seen + 2) != given)
        state = tl.load(row + _AMAX)
        if LOOK and state != 0:
            tl.atomic_max(state.to(tl.pointer_type(tl.int32)), largest.to(tl.int32, bitcast=True), sem="relaxed")
    tl.store(stale + weight, differs.to(tl.int32))
    if differs:
        if LOOK:
            tl.store(seen, found)
        tl.store(seen + 1, 1 if LOOK else 0)
        if TWO_LEVEL:
            tl.store(tl.load(row + _AMAX).to(tl.pointer_type(tl.float32)), largest)
        if WHOLE:
            if KNOWN:
                if LOOK:
                    tl.store(seen + 2, given)
                factor = given.to(tl.float32, bitcast=True)
            else:
                factor = _encode(largest, LARGEST, EPSILON, LARGEST_SCALE, POWER_2)
            tl.store(scale + weight, factor)
            inverse = _inverse(factor)
            for place in tl.static_range(_SCALE_INV, _SCALE_INV_T + 1):
                to = tl.load(row + place)
                tl.store(to.to(tl.pointer_type(tl.float32)), inverse, mask=to != 0)


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
def _source(row, INPUT: tl.constexpr, ALIGNED: tl.constexpr):
    """A parameter and its sizes."""
    ROWS, COLUMNS = tl.load(row + _ROWS), tl.load(row + _COLUMNS)
    if ALIGNED:
        ROWS, COLUMNS = tl.multiple_of(ROWS, 16), tl.multiple_of(COLUMNS, 16)
    return _pointer(row + _SOURCE, INPUT, ALIGNED), ROWS, COLUMNS


@triton.jit
def _target(place, leading_place, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a copy goes, whether it is wanted, and its leading dimension."""
    leading = tl.load(leading_place)
    if ALIGNED:
        leading = tl.multiple_of(leading, 16)
    return _pointer(place, ELEMENT, ALIGNED), tl.load(place) != 0, leading


@triton.jit
def _strip(row, program, COLUMNS, WIDE: tl.constexpr):
    """Which row of tiles a program has, and the first column of its tiles."""
    strips = tl.cdiv(COLUMNS, WIDE)
    place = program - tl.load(row + _FIRST_CAST)
    return place // strips, (place % strips) * WIDE


@triton.jit
def kept_weights_amaxes(
    parameters,  # (P, 15) int64
    programs,  # int32, the parameter of each program
    stale,  # (W,) int32
    amaxes,  # int32, zeros: of each weight its rows' and its columns', bits without the sign
    INPUT: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    STEPS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    program = tl.program_id(0)
    row = parameters + tl.load(programs + program) * _PARAMETER_COLUMNS
    if tl.load(stale + tl.load(row + _WEIGHT)) == 0:
        return
    source, ROWS, COLUMNS = _source(row, INPUT, ALIGNED)
    of_rows = amaxes + tl.load(row + _AMAXES)
    of_columns = of_rows + tl.load(row + _ALL_ROWS)
    of_rows += tl.load(row + _ABOVE)
    down, start = _strip(row, program, COLUMNS, WIDE * STEPS)
    r = down * HIGH + tl.arange(0, HIGH)
    largest = tl.zeros((HIGH,), tl.int32)
    for step in range(STEPS):
        c = start + step * WIDE + tl.arange(0, WIDE)
        inside = (r[:, None] < ROWS) & (c[None, :] < COLUMNS)
        x = tl.load(source + r[:, None] * COLUMNS + c[None, :], mask=inside, other=0.0)
        bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = _larger(largest, tl.max(bits, 1))
        tl.atomic_max(of_columns + c, tl.max(bits, 0), mask=c < COLUMNS, sem="relaxed")
    tl.atomic_max(of_rows + r, largest, mask=r < ROWS, sem="relaxed")


@triton.jit
def kept_weights_cast(
    parameters,  # (P, 15) int64
    weights,  # (W, 5) int64
    programs,  # int32, the parameter of each program
    stale,  # (W,) int32
    scale,  # (W,) fp32, where WHOLE
    amaxes,  # int32, where BY_ROW
    INPUT: tl.constexpr,
    ELEMENT: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    STEPS: tl.constexpr,
    WHOLE: tl.constexpr,
    BY_ROW: tl.constexpr,
    LOOK: tl.constexpr,  # whether `stale` says what is to be made
    RECORD: tl.constexpr,  # whether to raise the amax of delayed scaling
    ALIGNED: tl.constexpr,
    LARGEST: tl.constexpr,
    EPSILON: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    POWER_2: tl.constexpr,
):
    program = tl.program_id(0)
    row = parameters + tl.load(programs + program) * _PARAMETER_COLUMNS
    weight = tl.load(row + _WEIGHT)
    if LOOK and tl.load(stale + weight) == 0:
        return
    source, ROWS, COLUMNS = _source(row, INPUT, ALIGNED)
    data, has_data, leading = _target(row + _DATA, row + _LEADING, ELEMENT, ALIGNED)
    data_t, has_data_t, leading_t = _target(row + _DATA_T, row + _LEADING_T, ELEMENT, ALIGNED)
    down, start = _strip(row, program, COLUMNS, WIDE * STEPS)
    r = down * HIGH + tl.arange(0, HIGH)
    vectors = weights + weight * _WEIGHT_COLUMNS
    if BY_ROW:
        above, of_rows = tl.load(row + _ABOVE), amaxes + tl.load(row + _AMAXES)
        of_columns = of_rows + tl.load(row + _ALL_ROWS)
        bits = tl.load(of_rows + above + r, mask=r < ROWS, other=0)
        factor_r = _encode(bits.to(tl.float32, bitcast=True), LARGEST, EPSILON, LARGEST_SCALE, POWER_2)
        _store_vector(tl.load(vectors + _SCALE_INV), above + r, factor_r, (r < ROWS) & (start == 0))
    largest = tl.zeros((HIGH, WIDE), tl.int32)
    for step in range(STEPS):
        c = start + step * WIDE + tl.arange(0, WIDE)
        inside = (r[:, None] < ROWS) & (c[None, :] < COLUMNS)
        x = tl.load(source + r[:, None] * COLUMNS + c[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32)
        if RECORD:
            largest = _larger(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        if BY_ROW:
            bits = tl.load(of_columns + c, mask=c < COLUMNS, other=0)
            factor_c = _encode(bits.to(tl.float32, bitcast=True), LARGEST, EPSILON, LARGEST_SCALE, POWER_2)
            _store_vector(tl.load(vectors + _SCALE_INV_T), c, factor_c, (c < COLUMNS) & (above + down == 0))
            factor = factor_r[:, None]
        elif WHOLE:
            factor = tl.load(scale + weight)
        else:
            bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            factor = _encode(tl.max(bits).to(tl.float32, bitcast=True), LARGEST, EPSILON, LARGEST_SCALE, POWER_2)
            block = tl.load(row + _ABOVE) // HIGH + down
            _store_block(
                vectors, _inverse(factor), block, start // WIDE + step, tl.load(row + _ALL_ROWS), COLUMNS, HIGH, WIDE
            )
        cast = _cast(x * factor, LARGEST, ELEMENT)
        if has_data:
            tl.store(data + r[:, None] * leading + c[None, :], cast, mask=inside)
        if has_data_t:
            if BY_ROW:
                cast = _cast(x * factor_c[None, :], LARGEST, ELEMENT)
            inside = (c[:, None] < COLUMNS) & (r[None, :] < ROWS)
            tl.store(data_t + c[:, None] * leading_t + r[None, :], tl.trans(cast), mask=inside)
    if RECORD:
        state, found = tl.load(vectors + _AMAX), tl.max(largest)
        if state != 0:
            to = state.to(tl.pointer_type(tl.int32))
            tl.atomic_max(to, found, mask=found > tl.load(to), sem="relaxed")


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
def _store_vector(address, place, factor, inside):
    """The scales of rows, or of columns, of one tile."""
    pointer = address.to(tl.pointer_type(tl.float32)) + place
    tl.store(pointer, _inverse(factor), mask=inside & (address != 0))


@triton.jit
def _store_block(row, inverse, down, across, ROWS, COLUMNS, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """The scale of one block, in both copies' orders. Parameters above others are of whole blocks."""
    data, data_t = tl.load(row + _SCALE_INV), tl.load(row + _SCALE_INV_T)
    inside = across * WIDE < COLUMNS
    pointer = data.to(tl.pointer_type(tl.float32)) + down * tl.cdiv(COLUMNS, WIDE) + across
    tl.store(pointer, inverse, mask=inside & (data != 0))
    pointer = data_t.to(tl.pointer_type(tl.float32)) + across * tl.cdiv(ROWS, HIGH) + down
    tl.store(pointer, inverse, mask=inside & (data_t != 0))
