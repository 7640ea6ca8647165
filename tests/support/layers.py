"""Layers whose parts are the plain ones, by the op."""

from collections.abc import Sequence

import torch
from torch import Tensor

from te_inductor.ops import LayerSpec, layers
from te_inductor.recipes import Slots


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], slots: Slots, out_dtype: torch.dtype
) -> list[Tensor]:
    """Dense layers."""
    return layers(x, weights, biases, LayerSpec(slots), out_dtype)


def grouped_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    ends: Tensor,
    slots: Slots,
    out_dtype: torch.dtype,
    rows: Tensor | None = None,
    places: Tensor | None = None,
) -> list[Tensor]:
    """Experts' layers."""
    more = {"ends": ends, "rows": rows, "places": places}
    return layers(x, weights, biases, LayerSpec(slots), out_dtype, **more)
