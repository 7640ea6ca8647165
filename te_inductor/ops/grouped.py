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

from te_inductor.ops.casts import copy_like, scale_pair_like
from te_inductor.ops.written_out import is_called
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import ROW
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import grouped
from te_inductor.templates import grouped_library


def _experts_like(w: Tensor, quantizer: Quantizer, amax: Any = None, transposed: bool = False) -> tuple[Tensor, Tensor]:
    matrices = w.transpose(1, 2) if transposed else w
    data, scale_inv = copy_like(matrices[0], quantizer)
    shape = scale_inv.shape[:1] if quantizer.granularity is ROW else scale_inv.shape
    made = ((data.shape, data.dtype), (shape, scale_inv.dtype))
    return tuple(w.new_empty((w.shape[0], *size), dtype=dtype) for size, dtype in made)  # type: ignore[return-value]


def _groups_like(
    x: Tensor, source: Tensor, tiles: Tensor, starts: Tensor, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:
    data, scale_inv = copy_like(x.new_empty((x.shape[1], source.shape[0])), quantizer)
    of_rows = quantizer.granularity is ROW
    return data, scale_inv.new_empty((starts.shape[0] - 1, x.shape[1])) if of_rows else scale_inv


scaled_grouped_mm = op_of(
    grouped_library.scaled_grouped_mm,
    lambda a, b, a_scale, b_scale, ends, gemm: a.new_empty(
        (a.shape[0], b.shape[2]) if b.dim() == 3 else (ends.shape[0], a.shape[0], b.shape[1]), dtype=torch.bfloat16
    ),
)
grouped_mm = op_of(
    grouped.grouped_mm,
    lambda a, a_scale, b, b_scale, ends, bias, gemm, out_dtype, alpha=None: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    ),
    written_out=grouped.written_out_mm,
)
grouped_wgrad = op_of(
    grouped.grouped_wgrad,
    lambda a, a_scale, b, b_scale, starts, gemm, out_dtype, alpha=None: a.new_empty(
        (starts.shape[0] - 1, a.shape[0], b.shape[0]), dtype=out_dtype
    ),
)
accumulate_grouped_wgrad = op_of(grouped.accumulate_grouped_wgrad, lambda *_, **__: None)
quantize_experts = op_of(grouped.quantize_experts, _experts_like)
quantize_experts_delayed = op_of(
    grouped.quantize_experts_delayed,
    lambda w, scale, quantizer, transposed=False: _experts_like(w, quantizer, None, transposed)[0],
)
quantize_experts_rows = op_of(
    grouped.quantize_experts_rows,
    lambda w, quantizer: (*_experts_like(w, quantizer), *scale_pair_like(w, w.shape[::2])),
)
experts_scale = op_of(
    grouped.experts_scale, lambda weights, quantizer: scale_pair_like(weights[0], weights[0].shape[:1])
)
quantize_groups = op_of(grouped.quantize_groups, _groups_like)
mask_copy = op_of(grouped.mask_copy, lambda data, ends: torch.empty_like(data))
transpose_groups = op_of(
    grouped.transpose_groups, lambda data, source: data.new_empty((data.shape[1], source.shape[0]))
)
equal_groups = op_of(grouped.equal_groups)
mask_rows = op_of(grouped.mask_rows)


def is_one_matrix(sizes: Any, quantizer: Quantizer, transposed: bool = False) -> bool:
    """Whether `quantize_experts` of these sizes is the cast of all experts' rows as one matrix, whose scales are those
    of each expert's one behind the other, and for which there is generated code."""
    scope = quantizer.granularity
    if scope.microscaled:
        return scope.one_row or sizes[2 if transposed else 1] % scope.alignment == 0
    return scope is ROW and not transposed


is_called(grouped_mm, scaled_grouped_mm)
is_called(quantize_experts, where=lambda w, q, amax=None, transposed=False: not is_one_matrix(w.shape, q, transposed))
