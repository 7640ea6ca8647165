"""What kind of operator a node of ATen's is."""

import torch
from torch import fx


def is_pointwise(node: fx.Node) -> bool:
    return is_cast(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_cast(node: fx.Node) -> bool:
    return node.target is torch.ops.prims.convert_element_type.default


def is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", "") == "getitem" and is_view(node.all_input_nodes[0])
    return node.target.is_view
