"""Transposed copies of rows that are sorted into groups, each column of a group with a scale of its own, from one read of
memory.

A program has a strip of a group: all of its rows, a few columns. It reads them for their largest magnitudes, and once
more, from the L2 cache, to cast them: the last rows first, so that what is still to be read is what was read last.
While a tile is reduced or cast, the rows of the next one are on their way, and the places of those behind. On average
half of a strip has to be in the cache. So the kernel is taken where the halves of all strips that run at one time fit
there; a group much longer than the others is read twice from memory, and does no harm but that. In bytes moved an
element of bf16: 3, where two passes move 5. The numbers are those of runtime/eager/grouped.py, bit for bit."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor import targets
from te_inductor.recipes.quantizers import Quantizer
from te_inductor.templates.triton import cached_tiles as tiles
from te_inductor.templates.triton import casting
from te_inductor.templates.triton.grouped_casts import (
    COLUMNS,
    TILE,
    elements,
    store_transposed,
)
from te_inductor.templates.triton.launcher import launcher

_PROGRAMS = 3  # that run at one time on a multiprocessor
_WARPS, _REGISTERS = 8, 80


def supports(x: Tensor, source: Tensor, groups: int) -> bool:
    """Whether the strips of groups of equal sizes stay in the cache."""
    return (source.shape[0] - groups * TILE) / groups <= _most_rows(x.device, x.element_size())


@functools.cache
def _most_rows(device: torch.device, size: int) -> float:
    """Rows of a group, of elements of that size, whose strips fill four fifths of L2 by half."""
    limits = targets.of(device).limits
    return 2 * (limits.l2 * 4 // 5) / (COLUMNS * size * _PROGRAMS * limits.multiprocessors)


def quantize_groups_by_column(
    x: Tensor,  # (R, C)
    source: Tensor,  # (P,) int32, the row that each column of the copy holds, -1 of padding
    starts: Tensor,  # (E + 1,) int32, where groups begin and the last one ends, multiples of TILE
    quantizer: Quantizer,  # of rows
) -> tuple[Tensor, Tensor]:  # (C, P), scale_inv (E, C)
    groups, columns = starts.shape[0] - 1, x.shape[1]
    out = x.new_empty((columns, source.shape[0]), dtype=quantizer.format.dtype)
    scale_inv = torch.empty((groups, columns), dtype=torch.float32, device=x.device)
    run = launcher(
        _strips_kernel,
        ELEMENT=casting.ELEMENTS[out.dtype],
        TILE=TILE,
        WIDE=COLUMNS,
        SCALING=casting.scaling(quantizer, x.dtype),
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
    )
    run(triton.cdiv(columns, COLUMNS) * groups, x, source, starts, scale_inv, out, columns, *x.stride(), out.shape[1])
    return out, scale_inv


@triton.jit
def _places(source, tile, begin, end, TILE: tl.constexpr):
    """Finds where the rows of a tile are, -1 of tiles that are not the group's."""
    inside = tl.full(source.shape, (tile >= begin) & (tile < end), tl.int1)
    return tl.load(source + tile * TILE, mask=inside, other=-1)


@triton.jit
def _gathered(x, places, columns, wide, stride_r, stride_c):
    lines = x + places.to(tl.int64) * stride_r
    return elements(lines, places >= 0, columns, wide, stride_c)


@triton.jit
def _strips_kernel(
    x,  # (R, C)
    source,  # (P,)
    starts,  # (groups + 1,)
    scale_inv,  # (groups, C)
    out,  # (C, P)
    wide,
    stride_r,
    stride_c,
    leading,  # P, a multiple of TILE
    ELEMENT: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    SCALING: tl.constexpr,
):
    across = tl.cdiv(wide, WIDE)  # programs of a group
    group, groups = tl.program_id(0) // across, tl.num_programs(0) // across
    columns = tl.program_id(0) % across * WIDE + tl.arange(0, WIDE)
    begin, end = tl.load(starts + group) // TILE, tl.load(starts + group + 1) // TILE
    most = tl.zeros((TILE, WIDE), tl.int32)
    rows = source + tl.arange(0, TILE)
    coming = _gathered(x, _places(rows, begin, begin, end, TILE), columns, wide, stride_r, stride_c)
    places = _places(rows, begin + 1, begin, end, TILE)
    for tile in range(begin, end):
        values = coming
        coming = _gathered(x, places, columns, wide, stride_r, stride_c)
        places = _places(rows, tile + 2, begin, end, TILE)
        most = tiles.larger(most, tiles.magnitudes(values.to(tl.float32)))
    largest = tl.max(most, 0).to(tl.float32, bitcast=True)
    factor = casting.encode(largest, SCALING)
    place = scale_inv + group.to(tl.int64) * wide + columns
    tl.store(place, casting.inverse(factor), mask=columns < wide)
    even = source + 2 * tl.arange(0, TILE // 2)
    coming0 = _gathered(x, _places(even, end - 1, begin, end, TILE), columns, wide, stride_r, stride_c)
    coming1 = _gathered(x, _places(even + 1, end - 1, begin, end, TILE), columns, wide, stride_r, stride_c)
    places0 = _places(even, end - 2, begin, end, TILE)
    places1 = _places(even + 1, end - 2, begin, end, TILE)
    for back in range(begin, end):
        tile = begin + end - 1 - back
        x0, x1 = coming0.to(tl.float32), coming1.to(tl.float32)
        coming0 = _gathered(x, places0, columns, wide, stride_r, stride_c)
        coming1 = _gathered(x, places1, columns, wide, stride_r, stride_c)
        places0 = _places(even, tile - 2, begin, end, TILE)
        places1 = _places(even + 1, tile - 2, begin, end, TILE)
        cast0 = casting.cast(tiles.product(x0, factor[None, :]), SCALING[0], ELEMENT)
        cast1 = casting.cast(tiles.product(x1, factor[None, :]), SCALING[0], ELEMENT)
        store_transposed(out, cast0, cast1, tile, columns, wide, leading, TILE, True)
    # There are as many tiles behind all groups as groups, at most: each program clears one.
    tile = tl.load(starts + groups) // TILE + group
    nothing = tl.zeros((TILE // 2, WIDE), tl.float32).to(ELEMENT)
    if tile < leading // TILE:
        store_transposed(out, nothing, nothing, tile, columns, wide, leading, TILE, True)
