"""Copies that only experts need: transposes of experts' weights, and of rows that are sorted into groups, each group padded
(Note [Padded groups] in runtime/eager/grouped.py). The numbers are those of runtime/eager/grouped.py, bit for bit.

One kernel writes all of them. A program has a tile of a matrix's rows, those of an expert or those that `source` names,
and some columns; it casts with a scale that is known, that belongs to a column, or that it finds: of a tile's column,
or of a square tile. Neighbours of a column are in one thread, so that a transposed store writes pairs: Note [Pairs of
rows] in lowerings/codegen/column_pairs.py."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.recipes.formats import ROW
from te_inductor.recipes.quantizers import Quantizer
from te_inductor.templates.triton import cached_tiles as tiles
from te_inductor.templates.triton import casting
from te_inductor.templates.triton.launcher import Launcher, empty

TILE = 128  # rows; of square blocks columns too
COLUMNS = 64
_BLOCK = 1024  # scales that a program makes

# What a tile's elements are multiplied with.
BYTES, KNOWN, OF_COLUMNS, TILE_COLUMNS, SQUARE = range(5)
_BYTES, _KNOWN, _OF_COLUMNS, _TILE_COLUMNS, _SQUARE = map(
    tl.constexpr, (BYTES, KNOWN, OF_COLUMNS, TILE_COLUMNS, SQUARE)
)


def transpose_experts(
    w: Tensor,  # (E, R, C), any strides
    scale: Tensor,  # (), (E,) or, of columns, (E, C) fp32
    quantizer: Quantizer,
) -> Tensor:  # (E, C, pad(R))
    experts, rows, columns = w.shape
    out = empty(w, (experts, columns, quantizer.padded(rows)), quantizer.format.dtype)
    _cast_tiles(w, None, None, scale, quantizer, OF_COLUMNS if scale.dim() == 2 else KNOWN, out)
    return out


def transpose_experts_by_row(
    w: Tensor,  # (E, R, C)
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # (E, C, pad(R)), scale_inv (E, C)
    experts, rows, columns = w.shape
    scale, scale_inv = column_scales(w, None, None, experts, quantizer)
    out = empty(w, (experts, columns, quantizer.padded(rows)), quantizer.format.dtype)
    _cast_tiles(w, None, None, scale, quantizer, OF_COLUMNS, out)
    return out, scale_inv


def quantize_experts_squares(
    w: Tensor,  # (E, R, C)
    quantizer: Quantizer,  # of 128 x 128
    transposed: bool,
) -> tuple[Tensor, Tensor]:  # (E, R, pad(C)), or of the transposes; scale_inv (E, blocks)
    experts, rows, columns = w.shape
    shape = (columns, quantizer.padded(rows)) if transposed else (rows, quantizer.padded(columns))
    out = w.new_empty((experts, *shape), dtype=quantizer.format.dtype)
    blocks = triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    scale_inv = w.new_empty((experts, blocks), dtype=torch.float32)
    _cast_tiles(w, None, None, scale_inv, quantizer, SQUARE, out, transposed)
    return out, scale_inv


def transpose_groups(
    data: Tensor,  # (R, C), of one byte
    source: Tensor,  # (P,) int32
) -> Tensor:  # (C, P)
    out = empty(data, (data.shape[1], source.shape[0]), data.dtype)
    _cast_tiles(data.view(torch.uint8), source, None, None, None, BYTES, out.view(torch.uint8))
    return out


def quantize_groups(
    x: Tensor,  # (R, C)
    source: Tensor,  # (P,) int32
    tile_groups: Tensor,  # (P / 128,) int32
    starts: Tensor,  # (groups + 1,) int32
    quantizer: Quantizer,  # of rows, or of blocks of 1 x 128
) -> tuple[Tensor, Tensor]:  # (C, P); scale_inv (groups, C), or (P / 128 * C,)
    columns, width = x.shape[1], source.shape[0]
    out = x.new_empty((columns, width), dtype=quantizer.format.dtype)
    if quantizer.granularity is ROW:
        scale, scale_inv = column_scales(x[None], source, tile_groups, starts.shape[0] - 1, quantizer)
        _cast_tiles(x[None], source, tile_groups, scale, quantizer, OF_COLUMNS, out)
    else:
        scale_inv = x.new_empty((width // TILE * columns,), dtype=torch.float32)
        _cast_tiles(x[None], source, None, scale_inv, quantizer, TILE_COLUMNS, out)
    return out, scale_inv


def _cast_tiles(
    x: Tensor,  # (R, C), or of each expert
    source: Tensor | None,
    tile_groups: Tensor | None,
    scale: Tensor | None,
    quantizer: Quantizer | None,
    mode: int,
    out: Tensor,
    transposed: bool = True,
) -> None:
    (*experts, rows, columns), strides = x.shape, x.stride()
    if not experts:
        experts, strides = [1], (0, *strides)
    wide = TILE if mode in (BYTES, SQUARE) else COLUMNS  # rows of whole cache lines
    leading = out.shape[-1]
    high = rows if source is None else source.shape[0]
    run = _cast_launcher(
        mode,
        source is not None,
        tile_groups is not None,
        scale is not None and scale.dim() > 0,
        transposed,
        out.dtype,
        wide,
        transposed and leading % 16 == 0,
        None if quantizer is None else quantizer.fields,
        x.dtype,
    )
    run(
        -(-high // TILE) * -(-columns // wide) * experts[0],
        x,
        x if source is None else source,
        x if tile_groups is None else tile_groups,
        x if scale is None else scale,
        out,
        high,
        columns,
        *strides,
        leading,
    )


@functools.cache  # of a quantizer's fields, as generated code makes a constant anew at each call
def _cast_launcher(
    mode: int,
    gathered: bool,
    grouped: bool,
    of_experts: bool,
    transposed: bool,
    element: torch.dtype,
    wide: int,
    paired: bool,
    fields: tuple[Any, ...] | None,
    dtype: torch.dtype,
) -> Launcher:
    return Launcher(
        _cast_kernel,
        MODE=mode,
        GATHERED=gathered,
        GROUPED=grouped,
        OF_EXPERTS=of_experts,
        TRANSPOSED=transposed,
        ELEMENT=casting.ELEMENTS[element],
        TILE=TILE,
        WIDE=wide,
        PAIRED=paired,
        SCALING=None if fields is None else casting.scaling(Quantizer(*fields), dtype),
        num_warps=8 if mode == SQUARE else 4,
    )


def column_scales(
    x: Tensor, source: Tensor | None, tile_groups: Tensor | None, groups: int, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:
    """The scales of each column within an expert or a group, (groups, C)."""
    experts, rows, columns = x.shape
    high = rows if source is None else source.shape[0]
    amax = torch.zeros((groups, columns), dtype=torch.int32, device=x.device)
    _amax_launcher(source is not None)(
        -(-high // TILE) * -(-columns // COLUMNS) * experts,
        x,
        x if source is None else source,
        x if tile_groups is None else tile_groups,
        amax,
        high,
        columns,
        *x.stride(),
    )
    return scales_of_amaxes(amax, quantizer, x.dtype)


def scales_of_amaxes(
    amax: Tensor,  # int32, bits of fp32
    quantizer: Quantizer,
    dtype: torch.dtype,  # of what is cast
) -> tuple[Tensor, Tensor]:  # scale, scale_inv
    scale, scale_inv = (torch.empty(amax.shape, dtype=torch.float32, device=amax.device) for _ in range(2))
    count = amax.numel()
    _scale_launcher(quantizer.fields, dtype)(-(-count // _BLOCK), amax, scale, scale_inv, count)
    return scale, scale_inv


@functools.cache
def _amax_launcher(gathered: bool) -> Launcher:
    return Launcher(_amax_kernel, GATHERED=gathered, TILE=TILE, WIDE=COLUMNS, num_warps=4)


@functools.cache
def _scale_launcher(fields: tuple[Any, ...], dtype: torch.dtype) -> Launcher:
    return Launcher(_scale_kernel, BLOCK=_BLOCK, SCALING=casting.scaling(Quantizer(*fields), dtype), num_warps=4)


@triton.jit
def tile_of(high, wide, TILE: tl.constexpr, WIDE: tl.constexpr):
    """The expert of this program, the row and the column of its tile, and of how many rows and columns of tiles."""
    down, across = tl.cdiv(high, TILE), tl.cdiv(wide, WIDE)
    column = tl.program_id(0) // down
    return column // across, tl.program_id(0) % down, column % across, down, across


@triton.jit
def rows_of(x, source, rows, high, stride_r, GATHERED: tl.constexpr):
    """Finds where rows of a tile begin, and which of them there are."""
    there = rows < high
    if GATHERED:
        rows = tl.load(source + rows, mask=there, other=-1)
        there &= rows >= 0
    return x + rows.to(tl.int64) * stride_r, there


@triton.jit
def elements(begins, there, columns, wide, stride_c):
    inside = there[:, None] & (columns < wide)[None, :]
    return tl.load(begins[:, None] + columns[None, :].to(tl.int64) * stride_c, mask=inside, other=0)


@triton.jit
def store_transposed(out, x0, x1, tile, columns, wide, leading, TILE: tl.constexpr, PAIRED: tl.constexpr):
    """A tile's even rows and its odd ones, as columns of `out`."""
    inside = (columns < wide)[:, None]
    line = columns[:, None].to(tl.int64)
    if PAIRED:
        pair = tile * (TILE // 2) + tl.arange(0, TILE // 2)
        both = out.to(tl.pointer_type(tl.uint16)) + line * (leading // 2) + pair[None, :]
        tl.store(both, tl.trans(casting.pairs(x0, x1)), mask=inside & (pair < leading // 2)[None, :])
    else:
        even = tile * TILE + 2 * tl.arange(0, TILE // 2)
        first = out + line * leading + even[None, :]
        tl.store(first, tl.trans(x0), mask=inside & (even < leading)[None, :])
        tl.store(first + 1, tl.trans(x1), mask=inside & (even + 1 < leading)[None, :])


@triton.jit
def _amax_kernel(
    x,  # (E, R, C)
    source,  # (P,)
    tile_groups,  # (P / TILE,)
    amax,  # (groups, C) int32, zeros
    high,  # rows of a matrix, or of `source`
    wide,
    stride_e,
    stride_r,
    stride_c,
    GATHERED: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    expert, row, column, _, _ = tile_of(high, wide, TILE, WIDE)
    rows = row * TILE + tl.arange(0, TILE)
    columns = column * WIDE + tl.arange(0, WIDE)
    begins, there = rows_of(x + expert.to(tl.int64) * stride_e, source, rows, high, stride_r, GATHERED)
    values = elements(begins, there, columns, wide, stride_c).to(tl.float32)
    bits = tl.max(tiles.magnitudes(values), 0)
    group = expert
    if GATHERED:
        group = tl.load(tile_groups + row)
    tl.atomic_max(amax + group.to(tl.int64) * wide + columns, bits, mask=columns < wide, sem="relaxed")


@triton.jit
def _scale_kernel(
    amax,  # int32
    scale,
    scale_inv,
    count,
    BLOCK: tl.constexpr,
    SCALING: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(amax + place, mask=place < count, other=0)
    factor = casting.encode(bits.to(tl.float32, bitcast=True), SCALING)
    tl.store(scale + place, factor, mask=place < count)
    tl.store(scale_inv + place, casting.inverse(factor), mask=place < count)


@triton.jit
def _cast_kernel(
    x,  # (E, R, C)
    source,  # (P,) int32, where GATHERED
    tile_groups,  # (P / TILE,), where GROUPED
    scale,  # as MODE says: KNOWN () or (E,), OF_COLUMNS (groups, C); else what is found, inverted, is stored there
    out,  # (E, C, leading), or (E, R, leading)
    high,
    wide,
    stride_e,
    stride_r,
    stride_c,
    leading,
    MODE: tl.constexpr,
    GATHERED: tl.constexpr,
    GROUPED: tl.constexpr,
    OF_EXPERTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRED: tl.constexpr,
    SCALING: tl.constexpr,
):
    expert, row, column, down, across = tile_of(high, wide, TILE, WIDE)
    even = row * TILE + 2 * tl.arange(0, TILE // 2)
    columns = column * WIDE + tl.arange(0, WIDE)
    x += expert.to(tl.int64) * stride_e
    begins0, there0 = rows_of(x, source, even, high, stride_r, GATHERED)
    begins1, there1 = rows_of(x, source, even + 1, high, stride_r, GATHERED)
    x0 = elements(begins0, there0, columns, wide, stride_c)
    x1 = elements(begins1, there1, columns, wide, stride_c)
    if MODE != _BYTES:
        x0, x1 = x0.to(tl.float32), x1.to(tl.float32)
        if MODE == _KNOWN:
            factor = tl.load(scale + expert * OF_EXPERTS)
        elif MODE == _OF_COLUMNS:
            group = expert
            if GROUPED:
                group = tl.load(tile_groups + row)
            of_columns = scale + group.to(tl.int64) * wide + columns
            factor = tl.load(of_columns, mask=columns < wide, other=1.0)[None, :]
        else:
            bits = tiles.larger(tiles.magnitudes(x0), tiles.magnitudes(x1))
            if MODE == _TILE_COLUMNS:
                found = casting.encode(tl.max(bits, 0).to(tl.float32, bitcast=True), SCALING)
                place = scale + row.to(tl.int64) * wide + columns
                tl.store(place, casting.inverse(found), mask=columns < wide)
                factor = found[None, :]
            else:
                factor = casting.encode(tl.max(bits).to(tl.float32, bitcast=True), SCALING)
                block = column * down + row if TRANSPOSED else row * across + column
                tl.store(scale + expert.to(tl.int64) * (down * across) + block, casting.inverse(factor))
        x0 = casting.cast(tiles.product(x0, factor), SCALING[0], ELEMENT)
        x1 = casting.cast(tiles.product(x1, factor), SCALING[0], ELEMENT)
    if TRANSPOSED:
        out += expert.to(tl.int64) * wide * leading
        store_transposed(out, x0, x1, row, columns, wide, leading, TILE, PAIRED)
    else:
        out += expert.to(tl.int64) * high * leading
        inside = (columns < leading)[None, :]
        first = out + even[:, None].to(tl.int64) * leading + columns[None, :]
        tl.store(first, x0, mask=inside & (even < high)[:, None])
        tl.store(first + leading, x1, mask=inside & (even + 1 < high)[:, None])
