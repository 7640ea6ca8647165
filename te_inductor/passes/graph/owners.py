"""The parameters that weights of a graph come from."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.operators import Kind
from te_inductor.passes.graph.values import is_tensor, value

# What takes all of a parameter; any other call is part of its quantizers' names.
_WHOLE = Kind.PERMUTE | Kind.CAST | Kind.COPY
_OF_DTENSORS = frozenset("to_local redistribute prim_redistribute prim_to_local".split())
_HELD = ("placeholder", "get_attr")
_COLLECTIVES = frozenset(("all_gather_into_tensor", "wait_tensor"))


@dataclass(frozen=True)
class Owner:
    """The origin of a weight: the root's node of a parameter, and what is taken of it ("" is all of it)."""

    parameter: fx.Node
    part: str


def keeps_values(node: fx.Node) -> bool:
    """Whether a node returns values of its first operand, all or some, in that or in another dtype: of ATen's graphs also
    a weight of its shards."""
    called, kind, _ = operators.read(node)
    return kind in Kind.VIEW | Kind.CAST | Kind.COPY or called == "getitem" or called in _COLLECTIVES


def from_parameter(node: Any, bodies: Bodies | None = None) -> bool:
    """Whether a node is a parameter, or views and casts of one; with `bodies` also of one that a body was handed."""
    while isinstance(node, fx.Node):
        node = node if bodies is None else bodies.outer(node)
        if is_tensor(node) and isinstance(value(node), torch.nn.Parameter):
            return True
        if not keeps_values(node) or not node.args:
            return False
        node = node.args[0]
    return False


def owner_of(weight: fx.Node, bodies: Bodies) -> Owner | None:
    """The first parameter that a weight is computed from."""
    calls: list[str] = []
    node = bodies.outer(weight)
    # What a call returns of a parameter may be one too, as what `to_local` does.
    while node.op not in _HELD or not isinstance(node.meta.get("example_value"), torch.nn.Parameter):
        inputs = node.all_input_nodes
        if not inputs:
            return None
        called = operators.name(node)
        if operators.read(node).kind not in _WHOLE and called not in _OF_DTENSORS:
            constants = [_text(arg) for arg in (*node.args, *node.kwargs.values()) if not isinstance(arg, fx.Node)]
            calls.append("_".join([called, *constants]))
        node = bodies.outer(inputs[0])
    return Owner(node, ".".join(reversed(calls)))


def _text(constant: Any) -> str:
    if isinstance(constant, slice):
        ends = f"{constant.start or ''}:{'' if constant.stop is None else constant.stop}"
        return ends if constant.step is None else f"{ends}:{constant.step}"
    if isinstance(constant, tuple | list):
        return f"({','.join(map(_text, constant))})"
    return str(constant)
