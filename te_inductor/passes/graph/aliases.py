"""The tensors of a graph that share memory. What writes it: writes.py."""

import operator
from collections.abc import Hashable, Iterator

import torch
from torch import fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from te_inductor import compat
from te_inductor.passes.graph.operators import name

Place = Hashable  # a piece of memory: a storage of fake tensors; in graphs of ATen ops the node that made it
_INPUTS = "inputs"  # the memory of those that may share it
# What may return an operand as it is, though its schema does not say so.
_MAY_RETURN = frozenset(
    "_unsafe_view wait_tensor dropout feature_dropout alpha_dropout type_as einsum atleast_1d atleast_2d atleast_3d"
    " broadcast_tensors meshgrid".split()
)
_KNOWN = ("torch", "_operator", "math", "builtins", "einops")  # packages whose functions go by strides as they should


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
    return {place for _, place in stored(node)}


def origins(node: fx.Node) -> set[Place]:
    """The memory that a node's tensor may have, in a graph of ATen ops: the first nodes of tensors that have it, of
    several that one node returns with their numbers. Two inputs may be the same memory, but for parameters."""
    found, pending, seen = set[Place](), [node], {node}
    while pending:
        node = pending.pop()
        sources = _aliased(node)
        if node.target is operator.getitem and not any(map(_aliased, sources)):
            found.add(node.args)
            continue
        pending += [one for one in sources if one not in seen]
        seen.update(sources)
        if not sources:
            found.add(_INPUTS if _is_input(node) else node)
    return found


def _is_input(node: fx.Node) -> bool:
    held = node.op in ("placeholder", "get_attr")
    return held and not isinstance(node.meta.get("example_value"), torch.nn.Parameter)


def _aliased(node: fx.Node) -> list[fx.Node]:
    """The operands of which a node returns a view, or that it has written."""
    target, found = node.target, list[fx.Node]()
    if node.op == "call_function" and (target is operator.getitem or name(node) in _MAY_RETURN):
        fx.map_arg(node.args[0] if target is operator.getitem else node.args, found.append)
    elif isinstance(target, torch._ops.OpOverload) and any(one.alias_info for one in target._schema.returns):
        for place, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None:
                fx.map_arg(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name), found.append)
    return found


def stored(node: fx.Node) -> Iterator[tuple[torch.Tensor, StorageWeakRef]]:
    """Its tensors, each with what it is stored in."""
    for tensor in pytree.tree_leaves(node.meta.get("example_value")):
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            while is_functorch_wrapped_tensor(tensor):  # inside vmap and grad
                tensor = get_unwrapped(tensor)
            tensor = compat.shard_of(tensor)
            yield tensor, StorageWeakRef(tensor.untyped_storage())
