"""The float64 oracle of experts' linear layers: `casts.py`, group by group. See docs/numerics.md.

A group is what one expert multiplies: `sizes` of them are consecutive rows, and rows behind them belong to nobody. The
row copies of x and dy are those of all their rows; each expert's weight is quantized by itself, with scales of two
levels under one factor for all. wgrad reads transposed copies in which each group is padded to whole blocks of 128
columns, so that no block has rows of two groups; scales of rows are found for each group alone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_inductor.recipes import Gemm, Quantizer, Slots
from te_inductor.recipes.formats import SCOPES
from tests.oracle import casts, microscaling
from tests.oracle.casts import Copy

BLOCK = 128  # columns that a group is padded to


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Says where each group begins and ends."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def padded_spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The same in a padded transpose."""
    return spans([-(-size // BLOCK) * BLOCK for size in sizes])


def padded_transpose(
    x: Tensor,  # (M, C)
    sizes: Sequence[int],
) -> Tensor:  # (C, P), P being M as whole blocks and one more for each group
    """Zeros where nothing stands."""
    width = -(-x.shape[0] // BLOCK) * BLOCK + len(sizes) * BLOCK
    made = x.new_zeros((x.shape[1], width))
    for (begin, end), (start, _) in zip(spans(sizes), padded_spans(sizes), strict=True):
        made[:, start : start + end - begin] = x[begin:end].t()
    return made


def masked(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """`x` with zeros in the rows that belong to nobody."""
    made = torch.zeros_like(x)
    made[: sum(sizes)] = x[: sum(sizes)]
    return made


def row_copies(
    x: Tensor,  # (T, C)
    quantizer: Quantizer,
    chosen: Sequence[Tensor],  # of each group, which rows of x it has
    seed: int | None = None,
    scale: float | None = None,  # that was known
) -> list[Copy]:
    """Each group's part of the row copy."""
    scope, amax = quantizer.scope, casts.first_amax(x, quantizer)
    if scale is None:
        data, scale_inv = casts.quantize(x, quantizer, amax, seed if quantizer.stochastic else None)
    else:
        data, scale_inv = casts.quantize_known(x, scale, quantizer)
    return [
        Copy(data[rows], _of_rows(scale_inv, scope, rows, x.shape[0]), amax[rows] if isinstance(amax, Tensor) else amax)
        for rows in chosen
    ]


def _of_rows(scale_inv: Tensor, scope: str, rows: Tensor, count: int) -> Tensor:
    if scope == "tensor":
        return scale_inv
    if scope == "1x128":
        return scale_inv.view(-1, count)[:, rows].flatten()
    return scale_inv[rows] if scope == "row" else scale_inv.view(count, -1)[rows].flatten()


def column_copies(
    x: Tensor,  # (M, C)
    quantizer: Quantizer,
    sizes: Sequence[int],
    seed: int | None = None,
    scale: float | None = None,
) -> list[Copy]:
    """Each group's part of the transposed copy."""
    scope = quantizer.scope
    if scope == "row":
        whole = [padded_transpose(x[begin:end], [end - begin])[:, : _up(end - begin)] for begin, end in spans(sizes)]
        return [Copy(*casts.quantize(each, quantizer)) for each in whole]
    if scope == "tensor":
        of_all = casts.encode_scale(casts.tensor_amax(x), quantizer, x.dtype) if scale is None else scale
        data, scale_inv = casts.quantize_known(padded_transpose(x, sizes), of_all, quantizer)
        return [Copy(data[:, start:end], scale_inv) for start, end in padded_spans(sizes)]
    whole_t = padded_transpose(x, sizes)
    whole_t = microscaling.hadamard(whole_t) if quantizer.hadamard else whole_t
    amax = casts.first_amax(whole_t, quantizer)
    data, scale_inv = casts.quantize(whole_t, quantizer, amax, seed if quantizer.stochastic else None)
    return [
        Copy(data[:, start:end], _of_columns(scale_inv, scope, start, end, x.shape[1]), amax)
        for start, end in padded_spans(sizes)
    ]


def _up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _of_columns(scale_inv: Tensor, scope: str, start: int, end: int, rows: int) -> Tensor:
    wide = SCOPES[scope].block[1]
    if scope == "1x128":
        return scale_inv.view(-1, rows)[start // wide : end // wide].flatten()
    return scale_inv.view(rows, -1)[:, start // wide : end // wide].flatten()


def weight_copies(
    weights: Sequence[Tensor],  # each (E, N, K), of layers that are one GEMM
    quantizer: Quantizer,
    transposed: bool,
    scale: float | None = None,
) -> list[Copy]:
    """Each expert's copy of its rows of all weights."""
    stacked, found = torch.cat(list(weights), 1), []
    amax = casts.first_amax(stacked.flatten(0, 1), quantizer)
    for matrix in stacked:
        matrix = matrix.t() if transposed else matrix
        if scale is None:
            found.append(Copy(*casts.quantize(matrix, quantizer, amax), amax))
        else:
            found.append(Copy(*casts.quantize_known(matrix, scale, quantizer)))
    return found


class Operands(NamedTuple):
    """The operands of the three GEMMs, of each group."""

    fprop: list[tuple[Copy, Copy]]
    dgrad: list[tuple[Copy, Copy]]
    wgrad: list[tuple[Copy, Copy]]


def operands(
    x: Tensor,  # (T, K)
    weights: Sequence[Tensor],  # each (E, N, K)
    dy: Tensor,  # (M, N), of all weights
    sizes: Sequence[int],
    slots: Slots,
    rows: Tensor | None = None,  # (M,), which rows of x are multiplied; None: x is (M, K)
    seeds: tuple[int, int] = (0, 0),  # of dy's copies, where rounding is stochastic
    scales: tuple[float, float, float] | None = None,  # known, of x, the weights and dy
) -> Operands:
    x = masked(x, sizes) if rows is None else x
    rows = torch.arange(x.shape[0]) if rows is None else rows
    of_x, of_w, of_dy = scales or (None, None, None)
    dy = masked(dy, sizes)
    groups = [rows[begin:end] for begin, end in spans(sizes)]
    own = [torch.arange(begin, end) for begin, end in spans(sizes)]
    x_rows = row_copies(x, slots.input, groups, scale=of_x)
    g_rows = row_copies(dy, slots.grad_output, own, seeds[0], of_dy)
    w_rows, w_columns = (weight_copies(weights, slots.weight, transposed, of_w) for transposed in (False, True))
    g_columns = column_copies(dy, slots.grad_output, sizes, seeds[1], of_dy)
    # A tensor's scale is found of all its rows, whichever are multiplied.
    if slots.input.scope == "tensor" and of_x is None:
        of_x = casts.encode_scale(casts.tensor_amax(x), slots.input, x.dtype)
    x_columns = column_copies(x[rows], slots.input, sizes, scale=of_x)
    return Operands(
        *(list(zip(*pair, strict=True)) for pair in ((x_rows, w_rows), (g_rows, w_columns), (g_columns, x_columns)))
    )


def products(
    pairs: Sequence[tuple[Copy, Copy]],
    gemm: Gemm,
    biases: Tensor | None = None,  # (E, N)
) -> list[Tensor]:
    """Each group's (rows, N), or wgrad's (N, K)."""
    return [casts.product(a, b, None if biases is None else biases[group], gemm) for group, (a, b) in enumerate(pairs)]
