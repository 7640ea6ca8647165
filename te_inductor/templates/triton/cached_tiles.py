"""One read of a tile of a weight, for kernels that serve all weights of a graph: where the tile is, its digest, and its
elements."""

import triton
import triton.language as tl

from te_inductor.runtime.weights.cached_weights import GOLDEN, MIX, STEP, signed

GOLDEN_WORD, _MIX_1, _MIX_2 = (tl.constexpr(signed(value)) for value in (GOLDEN, *MIX))
ROWS_A_STEP = tl.constexpr(STEP)

# Columns of the table of parameters, and of that of weights (cached_weights.py, `_Table`).
(
    P_SOURCE,
    P_WEIGHT,
    P_ROWS,
    P_COLUMNS,
    P_PROGRAM,
    P_FIRST_TILE,
    P_SEEN,
    P_DATA,
    P_LEADING,
    P_DATA_T,
    P_LEADING_T,
    P_ABOVE,
    P_ALL_ROWS,
    P_AMAXES,
    P_SCALE_INV,
    P_SCALE_INV_T,
    P_GIVEN_SCALE,
    P_AMAX,
) = (tl.constexpr(place) for place in range(18))
PARAMETER_COLUMNS = tl.constexpr(18)
W_DIGESTS, W_SCALE_INV, W_SCALE_INV_T, W_AMAX, W_AMAXES, W_ROWS, W_COLUMNS = (tl.constexpr(i) for i in range(7))
WEIGHT_COLUMNS = tl.constexpr(7)
# What has to be a multiple of 16 where a kernel is told so (ALIGNED).
ALIGNED_COLUMNS = tuple(
    column.value for column in (P_SOURCE, P_ROWS, P_COLUMNS, P_DATA, P_LEADING, P_DATA_T, P_LEADING_T)
)


@triton.jit
def place_of_tile(row, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Finds where a program's tile begins, and the parameter's sizes."""
    ROWS, COLUMNS = tl.load(row + P_ROWS).to(tl.int32), tl.load(row + P_COLUMNS).to(tl.int32)
    if ALIGNED:
        ROWS, COLUMNS = tl.multiple_of(ROWS, 16), tl.multiple_of(COLUMNS, 16)
    across = tl.cdiv(COLUMNS, TILE)
    place = tl.program_id(0) - tl.load(row + P_PROGRAM).to(tl.int32)
    return place // across * TILE, place % across * TILE, ROWS, COLUMNS


@triton.jit
def corner(address, top, left, leading, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """The address where a tile begins in memory. Places in it are counted from there, in 32 bits."""
    pointer = address.to(tl.pointer_type(ELEMENT)) + (top.to(tl.int64) * leading + left)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def target(place, leading_place, top, left, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Finds where a tile of a copy goes, whether it is wanted, and its leading dimension."""
    address, leading = tl.load(place), tl.load(leading_place).to(tl.int32)
    if ALIGNED:
        leading = tl.multiple_of(leading, 16)
    return corner(address, top, left, leading, ELEMENT, ALIGNED), address != 0, leading


@triton.jit
def elements(source, r, c, high, wide, COLUMNS):
    """The elements of a tile, fp32, zeros outside."""
    inside = (r[:, None] < high) & (c[None, :] < wide)
    return tl.load(source + r[:, None] * COLUMNS + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def look(
    row,
    INPUT: tl.constexpr,
    TILE: tl.constexpr,
    AMAX: tl.constexpr,
    BY_ROW: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One read of a tile: its digest, and where AMAX the largest magnitudes of its columns, (STEP, words) int32 each,
    of the first elements of words, the second, third and fourth; where BY_ROW those of row ``16 * j + i`` at ``[i,
    j]``."""
    BITS: tl.constexpr = INPUT.primitive_bitwidth
    WORDS: tl.constexpr = TILE * BITS // 64
    top, left, ROWS, COLUMNS = place_of_tile(row, TILE, ALIGNED)
    ELEMENT: tl.constexpr = tl.int64 if ALIGNED else (tl.int16 if BITS == 16 else tl.int32)
    source, wide, leading = tl.load(row + P_SOURCE), left, COLUMNS
    if ALIGNED:
        wide, leading = left // (64 // BITS), tl.multiple_of(COLUMNS // (64 // BITS), BITS // 4)
    source = corner(source, top, wide, leading, ELEMENT, ALIGNED)
    place = tl.arange(0, ROWS_A_STEP)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    value = (_tile(row) * (ROWS_A_STEP * WORDS) + place + 1) * GOLDEN_WORD
    first = tl.zeros((ROWS_A_STEP, WORDS), tl.int32)
    second, third, fourth = first, first, first
    rows = tl.zeros((ROWS_A_STEP, TILE // ROWS_A_STEP), tl.int32)
    for step in tl.static_range(TILE // ROWS_A_STEP):
        r = step * ROWS_A_STEP + tl.arange(0, ROWS_A_STEP)
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
            first, second, third, fourth = larger(first, a), larger(second, b), larger(third, c), larger(fourth, d)
            if BY_ROW:
                bits = tl.max(larger(larger(a, b), larger(c, d)), 1, keep_dims=True)
                rows = tl.where(tl.arange(0, TILE // ROWS_A_STEP)[None, :] == step, bits, rows)
    value = (value ^ _high(value)) * _MIX_1
    value = (value ^ _high(value)) * _MIX_2
    return tl.sum(value ^ _high(value)), first, second, third, fourth, bits_of_fp32(rows, INPUT)


@triton.jit
def _words(source, r, high, wide, leading, BITS: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """Rows of a tile, (rows, WORDS) int64, zeros outside. Where addresses are not those of words, of single
    elements."""
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
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def largest_of(first, second, third, fourth):
    return tl.max(larger(larger(first, second), larger(third, fourth)))


@triton.jit
def of_columns_in_order(first, second, third, fourth, INPUT: tl.constexpr, TILE: tl.constexpr):
    """Joins values in the order of columns, (STEP, TILE)"""
    if INPUT.primitive_bitwidth == 16:
        columns = tl.join(tl.join(first, third), tl.join(second, fourth))
    else:
        columns = tl.join(first, second)
    return tl.reshape(columns, (ROWS_A_STEP, TILE))


@triton.jit
def bits_of_fp32(found, INPUT: tl.constexpr):
    """The bits of fp32, where 16 bits of an element lie in the upper half."""
    if tl.float16 == INPUT:
        found = (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return found


@triton.jit
def _high(value):
    """A logical shift by half a word."""
    return (value >> 32) & 0xFFFFFFFF


@triton.jit
def _tile(row):
    """The tile of its weight that a program has."""
    return tl.load(row + P_FIRST_TILE) + tl.program_id(0) - tl.load(row + P_PROGRAM)


@triton.jit
def address_of_digest(row):
    """The address of the digest of a program's tile."""
    return tl.load(row + P_SEEN).to(tl.pointer_type(tl.int64)) + (tl.program_id(0) - tl.load(row + P_PROGRAM))


@triton.jit
def replace_digest(stored, before, digest):
    """Whether `before`, which is there, is not the digest of this tile; from now on it is."""
    digest = tl.where(digest == 0, 1, digest)
    if before != digest:
        tl.debug_barrier()  # All warps have read it.
        tl.store(stored, digest)
    return before != digest


@triton.jit
def product(x, factor):
    """The product of fp32 values, before a cast: NaN where x is infinite. Note [Overflow stays visible] in
    lowerings/casts/values.py."""
    return x * factor + x * 0.0


@triton.jit
def magnitudes(x):
    """Bits of fp32 values without the sign, whose order is that of magnitudes, NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_amax(pointer, bits):
    """Raises the amax of a tensor, which most tiles do not."""
    tl.atomic_max(pointer, bits, mask=bits > tl.load(pointer), sem="relaxed")
