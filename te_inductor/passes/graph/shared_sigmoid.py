"""The pass that writes SiLU and its gradient with one sigmoid: ``x * sigmoid(x)`` for ``x / (1 + exp(-x))``.

The two differ by the order of two fp32 roundings. A kernel of SwiGLU's backward computes SiLU's gradient, which is made
of the sigmoid, and SiLU itself, for the gradient of what it multiplies and for a copy. Torch decomposes each into a
sigmoid of its own, a division by ``1 + exp(-x)`` or (from 2.13) `aten.sigmoid`: a division and often an exponential too
many, in a kernel that is bound by its instructions where the GEMMs around it have lowered the card's clock. On sm_90
with triton 3.6 these are 61 an element with torch 2.11, 69 with 2.13, 52 with one sigmoid, and 8 fewer with that of
lowerings/codegen/assembly.py."""

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def fold(graph: fx.Graph) -> None:
    """Replace ``1 / (1 + exp(-x))`` by a sigmoid, and ``x`` over the same by x times it."""
    for node in graph.find_nodes(op="call_function", target=aten.reciprocal.default):
        x = _behind(node.args[0])
        if x is not None:
            _replace(node, aten.sigmoid.default, x)
    for node in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        x = _behind(node.args[1])
        if x is not None and node.args[0] is x:
            with graph.inserting_before(node):
                sigmoid = graph.call_function(aten.sigmoid.default, (x,))
            sigmoid.meta = dict(node.meta)
            _replace(node, aten.mul.Tensor, x, sigmoid)


def _behind(denominator: object) -> fx.Node | None:
    """x, of ``1 + exp(-x)``."""
    if not _is(denominator, aten.add.Tensor) or denominator.args[1] != 1:  # type: ignore[attr-defined]
        return None
    exp = denominator.args[0]  # type: ignore[attr-defined]
    return exp.args[0].args[0] if _is(exp, aten.exp.default) and _is(exp.args[0], aten.neg.default) else None


def _is(value: object, target: object) -> bool:
    return isinstance(value, fx.Node) and value.target is target


def _replace(node: fx.Node, target: Any, *args: fx.Node) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    _erase(node)


def _erase(node: fx.Node) -> None:
    """Erases a node with what nobody else reads: a reader that nothing comes of would keep later passes from what it
    reads."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for x in inputs:
        if not x.users and x.op == "call_function":
            _erase(x)
