"""Casts to low precision: one copy, or both that a linear layer's GEMMs read.

Low-precision copies are stored with the contraction dimension of their GEMM last, padded with zeros (see
`formats.Scope`). "Rowwise" is the copy with x's own layout; "columnwise" is its transpose, cast from x at the same
read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor.compat import constant_type_name
from te_inductor.numerics.philox import new_seed
from te_inductor.ops.definition import define
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import HADAMARD, padded
from te_inductor.runtime.eager import dense

_QUANTIZER = constant_type_name(Quantizer)


def quantize_fake(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: Tensor | None = None,  # () fp32, of the tensor, or (R, 1), of its rows, where scales have two levels
    seed: Tensor | None = None,  # () int64, of stochastic rounding
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), scale_inv as Scope.scale_shape says: (), (R, 1), ...
    rows, columns = x.shape
    scope = quantizer.granularity
    data = x.new_empty((rows, quantizer.stored(columns)), dtype=quantizer.format.dtype)
    return data, x.new_empty(scope.scale_shape(rows, columns), dtype=scope.scale.dtype)


def quantize_rowcol_fake(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: Tensor | None = None,  # () fp32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (R, pad(C)), scale_inv, data_t (C, pad(R)), scale_inv_t
    return *quantize_fake(x, quantizer), *quantize_fake(x.t(), quantizer)


def _quantize_pieces_fake(
    pieces: list[Tensor],  # matrices that make one (R, C) side by side along dim
    dim: int,
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (R, pad(C)), scale_inv, data_t (C, pad(R)), scale_inv_t
    return quantize_rowcol_fake(torch.cat(pieces, dim), quantizer)


def _quantize_delayed_fake(
    x: Tensor,  # (R, C)
    scale: Tensor,  # ()
    quantizer: Quantizer,
) -> Tensor:  # (R, pad(C))
    return quantize_fake(x, quantizer)[0]


def _quantize_rowcol_delayed_fake(
    x: Tensor,  # (R, C)
    scale: Tensor,  # ()
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), data_t (C, pad(R))
    return quantize_fake(x, quantizer)[0], quantize_fake(x.t(), quantizer)[0]


def _quantize_pieces_delayed_fake(
    pieces: list[Tensor],  # matrices that make one (R, C) side by side along dim
    dim: int,
    scale: Tensor,  # ()
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), data_t (C, pad(R))
    return _quantize_rowcol_delayed_fake(torch.cat(pieces, dim), scale, quantizer)


def _transpose_fake(
    data: Tensor,  # (R, pad(C)), one byte an element
    columns: int,  # C
) -> Tensor:  # (C, pad(R))
    return data.new_empty((columns, padded(data.shape[0])))


def _hadamard_fake(
    x: Tensor,  # (R, C)
) -> Tensor:  # (R, C padded to 16) bf16
    return x.new_empty((x.shape[0], padded(x.shape[1], HADAMARD)), dtype=torch.bfloat16)


def _tensor_amax_fake(x: Tensor, of_rows: bool = False) -> Tensor:  # () fp32, or (R, 1)
    return x.new_empty((x.shape[0], 1) if of_rows else (), dtype=torch.float32)


def _current_scale_fake(
    pieces: list[Tensor],
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # scale (), scale_inv ()
    return tuple(pieces[0].new_empty((), dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def _pad_rows(x: Tensor, rows: int) -> Tensor:  # (R, C) -> (rows, C)
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def _pad_rows_fake(x: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, x.shape[1]))


def _dequantize_fake(
    data: Tensor,  # (R, C), as stored
    scale_inv: Tensor,  # of the shape that the quantizer's scope stores
    quantizer: Quantizer,
    dtype: torch.dtype,
) -> Tensor:  # (R, C); of two-level scales in units of the tensor's factor
    rows, columns = data.shape
    return data.new_empty((rows, columns * quantizer.format.packed), dtype=dtype)


quantize = define(
    f"quantize(Tensor x, {_QUANTIZER} q, Tensor? amax=None, Tensor? seed=None) -> (Tensor, Tensor)",
    dense.quantize,
    quantize_fake,
)
quantize_rowcol = define(
    f"quantize_rowcol(Tensor x, {_QUANTIZER} q, Tensor? amax=None) -> (Tensor, Tensor, Tensor, Tensor)",
    dense.quantize_rowcol,
    quantize_rowcol_fake,
)
quantize_pieces = define(
    f"quantize_pieces(Tensor[] pieces, int dim, {_QUANTIZER} q) -> (Tensor, Tensor, Tensor, Tensor)",
    dense.quantize_pieces,
    _quantize_pieces_fake,
)
hadamard = define("hadamard(Tensor x) -> Tensor", dense.hadamard, _hadamard_fake)
tensor_amax = define("tensor_amax(Tensor x, bool of_rows=False) -> Tensor", dense.tensor_amax, _tensor_amax_fake)
quantize_delayed = define(
    f"quantize_delayed(Tensor x, Tensor scale, {_QUANTIZER} q) -> Tensor",
    dense.quantize_delayed,
    _quantize_delayed_fake,
)
quantize_rowcol_delayed = define(
    f"quantize_rowcol_delayed(Tensor x, Tensor scale, {_QUANTIZER} q) -> (Tensor, Tensor)",
    dense.quantize_rowcol_delayed,
    _quantize_rowcol_delayed_fake,
)
quantize_pieces_delayed = define(
    f"quantize_pieces_delayed(Tensor[] pieces, int dim, Tensor scale, {_QUANTIZER} q) -> (Tensor, Tensor)",
    dense.quantize_pieces_delayed,
    _quantize_pieces_delayed_fake,
)
current_scale = define(
    f"current_scale(Tensor[] pieces, {_QUANTIZER} q) -> (Tensor, Tensor)", dense.current_scale, _current_scale_fake
)
pad_rows = define("pad_rows(Tensor x, int rows) -> Tensor", _pad_rows, _pad_rows_fake)  # with zeros
transpose = define("transpose(Tensor data, SymInt columns) -> Tensor", dense.transpose, _transpose_fake)
dequantize = define(
    f"dequantize(Tensor data, Tensor scale_inv, {_QUANTIZER} q, ScalarType dtype) -> Tensor",
    dense.dequantize,
    _dequantize_fake,
)


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
