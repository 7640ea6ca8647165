"""What kind of operator a node of ATen's is, and what it stands for."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

# Where Inductor looks for what is to be in memory (torch 2.11 to 2.15, `GraphLowering.run_node`).
IN_MEMORY = "inductor_realize_to_strides"


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


def in_memory_order(value: torch.Tensor) -> list[int] | None:
    """The dimensions by their strides, the longest first; None where two may be the same memory, or strides are not
    known."""
    if any(statically_known_true(stride == 0) for stride in value.stride()):
        return None
    order = list(range(value.dim()))
    for a, b in itertools.combinations(order, 2):
        if not statically_known_true(value.stride(a) >= value.stride(b)) and not is_one(value.shape[a], value.shape[b]):
            break
    else:
        return order
    if not all(isinstance(stride, int) for stride in value.stride()):
        return None
    return sorted(order, key=lambda dim: value.stride()[dim], reverse=True)


def is_one(*sizes: Any) -> bool:
    """Whether any of some sizes surely is one."""
    return any(statically_known_true(size == 1) for size in sizes)
