"""What Dynamo traced for a node of its graph."""

from typing import Any, TypeGuard

import torch
from torch import fx
from torch.utils import _pytree as pytree

from te_inductor import compat
from te_inductor.ops.gathered_weight import GatheredWeight


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that Dynamo traced for a node."""
    return node.meta["example_value"]  # type: ignore[no-any-return]


def is_gathered(weight: fx.Node) -> bool:
    """Whether FSDP2 gathered a weight, or a rank's part of it, in low precision."""
    return isinstance(compat.shard_of(value(weight)), GatheredWeight)


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def requires_grad(node: fx.Node) -> bool:
    """Whether any tensor that a node returns has a gradient."""
    results = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in results)


def is_wrapped(node: fx.Node) -> bool:
    """Whether a transform of torch.func is around a call: outside of it nothing can be traced in the call's place."""
    results = pytree.tree_leaves(node.meta.get("example_value"))
    return any(
        isinstance(one, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(one) for one in results
    )


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a fake tensor's elements; of symbolic sizes at a likely value."""
    count: Any = tensor.numel()
    return tensor.itemsize * (int(count.node.hint or 0) if isinstance(count, torch.SymInt) else count)
