"""Row copies of experts' weights, with the scales of rows and those of columns, from one read of the weight.

A column's scale is of all rows of its expert, so that the column copy, which the backward makes, wants another read. To
find the scales there too would be a third. In bytes moved an element of a weight in bf16: 3 here and 3 for the column
copy, where scales that are found by a pass of their own cost 2 more.

A program has some rows of one expert, a few at a time, all of their columns: it finds their scales, casts them, and
holds the largest magnitudes of columns until its rows are done. The next rows are on their way meanwhile. The numbers
are those of runtime/eager/grouped.py, bit for bit."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_inductor.recipes.quantizers import Quantizer
from te_inductor.templates.triton import cached_tiles as tiles
from te_inductor.templates.triton import casting
from te_inductor.templates.triton.grouped_casts import scales_of_amaxes
from te_inductor.templates.triton.launcher import launcher

COLUMNS = 16384  # at most, so that registers hold a row


@dataclass(frozen=True)
class RowsConfig:
    """How the work is cut."""

    elements: int  # that a program has at a time, in whole rows
    of_warp: int  # of those
    registers: int  # of a thread, so that a multiprocessor has several programs
    span: int = 32  # rows of a program


def config_of(columns: int) -> RowsConfig:
    return RowsConfig(4096, 512, 80) if columns <= 4096 else RowsConfig(8192, 1024, 128)


def supports(w: Tensor) -> bool:
    """Whether the kernel takes experts' weights (E, R, C)."""
    return w.stride(2) == 1 and w.shape[2] <= COLUMNS


def quantize_experts_rows(
    w: Tensor,  # (E, R, C), rows contiguous, C at most COLUMNS
    quantizer: Quantizer,  # of rows
    config: RowsConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (E, R, pad(C)), scale_inv (E, R), columns' scale and scale_inv (E, C)
    experts, rows, columns = w.shape
    out = w.new_empty((experts, rows, quantizer.padded(columns)), dtype=quantizer.format.dtype)
    scale_inv = torch.empty((experts, rows), dtype=torch.float32, device=w.device)
    amax = torch.zeros((experts, columns), dtype=torch.int32, device=w.device)
    block = max(triton.next_power_of_2(columns), 16)
    config = config or config_of(columns)
    together = max(config.elements // block, 1)
    span = max(config.span, together)
    run = launcher(
        _rows_kernel,
        SPAN=span,
        ROWS=together,
        BLOCK=block,
        ELEMENT=casting.ELEMENTS[out.dtype],
        SCALING=casting.scaling(quantizer, w.dtype),
        num_warps=max(together * block // config.of_warp, 1),
        maxnreg=config.registers,
    )
    run(
        triton.cdiv(rows, span) * experts,
        w,
        out,
        scale_inv,
        amax,
        rows,
        columns,
        w.stride(0),
        w.stride(1),
        out.shape[2],
    )
    return out, scale_inv, *scales_of_amaxes(amax, quantizer, w.dtype)


@triton.jit
def _rows(x, rows, columns, high, wide, stride_r):
    inside = (rows < high)[:, None] & (columns < wide)[None, :]
    return tl.load(x + rows[:, None].to(tl.int64) * stride_r + columns[None, :], mask=inside, other=0)


@triton.jit
def _rows_kernel(
    x,  # (E, R, C)
    out,  # (E, R, leading)
    scale_inv,  # (E, R)
    amax,  # (E, C) int32, zeros
    high,
    wide,
    stride_e,
    stride_r,
    leading,
    SPAN: tl.constexpr,  # rows of a program
    ROWS: tl.constexpr,  # of those, at a time
    BLOCK: tl.constexpr,  # columns, and more
    ELEMENT: tl.constexpr,
    SCALING: tl.constexpr,
):
    down = tl.cdiv(high, SPAN)  # programs of an expert
    expert = (tl.program_id(0) // down).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x += expert * stride_e
    out += expert * high * leading
    of_columns = tl.zeros((ROWS, BLOCK), tl.int32)
    first = tl.program_id(0) % down * SPAN + tl.arange(0, ROWS)
    coming = _rows(x, first, columns, high, wide, stride_r)
    for step in range(0, SPAN, ROWS):
        values, rows = coming.to(tl.float32), first + step
        if step + ROWS < SPAN:  # on their way while these are cast
            coming = _rows(x, rows + ROWS, columns, high, wide, stride_r)
        bits = tiles.magnitudes(values)
        of_columns = tiles.larger(of_columns, bits)
        largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
        factor = casting.encode(largest, SCALING)
        cast = casting.cast(tiles.product(values, factor[:, None]), SCALING[0], ELEMENT)
        there = rows < high
        inside = there[:, None] & (columns < leading)[None, :]
        tl.store(out + rows[:, None].to(tl.int64) * leading + columns[None, :], cast, mask=inside)
        tl.store(scale_inv + expert * high + rows, casting.inverse(factor), mask=there)
    most = tl.max(of_columns, 0)
    tl.atomic_max(amax + expert * wide + columns, most, mask=columns < wide, sem="relaxed")
