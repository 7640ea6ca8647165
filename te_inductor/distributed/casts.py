"""The cast of a rank's rows of the weights that FSDP gathers at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_inductor.compat.fsdp import ShardedParameter
from te_inductor.recipes import Quantizer
from te_inductor.runtime import eager


def cast_rows(weights: Sequence[tuple[ShardedParameter, Quantizer, Any]]) -> list[Tensor]:
    """Bytes of each, (rows, K), cast from the dtype in which FSDP would gather it: with the scale of the weight, or
    those of its blocks."""
    found = []
    for shard, quantizer, scale in weights:
        data, scope = shard.data, quantizer.granularity
        if scope.blocked:
            scale = scale.view(scope.blocks(*shard.shape))
        found.append(
            _cast(data, scale, shard.first_row, shard.dtype, quantizer.format.max, quantizer.format.dtype, scope.block)
        )
    return found


def _cast(
    data: Tensor,  # (rows, K)
    scale: Tensor,  # (), or (blocks down, blocks across) of the whole weight
    first: int,  # where in the weight its rows begin
    dtype: torch.dtype,
    limit: float,
    element: torch.dtype,
    block: tuple[int, int],
) -> Tensor:  # (rows, K) uint8
    if scale.dim():
        rows = torch.arange(first, first + data.shape[0], device=data.device) // block[0]
        rows = rows.clamp(max=scale.shape[0] - 1)  # behind the last row are zeros
        scale = scale[rows].repeat_interleave(block[1], 1)[:, : data.shape[1]]
    return eager.saturate(data.to(dtype), scale, limit, element).view(torch.uint8)
