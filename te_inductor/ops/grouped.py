"""Grouped products in low precision, and the casts that only they need. Which GEMM of a linear layer of E experts reads
which copy, of the rows of group g::

    fprop  y[M,N]   = x[M,K] w[g]ᵀ     x rowwise,  each expert's w rowwise
    dgrad  dx[M,K]  = dy[M,N] w[g]     dy rowwise, each expert's w columnwise
    wgrad  dw[g]    = dyᵀ x            both columnwise, groups padded: Note [Padded groups] in runtime/eager/grouped.py

Scales of a matrix of experts' weights are one an expert, or as finer scopes say, of each expert by itself: (E,) for the
whole matrix, (E, R) for rows, (E, what the scope stores) for blocks.
"""

from typing import Any

import torch
from torch import Tensor

from te_inductor.compat import constant_type_name
from te_inductor.ops.casts import quantize_fake
from te_inductor.ops.definition import define
from te_inductor.ops.written_out import is_called
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import ROW
from te_inductor.runtime.eager import grouped
from te_inductor.runtime.gradients import deferred_wgrads
from te_inductor.templates import grouped_library

_GEMM = constant_type_name(Gemm)
_QUANTIZER = constant_type_name(Quantizer)


def _grouped_mm_fake(
    a: Tensor,  # (M, K), low precision, rows sorted by group
    a_scale: Tensor,  # (), (M, 1), or of the shape that gemm.scopes[0] stores
    b: Tensor,  # (E, N, K), low precision
    b_scale: Tensor,  # (E,), (E, N), or (E, what gemm.scopes[1] stores of one expert)
    ends: Tensor,  # (E,) int32, where each group ends
    bias: Tensor | None,  # (E, N)
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,  # () or (M, 1), factor of the product, of two-level scales
) -> Tensor:  # (M, N), zeros behind the last group
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _grouped_wgrad_fake(
    a: Tensor,  # (N, P), dy, groups padded
    a_scale: Tensor,  # (), (E, N) of rows, or of the shape that gemm.scopes[0] stores
    b: Tensor,  # (K, P), x, likewise
    b_scale: Tensor,  # (), (E, K), or of the shape that gemm.scopes[1] stores
    starts: Tensor,  # (E + 1,) int32, where each group begins
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,  # ()
) -> Tensor:  # (E, N, K)
    return a.new_empty((starts.shape[0] - 1, a.shape[0], b.shape[0]), dtype=out_dtype)


def _quantize_experts_fake(
    w: Tensor,  # (E, R, C)
    quantizer: Quantizer,
    amax: Tensor | None = None,  # () fp32, of all, where scales have two levels
    transposed: bool = False,  # casts each matrix's transpose
) -> tuple[Tensor, Tensor]:  # data (E, R, pad(C)), scale_inv
    matrices = w.transpose(1, 2) if transposed else w
    data, scale_inv = quantize_fake(matrices[0], quantizer)
    shape = scale_inv.shape[:1] if quantizer.granularity is ROW else scale_inv.shape
    return w.new_empty((w.shape[0], *data.shape), dtype=data.dtype), w.new_empty(
        (w.shape[0], *shape), dtype=scale_inv.dtype
    )


def _quantize_experts_delayed_fake(
    w: Tensor,  # (E, R, C)
    scale: Tensor,  # (), (E,), or (E, C) of the transposes' rows
    quantizer: Quantizer,
    transposed: bool = False,
) -> Tensor:  # (E, R, pad(C)), or of the transposes
    return _quantize_experts_fake(w, quantizer, None, transposed)[0]


def _quantize_experts_rows_fake(
    w: Tensor,  # (E, R, C)
    quantizer: Quantizer,  # of rows
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (E, R, pad(C)), scale_inv (E, R); columns' scale, scale_inv (E, C)
    of_columns = (w.new_empty((w.shape[0], w.shape[2]), dtype=torch.float32) for _ in range(2))
    return *_quantize_experts_fake(w, quantizer), *of_columns  # type: ignore[return-value]


def _experts_scale_fake(
    weights: list[Tensor],  # each (E, R, C)
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # scale (E,), scale_inv (E,); of each expert's matrices together
    return tuple(weights[0].new_empty(weights[0].shape[:1], dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def _quantize_groups_fake(
    x: Tensor,  # (R, C)
    source: Tensor,  # (P,) int32, the row that each column of the copy holds, -1 of padding
    tiles: Tensor,  # (P / 128,) int32, whose group each 128 columns are
    starts: Tensor,  # (E + 1,) int32, where groups begin, and the last one ends
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # data (C, P), scale_inv (E, C) of rows, or of the scope's shape for (C, P)
    rows, columns = x.shape[1], source.shape[0]
    data = x.new_empty((rows, quantizer.stored(columns)), dtype=quantizer.format.dtype)
    scope = quantizer.granularity
    shape = (starts.shape[0] - 1, rows) if scope is ROW else scope.scale_shape(rows, columns)
    return data, x.new_empty(shape, dtype=scope.scale.dtype)


def _transpose_groups_fake(
    data: Tensor,  # (R, C), of one byte an element
    source: Tensor,  # (P,) int32
) -> Tensor:  # (C, P)
    return data.new_empty((data.shape[1], source.shape[0]))


def _scaled_grouped_mm_fake(
    a: Tensor,  # (M, K), or (N, P), low precision
    b: Tensor,  # (E, K, N), or (P, K), columns contiguous
    a_scale: list[Tensor],  # uint8, of two dimensions, and of two-level scales (E,) fp32, factors of each group
    b_scale: list[Tensor],
    ends: Tensor,  # (E,) int32, of groups of rows of a, or of columns of both
    gemm: Gemm,
) -> Tensor:  # bf16 (M, N), or (E, N, K)
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (ends.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=torch.bfloat16)


scaled_grouped_mm = define(
    f"scaled_grouped_mm(Tensor a, Tensor b, Tensor[] a_scale, Tensor[] b_scale, Tensor ends, {_GEMM} g) -> Tensor",
    grouped_library.scaled_grouped_mm,
    _scaled_grouped_mm_fake,
)
grouped_mm = define(
    "grouped_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor ends, Tensor? bias,"
    f" {_GEMM} g, ScalarType out_dtype, Tensor? alpha=None) -> Tensor",
    grouped.grouped_mm,
    _grouped_mm_fake,
    grouped.written_out_mm,
)
grouped_wgrad = define(
    "grouped_wgrad(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor starts,"
    f" {_GEMM} g, ScalarType out_dtype, Tensor? alpha=None) -> Tensor",
    grouped.grouped_wgrad,
    _grouped_wgrad_fake,
)
accumulate_grouped_wgrad = define(
    "accumulate_grouped_wgrad(Tensor(a!)[] totals, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor starts,"
    f" Tensor? alpha, {_GEMM} g) -> ()",
    grouped.accumulate_grouped_wgrad,
    lambda totals, a, a_scale, b, b_scale, starts, alpha, gemm: None,
)
defer_grouped_wgrad = define(
    "defer_grouped_wgrad(Tensor(a!)[] tickets, Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor starts,"
    f" Tensor? alpha, {_GEMM} g, bool copy=True) -> ()",
    deferred_wgrads.defer_grouped_wgrad,
    lambda tickets, a, a_scale, b, b_scale, starts, alpha, gemm, copy=True: None,
)
quantize_experts = define(
    f"quantize_experts(Tensor w, {_QUANTIZER} q, Tensor? amax=None, bool transposed=False) -> (Tensor, Tensor)",
    grouped.quantize_experts,
    _quantize_experts_fake,
)
quantize_experts_delayed = define(
    f"quantize_experts_delayed(Tensor w, Tensor scale, {_QUANTIZER} q, bool transposed=False) -> Tensor",
    grouped.quantize_experts_delayed,
    _quantize_experts_delayed_fake,
)
quantize_experts_rows = define(
    f"quantize_experts_rows(Tensor w, {_QUANTIZER} q) -> (Tensor, Tensor, Tensor, Tensor)",
    grouped.quantize_experts_rows,
    _quantize_experts_rows_fake,
)
experts_scale = define(
    f"experts_scale(Tensor[] weights, {_QUANTIZER} q) -> (Tensor, Tensor)",
    grouped.experts_scale,
    _experts_scale_fake,
)
quantize_groups = define(
    f"quantize_groups(Tensor x, Tensor source, Tensor tiles, Tensor starts, {_QUANTIZER} q) -> (Tensor, Tensor)",
    grouped.quantize_groups,
    _quantize_groups_fake,
)
# A row copy with zeros for rows that belong to no group, whatever they hold.
mask_copy = define(
    "mask_copy(Tensor data, Tensor ends) -> Tensor", grouped.mask_copy, lambda data, ends: torch.empty_like(data)
)
transpose_groups = define(
    "transpose_groups(Tensor data, Tensor source) -> Tensor", grouped.transpose_groups, _transpose_groups_fake
)


def is_one_matrix(sizes: Any, quantizer: Quantizer, transposed: bool = False) -> bool:
    """Whether `quantize_experts` of these sizes is the cast of all experts' rows as one matrix, whose scales are those
    of each expert's one behind the other, and for which there is generated code."""
    scope = quantizer.granularity
    if scope.microscaled:
        return scope.one_row or sizes[2 if transposed else 1] % scope.alignment == 0
    return scope is ROW and not transposed


is_called(grouped_mm, scaled_grouped_mm)
is_called(quantize_experts, where=lambda w, q, amax=None, transposed=False: not is_one_matrix(w.shape, q, transposed))


def _equal_groups(like: Tensor, groups: int, rows: int) -> Tensor:
    return torch.arange(1, groups + 1, device=like.device, dtype=torch.int32) * rows


# Where groups of `rows` rows each end, (groups,), where `like` is.
equal_groups = define("equal_groups(Tensor like, int groups, SymInt rows) -> Tensor", _equal_groups)
# `x` (M, ...) with zeros for rows that belong to no group.
mask_rows = define("mask_rows(Tensor x, Tensor ends) -> Tensor", grouped.mask_rows)
