"""Which tensors of a Dynamo graph share memory, and what memory the graph writes.

Such a graph is not functional yet: a node stands for a tensor, and an in-place operation changes its values behind the back
of all who read it. What moves a read from one place to another has to ask here first.
"""

from collections.abc import Iterator

import torch
from torch import fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

_KNOWN = ("torch", "_operator", "math", "builtins", "einops")  # packages whose functions go by strides as they should


def name(node: fx.Node) -> str:
    """Of the function or method that it calls, without an overload's."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(target).partition(".")[0]


def is_opaque(node: fx.Node) -> bool:
    """Whether it calls a body or foreign code, either of which may count on the strides that it was traced with."""
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).partition(".")[0] not in ("aten", "prims")
    package = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    return isinstance(target, torch._ops.HigherOrderOperator) or package not in _KNOWN


def memory(node: fx.Node) -> set[StorageWeakRef]:
    """What its tensors are stored in."""
    return {place for _, place in _stored(node)}


def written(root: fx.GraphModule) -> set[StorageWeakRef]:
    """What the graph or a body in it writes, at any place, of what was there before: inputs, parameters, or results."""
    found: set[StorageWeakRef] = set()
    for module in root.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            found.update(
                place for tensor, place in _stored(node) if tensor._version
            )  # counted from where tracing began
            if _writes_uncounted(node):
                found.update(place for argument in node.all_input_nodes for place in memory(argument))
    return found


def _writes_uncounted(node: fx.Node) -> bool:
    """Whether it may write operands without a trace in their versions: lists of tensors, `x.data = y`, Triton kernels."""
    called = name(node)
    return called == "triton_kernel_wrapper_mutation" or (called.endswith("_") and not called.endswith("__"))


def _stored(node: fx.Node) -> Iterator[tuple[torch.Tensor, StorageWeakRef]]:
    for tensor in pytree.tree_leaves(node.meta.get("example_value")):
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            while is_functorch_wrapped_tensor(tensor):  # inside vmap and grad
                tensor = get_unwrapped(tensor)
            yield tensor, StorageWeakRef(tensor.untyped_storage())
