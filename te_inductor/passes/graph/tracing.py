"""How calls are put into a graph as if they had been traced there, and taken out of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from te_inductor.passes.graph.aliases import memory
from te_inductor.passes.graph.values import is_tensor, value

# What a node keeps of the one in whose place it stands: not its value, which is its own.
_OF_VALUE = frozenset(("val", "example_value", "tensor_meta", "unbacked_bindings", "desc"))


@contextmanager
def as_traced(output: Tensor, inputs: Sequence[Tensor]) -> Iterator[None]:
    """What Dynamo traced a call in that made this fake tensor of those: other calls in it take the call's place."""
    mixed = any(fake.is_floating_point() and fake.dtype != output.dtype for fake in inputs)
    autocast = torch.autocast(output.device.type, dtype=output.dtype, enabled=mixed)
    fake_mode: Any = output.fake_mode  # type: ignore[attr-defined]
    # Only Python's dispatcher takes symbolic sizes in `linear` of a frozen weight (torch 2.11).
    with enable_python_dispatcher(), fake_mode, torch.set_grad_enabled(output.requires_grad), autocast:
        yield


def lay_in(output: Tensor, result: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Have `result`, which takes the place of a call that made `output`, and those of `nodes` that are views of it say
    that they lie in its memory: what Dynamo has traced behind the call are views of that."""
    place = memory(result)
    with output.fake_mode, torch.set_grad_enabled(output.requires_grad):  # type: ignore[attr-defined]
        for node in nodes:
            if is_tensor(node) and memory(node) & place:
                made = value(node)
                node.meta["example_value"] = output.as_strided(made.shape, made.stride(), made.storage_offset())


def traced_into(
    graph: fx.Graph,
    function: Callable[..., Sequence[Tensor | None]],
    operands: Sequence[fx.Node],
    place: fx.Node,
    mode: Any = None,
) -> list[Any]:
    """A function's ops, put into a graph at its insertion point, in the place of a node; what it returned, as nodes.
    Without operands it is traced in `mode`, a mode of fake tensors."""
    inputs = [value(operand) for operand in operands]
    with mode or inputs[0].fake_mode, enable_python_dispatcher(), torch.no_grad():  # type: ignore[attr-defined]
        made = make_fx(function)(*inputs)
    copies = dict(zip(made.graph.find_nodes(op="placeholder"), operands, strict=True))
    known = set(copies)
    found = graph.graph_copy(made.graph, copies)
    for node, copy in copies.items():
        if node not in known:
            copy.meta = dict(node.meta)
            copy.meta["example_value"] = copy.meta.get("val")
            take_place(copy, place.meta)
    return list(found)  # type: ignore[arg-type]


def method(tensor: fx.Node, called: str, *arguments: Any) -> fx.Node:
    """A call of a tensor's method, put into its graph at the insertion point."""
    node, example = tensor.graph.call_method(called, (tensor, *arguments)), value(tensor)
    with example.fake_mode, torch.set_grad_enabled(example.requires_grad):  # type: ignore[attr-defined]
        node.meta = dict(tensor.meta) | {"example_value": getattr(example, called)(*arguments)}
    return node


def insert(graph: fx.Graph, target: Any, *args: Any, like: Mapping[str, Any] | None = None, **options: Any) -> fx.Node:
    """A call, put into a graph of ATen at its insertion point, with its value, and what `like` says of it besides."""
    node = graph.call_function(target, args, options)
    given, more = fx.map_arg((args, options), lambda one: one.meta["val"])
    modes = {one.fake_mode for one in pytree.tree_leaves(given) if isinstance(one, FakeTensor)}
    with next(iter(modes), nullcontext()), torch.no_grad():
        node.meta = {**(like or {}), "val": target(*given, **more)}
    return node


def erase(*nodes: fx.Node) -> None:
    """Erases nodes that nobody reads, and what only they read, other than inputs: a reader that nothing comes of would
    keep passes from what it reads."""
    for node in nodes:
        if not node.users and node.op == "call_function" and not node._erased:
            sources = node.all_input_nodes
            node.graph.erase_node(node)
            erase(*sources)


def take_place(node: fx.Node, meta: dict[str, Any]) -> None:
    """Give a node what the one in whose place it stands has, but for the value."""
    node.meta |= {key: one for key, one in meta.items() if key not in _OF_VALUE}
