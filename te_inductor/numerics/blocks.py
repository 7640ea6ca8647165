"""Scales of blocks in plain torch: the amax of each, and a scale for each element."""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.numerics import arithmetic, microscaling
from te_inductor.numerics.algebra import TORCH
from te_inductor.recipes.formats import E8M0, Element, Scope
from te_inductor.recipes.quantizers import Quantizer


def amax(
    x: Tensor,  # (R, C)
    scope: Scope,
) -> Tensor:  # of the scope's stored shape
    """The largest magnitude of each block; NaN if any value is NaN, without a sign. Beyond the edge are zeros."""
    high, wide = scope.block
    rows, columns = x.shape
    down, across = scope.blocks(rows, columns)
    whole = F.pad(x.abs(), (0, across * wide - columns, 0, down * high - rows))
    found = whole.view(down, high, across, wide).amax((1, 3)).abs()  # torch may give a NaN a sign
    return (found.t() if scope.row_last else found).flatten()


def chosen(
    x: Tensor,  # (R, C)
    amax: Tensor,  # of its blocks, of the scope's stored shape
    quantizer: Quantizer,
    tensor_amax: Tensor,  # (), or of the stored shape too
) -> tuple[Tensor, Tensor]:  # what blocks are multiplied with before the cast, and scale_inv; of the same shape
    """Returns the scales of the candidate with the least error, of the first where errors are equal. fp32 sums in
    TransformerEngine's order: of a row of a block from left to right, then of rows 8, 4, 2 and 1 apart."""
    scope = quantizer.granularity
    (high, wide), (down, across) = scope.block, scope.blocks(*x.shape)
    x = F.pad(x, (0, across * wide - x.shape[1], 0, down * high - x.shape[0]))
    pairs = arithmetic.candidates(TORCH, amax, quantizer, tensor_amax)
    whole, errors = spread(tensor_amax, scope, x.shape) if tensor_amax.dim() else tensor_amax, []
    for pair in pairs:
        factor, scale_inv = (spread(each.float(), scope, x.shape) for each in pair)
        found = arithmetic.error(TORCH, x, (factor, scale_inv), quantizer, whole).view(down, high, across, wide)
        of_rows = arithmetic.in_order(found.unbind(3))
        errors.append(arithmetic.in_halves(of_rows.unbind(1)).flatten())
    scale_inv = arithmetic.least(TORCH, [scale_inv for _, scale_inv in pairs], errors)
    return arithmetic.factor_of(TORCH, scale_inv, quantizer, tensor_amax), scale_inv


def spread(
    scale: Tensor,  # of the scope's stored shape
    scope: Scope,
    shape: torch.Size,
) -> Tensor:  # broadcasts to the shape, (R, C)
    if not scope.blocked:
        return scale
    return spread_rows(scale, scope, shape).t().repeat_interleave(scope.block[1], 1)[:, : shape[1]]


def values(
    data: Tensor,  # (R, C) as stored
    scale_inv: Tensor,  # of the scope's stored shape
    element: Element,
    scope: Scope,
) -> Tensor:  # (R, C) fp32
    """What a low-precision copy stands for, but for the tensor's own factor of two-level scales."""
    wide = microscaling.values(data, element) if element.coded else data.float()
    return wide * spread(scale_values(scale_inv, scope), scope, wide.shape)


def scale_values(scale_inv: Tensor, scope: Scope) -> Tensor:
    """fp32 values of scales as they are stored."""
    return arithmetic.e8m0_value(TORCH, scale_inv) if scope.scale is E8M0 else scale_inv.float()


def spread_rows(
    scale: Tensor,  # of a blocked scope's stored shape
    scope: Scope,
    shape: torch.Size,  # (R, C)
) -> Tensor:  # (blocks of columns, R): the same scales, as those of blocks of one row
    matrix = scale.view(scope.scale_matrix(*shape))
    return matrix if scope.row_last else matrix.t().repeat_interleave(scope.block[0], 1)[:, : shape[0]].contiguous()
