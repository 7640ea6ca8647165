"""The kernels of cached weights, which cached_weights.py launches. They serve all weights of a graph at once, and find them
by tables of addresses."""

import triton
import triton.language as tl

from te_inductor.templates.triton import cached_tiles as tiles
from te_inductor.templates.triton import casting


@triton.jit
def cached_weights_scan(
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
    row = parameters + tl.load(programs + tl.program_id(0)) * tiles.PARAMETER_COLUMNS
    found, first, second, third, fourth, rows = tiles.look(row, INPUT, TILE, True, BY_ROW, ALIGNED)
    weight = tl.load(row + tiles.P_WEIGHT)
    tl.atomic_add(digest + weight, found, sem="relaxed")
    if BY_ROW:
        top, left, ROWS, COLUMNS = tiles.place_of_tile(row, TILE, ALIGNED)
        of_rows = amaxes + tl.load(row + tiles.P_AMAXES)
        of_columns = of_rows + tl.load(row + tiles.P_ALL_ROWS) + left
        of_rows += tl.load(row + tiles.P_ABOVE) + top
        r = (
            tl.arange(0, tiles.ROWS_A_STEP)[:, None]
            + tl.arange(0, TILE // tiles.ROWS_A_STEP)[None, :] * tiles.ROWS_A_STEP
        )
        tl.atomic_max(of_rows + r, rows, mask=r < ROWS - top, sem="relaxed")
        c = tl.arange(0, TILE)
        columns = tl.max(tiles.of_columns_in_order(first, second, third, fourth, INPUT, TILE), 0)
        tl.atomic_max(of_columns + c, tiles.bits_of_fp32(columns, INPUT), mask=c < COLUMNS - left, sem="relaxed")
    else:
        tiles.raise_amax(amax + weight, tiles.bits_of_fp32(tiles.largest_of(first, second, third, fourth), INPUT))


@triton.jit
def cached_weights_decide(
    weights,  # (W, 7) int64
    digest,  # (W,) int64
    amax,  # (W,) int32
    stale,  # (W,) int32: 1 where the copies are to be made
    scale,  # (W,) fp32, where WHOLE
    WHOLE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,  # whether the copies have an amax beside their scales
    SCALING: tl.constexpr,
):
    weight = tl.program_id(0)
    row = weights + weight * tiles.WEIGHT_COLUMNS
    stored = tl.load(row + tiles.W_DIGESTS).to(tl.pointer_type(tl.int64))
    differs = tiles.replace_digest(stored, tl.load(stored), tl.load(digest + weight))
    tl.store(stale + weight, differs.to(tl.int32))
    if differs:
        largest = tl.load(amax + weight).to(tl.float32, bitcast=True)
        if TWO_LEVEL:
            tl.store(tl.load(row + tiles.W_AMAX).to(tl.pointer_type(tl.float32)), largest)
        if WHOLE:
            factor = casting.encode(largest, SCALING)
            tl.store(scale + weight, factor)
            _store_inverse(tl.load(row + tiles.W_SCALE_INV), tl.load(row + tiles.W_SCALE_INV_T), factor)


@triton.jit(do_not_specialize=["chunks"])
def cached_weights_scales(
    weights,  # (W, 7) int64
    stale,  # (W,) int32
    amaxes,  # int32: of each weight its rows' and its columns', which become encode scales
    chunks,  # programs of a weight
    BLOCK: tl.constexpr,
    SCALING: tl.constexpr,
):
    weight = tl.program_id(0) // chunks
    row = weights + weight * tiles.WEIGHT_COLUMNS
    if tl.load(stale + weight) == 0:
        return
    place, ROWS = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK), tl.load(row + tiles.W_ROWS)
    inside = place < ROWS + tl.load(row + tiles.W_COLUMNS)
    pointer = amaxes + tl.load(row + tiles.W_AMAXES) + place
    bits = tl.load(pointer, mask=inside, other=0)
    factor = casting.encode(bits.to(tl.float32, bitcast=True), SCALING)
    tl.store(pointer, factor.to(tl.int32, bitcast=True), mask=inside)
    data, data_t = tl.load(row + tiles.W_SCALE_INV), tl.load(row + tiles.W_SCALE_INV_T)
    tl.store(data.to(tl.pointer_type(tl.float32)) + place, casting.inverse(factor), mask=(place < ROWS) & (data != 0))
    pointer = data_t.to(tl.pointer_type(tl.float32)) + (place - ROWS)
    tl.store(pointer, casting.inverse(factor), mask=inside & (place >= ROWS) & (data_t != 0))


@triton.jit
def cached_weights_cast(
    parameters,  # (P, 18) int64
    programs,  # int32, the parameter of each program
    stale,  # (W,) int32, of weights with one digest
    scale,  # (W,) fp32, where WHOLE and not KNOWN
    scales,  # fp32, where BY_ROW: of each weight its rows' and its columns'
    INPUT: tl.constexpr,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    BY_ROW: tl.constexpr,
    KNOWN: tl.constexpr,  # whether delayed scaling gives the scale
    ALIGNED: tl.constexpr,
    SCALING: tl.constexpr,
):
    row = parameters + tl.load(programs + tl.program_id(0)) * tiles.PARAMETER_COLUMNS
    if BY_ROW or (WHOLE and not KNOWN):
        if tl.load(stale + tl.load(row + tiles.P_WEIGHT)) == 0:
            return
    else:
        # Before the tile is read, which takes longer.
        stored = tiles.address_of_digest(row)
        before = tl.load(stored)
        if KNOWN:
            given = tl.load(tl.load(row + tiles.P_GIVEN_SCALE).to(tl.pointer_type(tl.int32)))
            state = tl.load(row + tiles.P_AMAX)
        found, first, second, third, fourth, _ = tiles.look(row, INPUT, TILE, KNOWN, False, ALIGNED)
        if KNOWN:
            found += given.to(tl.int64) * tiles.GOLDEN_WORD
            if state != 0:
                bits = tiles.bits_of_fp32(tiles.largest_of(first, second, third, fourth), INPUT)
                tiles.raise_amax(state.to(tl.pointer_type(tl.int32)), bits)
        if not tiles.replace_digest(stored, before, found):
            return
    top, left, ROWS, COLUMNS = tiles.place_of_tile(row, TILE, ALIGNED)
    # Neighbours of a column in one thread: Note [Pairs of rows] in lowerings/codegen/column_pairs.py.
    even, c = 2 * tl.arange(0, TILE // 2), tl.arange(0, TILE)
    source = tiles.corner(tl.load(row + tiles.P_SOURCE), top, left, COLUMNS, INPUT, ALIGNED)
    x0 = tiles.elements(source, even, c, ROWS - top, COLUMNS - left, COLUMNS)
    x1 = tiles.elements(source, even + 1, c, ROWS - top, COLUMNS - left, COLUMNS)
    if BY_ROW:
        scales += tl.load(row + tiles.P_AMAXES)
        of_rows, of_columns = (
            scales + tl.load(row + tiles.P_ABOVE) + top,
            scales + tl.load(row + tiles.P_ALL_ROWS) + left,
        )
        f0 = tl.load(of_rows + even, mask=even < ROWS - top, other=0.0)[:, None]
        f1 = tl.load(of_rows + even + 1, mask=even + 1 < ROWS - top, other=0.0)[:, None]
        f_t = tl.load(of_columns + c, mask=c < COLUMNS - left, other=0.0)[None, :]
    else:
        if WHOLE and KNOWN:
            f0 = given.to(tl.float32, bitcast=True)
            if (top == 0) & (left == 0):
                _store_inverse(tl.load(row + tiles.P_SCALE_INV), tl.load(row + tiles.P_SCALE_INV_T), f0)
        elif WHOLE:
            f0 = tl.load(scale + tl.load(row + tiles.P_WEIGHT))
        else:
            largest = tl.max(tiles.larger(tiles.magnitudes(x0), tiles.magnitudes(x1))).to(tl.float32, bitcast=True)
            f0 = casting.encode(largest, SCALING)
            _store_block(row, casting.inverse(f0), top // TILE, left // TILE, COLUMNS, TILE)
        f1 = f0
    cast0, cast1 = (
        casting.cast(tiles.product(x0, f0), SCALING[0], ELEMENT),
        casting.cast(tiles.product(x1, f1), SCALING[0], ELEMENT),
    )
    data, has_data, leading = tiles.target(row + tiles.P_DATA, row + tiles.P_LEADING, top, left, ELEMENT, ALIGNED)
    if has_data:
        inside = c[None, :] < COLUMNS - left
        tl.store(data + even[:, None] * leading + c[None, :], cast0, mask=(even[:, None] < ROWS - top) & inside)
        tl.store(
            data + (even[:, None] + 1) * leading + c[None, :], cast1, mask=(even[:, None] + 1 < ROWS - top) & inside
        )
    data_t, has_data_t, leading_t = tiles.target(
        row + tiles.P_DATA_T, row + tiles.P_LEADING_T, left, top, ELEMENT, ALIGNED
    )
    if has_data_t:
        if BY_ROW:
            cast0, cast1 = (
                casting.cast(tiles.product(x0, f_t), SCALING[0], ELEMENT),
                casting.cast(tiles.product(x1, f_t), SCALING[0], ELEMENT),
            )
        _store_columns(cast0, cast1, data_t, leading_t, ROWS - top, COLUMNS - left, TILE, ALIGNED)


@triton.jit
def _store_columns(cast0, cast1, data_t, leading_t, high, wide, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """The transpose of a tile of which these are the even rows and the odd ones."""
    c, pair = tl.arange(0, TILE), tl.arange(0, TILE // 2)
    inside = c[:, None] < wide
    if ALIGNED:
        pairs = casting.pairs(cast0, cast1)
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
    tl.store(data.to(tl.pointer_type(tl.float32)), casting.inverse(factor), mask=data != 0)
    tl.store(data_t.to(tl.pointer_type(tl.float32)), casting.inverse(factor), mask=data_t != 0)


@triton.jit
def _store_block(row, inverse, down, across, COLUMNS, TILE: tl.constexpr):
    """The scale of one block, in both copies' orders. Parameters above others are of whole blocks."""
    down += tl.load(row + tiles.P_ABOVE) // TILE
    data, data_t = tl.load(row + tiles.P_SCALE_INV), tl.load(row + tiles.P_SCALE_INV_T)
    pointer = data.to(tl.pointer_type(tl.float32)) + down * tl.cdiv(COLUMNS, TILE) + across
    tl.store(pointer, inverse, mask=data != 0)
    pointer = data_t.to(tl.pointer_type(tl.float32)) + across * tl.cdiv(tl.load(row + tiles.P_ALL_ROWS), TILE) + down
    tl.store(pointer, inverse, mask=data_t != 0)
