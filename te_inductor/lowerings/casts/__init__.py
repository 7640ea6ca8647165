"""Inductor IR of casts to low precision and back; here, what all of them are made of."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir


def pointwise(like: Any, dtype: torch.dtype, ranges: Sequence[Any], inner: Any) -> ir.TensorBox:
    """A tensor of values that `inner` computes, of an index each, on the device of another."""
    return ir.Pointwise.create(device=like.get_device(), dtype=dtype, inner_fn=inner, ranges=list(ranges))  # type: ignore[return-value]


def store(box: ir.TensorBox, order: Sequence[int]) -> None:
    """Stores into memory whose strides have this order, 0 for the contiguous dimension."""
    box.realize()
    box.data.data.freeze_layout_with_stride_order(list(order))  # type: ignore[attr-defined]


def in_memory(box: ir.TensorBox) -> ir.TensorBox:
    """Contiguous, whatever the strides of what it was made from."""
    store(box, range(len(box.get_size()))[::-1])
    return box
