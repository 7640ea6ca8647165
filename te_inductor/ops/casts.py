"""Casts to low precision: one copy, or both that a linear layer's GEMMs read.

Low-precision copies are stored with the contraction dimension of their GEMM last, padded with zeros (see
`formats.Scope`). "Rowwise" is the copy with x's own layout; "columnwise" is its transpose, cast from x at the same
read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor.numerics import microscaling
from te_inductor.numerics.philox import new_seed
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import HADAMARD, padded
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import dense


def copy_like(x: Tensor, quantizer: Quantizer, *_: Any) -> tuple[Tensor, Tensor]:
    """The fake of a copy of x, and of its scales."""
    rows, columns = x.shape
    scope = quantizer.granularity
    data = x.new_empty((rows, quantizer.stored(columns)), dtype=quantizer.format.dtype)
    return data, x.new_empty(scope.scale_shape(rows, columns), dtype=scope.scale.dtype)


def copies_like(x: Tensor, quantizer: Quantizer, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fake of both."""
    return *copy_like(x, quantizer), *copy_like(x.t(), quantizer)


def scale_pair_like(x: Tensor, shape: Sequence[Any] = ()) -> tuple[Tensor, Tensor]:
    """The fake of a scale and its reciprocal."""
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def _pad_rows(x: Tensor, rows: int) -> Tensor:  # (R, C) -> (rows, C)
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


quantize = op_of(dense.quantize, lambda x, quantizer, amax=None, seed=None: copy_like(x, quantizer))
quantize_rowcol = op_of(dense.quantize_rowcol, lambda x, quantizer, amax=None: copies_like(x, quantizer))
quantize_pieces = op_of(
    dense.quantize_pieces, lambda pieces, dim, quantizer: copies_like(torch.cat(pieces, dim), quantizer)
)
hadamard = op_of(
    microscaling.hadamard,
    lambda x: x.new_empty((x.shape[0], padded(x.shape[1], HADAMARD)), dtype=torch.bfloat16),
)
tensor_amax = op_of(
    dense.tensor_amax,
    lambda x, of_rows=False: x.new_empty((x.shape[0], 1) if of_rows else (), dtype=torch.float32),
)
quantize_delayed = op_of(dense.quantize_delayed, lambda x, scale, quantizer: copy_like(x, quantizer)[0])
quantize_rowcol_delayed = op_of(
    dense.quantize_rowcol_delayed, lambda x, scale, quantizer: copies_like(x, quantizer)[::2]
)
quantize_pieces_delayed = op_of(
    dense.quantize_pieces_delayed,
    lambda pieces, dim, scale, quantizer: copies_like(torch.cat(pieces, dim), quantizer)[::2],
)
current_scale = op_of(dense.current_scale, lambda pieces, quantizer: scale_pair_like(pieces[0]))
pad_rows = op_of(_pad_rows, lambda x, rows: x.new_empty((rows, x.shape[1])), name="pad_rows")  # with zeros
transpose = op_of(dense.transpose, lambda data, columns: data.new_empty((columns, padded(data.shape[0]))))
dequantize = op_of(
    dense.dequantize,
    lambda data, scale_inv, quantizer, dtype: data.new_empty(
        (data.shape[0], data.shape[1] * quantizer.format.packed), dtype=dtype
    ),
)

# What passes and lowerings treat alike: casts with a scale that is known or with their own, of one copy or of both.
ONE_WAY = (quantize, quantize_delayed)
TWO_WAY_KNOWN = (quantize_rowcol_delayed, quantize_pieces_delayed)
TWO_WAY_OWN = (quantize_rowcol, quantize_pieces)
TWO_WAY = (*TWO_WAY_KNOWN, *TWO_WAY_OWN)
CASTS = (*ONE_WAY, *TWO_WAY)


@dataclass(frozen=True)
class Copy:
    """One low-precision copy of a matrix, an operand of a GEMM."""

    data: Tensor  # (R, pad(C))
    scale_inv: Tensor
    amax: Tensor | None = None  # (), of what the copy was cast from, or (R, 1), where scales have two levels

    @staticmethod
    def saved(copy: "Copy | None") -> tuple[Tensor | None, ...]:
        """What autograd keeps of it; `Copy(*saved)` is it again."""
        return (None, None, None) if copy is None else (copy.data, copy.scale_inv, copy.amax)

    def split(self, sizes: Sequence[int]) -> "list[Copy]":
        """The copies of so many rows each, of one level of scales: the matrix's, those of rows, or of blocks of one
        row."""
        scales: Sequence[Tensor] = [self.scale_inv] * len(sizes)
        if self.scale_inv.dim() == 2:
            scales = self.scale_inv.split(list(sizes))
        elif self.scale_inv.dim() == 1:  # row_last
            scales = [one.flatten() for one in self.scale_inv.view(-1, sum(sizes)).split(list(sizes), 1)]
        return list(map(Copy, self.data.split(list(sizes)), scales))


def values(
    copy: Copy,
    quantizer: Quantizer,
    columns: int | torch.SymInt,  # C
    dtype: torch.dtype,
) -> Tensor:  # (R, C)
    """What a copy stands for. Scales of two levels are multiplied in fp32."""
    if copy.amax is None:
        return dequantize(copy.data, copy.scale_inv, quantizer, dtype)[:, :columns]  # type: ignore[no-any-return]
    found = dequantize(copy.data, copy.scale_inv, quantizer, torch.float32)[:, :columns]
    return (found * (copy.amax / quantizer.two_level_max)).to(dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ScalePair:
    """What delayed scaling knows of a tensor before it sees it: the scale it is cast with, and the reciprocal."""

    scale: Tensor  # ()
    scale_inv: Tensor  # ()


def copies(
    pieces: Sequence[Tensor],
    dim: int,
    quantizer: Quantizer,
    known: ScalePair | None,
    *,
    rowwise: bool = True,
    columnwise: bool,
) -> tuple[Copy | None, Copy | None]:
    """The low-precision copies that are asked for, rowwise and columnwise. One scale for the whole tensor is known
    beforehand or found here; finer ones belong to each copy."""
    if quantizer.granularity.whole:
        scale, scale_inv = (known.scale, known.scale_inv) if known else current_scale(pieces, quantizer)
        data, data_t = _casts(pieces, dim, scale, quantizer, rowwise, columnwise)
        return Copy(data, scale_inv) if rowwise else None, Copy(data_t, scale_inv) if columnwise else None
    if len(pieces) > 1:  # always both: the lowering writes no copy that nobody reads
        data, scale_inv, data_t, scale_inv_t = quantize_pieces(pieces, dim, quantizer)
        return Copy(data, scale_inv) if rowwise else None, Copy(data_t, scale_inv_t) if columnwise else None
    [x] = pieces
    if rowwise and columnwise and not quantizer.copies_apart:
        amax = tensor_amax(x) if quantizer.granularity.two_level else None
        data, scale_inv, data_t, scale_inv_t = quantize_rowcol(x, quantizer, amax)
        return Copy(data, scale_inv, amax), Copy(data_t, scale_inv_t, amax)
    row = _copy(x, quantizer) if rowwise else None
    column = _copy(hadamard(x.t()) if quantizer.hadamard else x.t(), quantizer) if columnwise else None
    return row, column


def _copy(x: Tensor, quantizer: Quantizer) -> Copy:
    """One copy, with scales and random bits of its own."""
    amax = tensor_amax(x, quantizer.rows_have_factors) if quantizer.granularity.two_level else None
    seed = new_seed(x.device) if quantizer.stochastic else None
    data, scale_inv = quantize(x, quantizer, amax, seed)
    return Copy(data, scale_inv, amax)


def _casts(
    pieces: Sequence[Tensor], dim: int, scale: Tensor, quantizer: Quantizer, rowwise: bool, columnwise: bool
) -> tuple[Any, Any]:
    if len(pieces) > 1:  # both, as above
        return quantize_pieces_delayed(pieces, dim, scale, quantizer)  # type: ignore[no-any-return]
    [x] = pieces
    if rowwise and columnwise:
        return quantize_rowcol_delayed(x, scale, quantizer)  # type: ignore[no-any-return]
    if columnwise:
        return None, quantize_delayed(x.t(), scale, quantizer)
    return quantize_delayed(x, scale, quantizer), None
