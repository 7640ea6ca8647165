"""What kind of operator a node of ATen's is, and what it stands for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """Returns the fake tensor that a node stands for; None of a number, as a symbolic size or factor is, and of several
    tensors."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_pointwise(node: fx.Node) -> bool:
    return is_cast(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_cast(node: fx.Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default


def is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", "") == "getitem" and is_view(node.all_input_nodes[0])
    return node.target.is_view


def is_view_or_cast(node: fx.Node) -> bool:
    return is_view(node) or is_cast(node)


def is_as_large(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors surely have as many elements."""
    found, other = tensor_of(a), tensor_of(b)
    return found is not None and other is not None and statically_known_true(found.numel() == other.numel())


def has_shape(value: torch.Tensor | None, shape: Sequence[Any]) -> bool:
    """Whether it is a tensor that surely has, without a guard."""
    if value is None:
        return False
    equal = (statically_known_true(a == b) for a, b in zip(value.shape, shape, strict=False))
    return value.dim() == len(shape) and all(equal)
