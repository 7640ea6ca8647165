"""Which tensors of a Dynamo graph share memory, and what memory the graph writes.

Such a graph is not functional yet: a node stands for a tensor, and an in-place operation changes its values behind the
back of all who read it. What moves a read from one place to another has to ask here first."""

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from te_inductor import compat

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


def written(root: fx.GraphModule, inputs: Sequence[object] = ()) -> set[StorageWeakRef]:
    """What the graph or a body in it writes, at any place, of what was there before: inputs, parameters, or results."""
    found: set[StorageWeakRef] = set()
    first = _first_versions(root, inputs)
    for module in root.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            found.update(place for tensor, place in _stored(node) if tensor._version > first.get(id(_owner(tensor)), 0))
            found.update(place for operand in written_by(node) for place in memory(operand))
    return found


def _first_versions(root: fx.GraphModule, inputs: Sequence[object]) -> dict[int, int]:
    """Of inputs, by their fake tensors: one that lies in a larger buffer, as frameworks lay out parameters, is made by
    `set_`, which counts. Found by making all of them once more, in the same order."""
    nodes = [node for node in root.graph.nodes if node.op == "placeholder"]
    if not any(tensor._version for node in nodes for tensor, _ in _stored(node)):
        return {}
    mode, first = FakeTensorMode(), dict[int, int]()
    made = []  # alive, as the next one is made by what lies in the same buffer
    for node, given in zip(nodes, inputs, strict=False):
        held = compat.shard_of(given) if isinstance(given, torch.Tensor) else given
        if isinstance(held, torch.Tensor) and type(held) in (torch.Tensor, torch.nn.Parameter):
            made.append(mode.from_tensor(held))
            first |= {id(_owner(tensor)): made[-1]._version for tensor, _ in _stored(node)}
    return first


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """Whose versions it counts."""
    return tensor if tensor._base is None else tensor._base


def written_by(node: fx.Node) -> list[fx.Node]:
    """Operands that it may write, also without a trace in their versions: lists, the x of ``x.data = y``, those of Triton
    kernels and of other libraries' ops, which have a schema."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target._schema)
    if isinstance(target, torch._ops.OpOverloadPacket):  # the overload is chosen later
        return [one for each in target.overloads() for one in _written_by_schema(node, getattr(target, each)._schema)]
    called = name(node)
    writes = called == "triton_kernel_wrapper_mutation" or (called.endswith("_") and not called.endswith("__"))
    return node.all_input_nodes if writes else []


def _written_by_schema(node: fx.Node, schema: torch.FunctionSchema) -> list[fx.Node]:
    found: list[fx.Node] = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(operand, found.append)
    return found


def origin(node: fx.Node) -> fx.Node:
    """The first node of the tensor whose memory a node's tensor has, in a graph of ATen ops."""
    while (source := _aliased(node)) is not None:
        node = source
    return node


def may_share(one: fx.Node, other: fx.Node) -> bool:
    """Whether two origins may be the same memory. Two inputs may be, but for parameters."""
    if one is other:
        return True
    held = [node for node in (one, other) if node.op in ("placeholder", "get_attr")]
    values = [node.meta.get("example_value") for node in held]
    return len(held) == 2 and not any(isinstance(value, torch.nn.Parameter) for value in values)


def _aliased(node: fx.Node) -> fx.Node | None:
    """The operand of which a node returns a view, or that it has written."""
    target = node.target
    if target is operator.getitem or name(node) in ("_unsafe_view", "wait_tensor"):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if not any(one.alias_info for one in target._schema.returns):
        return None
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None:
            operand = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return operand if isinstance(operand, fx.Node) else None
    return None


def _stored(node: fx.Node) -> Iterator[tuple[torch.Tensor, StorageWeakRef]]:
    for tensor in pytree.tree_leaves(node.meta.get("example_value")):
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            while is_functorch_wrapped_tensor(tensor):  # inside vmap and grad
                tensor = get_unwrapped(tensor)
            tensor = compat.shard_of(tensor)
            yield tensor, StorageWeakRef(tensor.untyped_storage())
