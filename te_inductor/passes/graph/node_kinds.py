"""What kind of operator a node of ATen's is."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true


def is_pointwise(node: fx.Node) -> bool:
    return is_cast(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_cast(node: fx.Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default


def is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", "") == "getitem" and is_view(node.all_input_nodes[0])
    return node.target.is_view


def has_shape(value: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Whether it surely has, without a guard."""
    equal = (statically_known_true(a == b) for a, b in zip(value.shape, shape, strict=False))
    return value.dim() == len(shape) and all(equal)
