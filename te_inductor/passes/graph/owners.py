"""Which parameter a weight of a graph comes from."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from te_inductor.passes.graph.bodies import Bodies

# Calls that take all of a parameter; any other is part of its quantizers' names.
_WHOLE = frozenset(
    "t T mT numpy_T permute transpose to type type_as float bfloat16 half contiguous clone to_local redistribute"
    " prim_redistribute prim_to_local".split()
)
_HELD = ("placeholder", "get_attr")


@dataclass(frozen=True)
class Owner:
    """Where a weight comes from: the root's node of a parameter, and what is taken of it ("" is all of it)."""

    parameter: fx.Node
    part: str


def owner_of(weight: fx.Node, bodies: Bodies) -> Owner | None:
    """The first parameter that a weight is computed from."""
    calls: list[str] = []
    node = bodies.outer(weight)
    # What a call returns of a parameter may be one too, as what `to_local` does.
    while node.op not in _HELD or not isinstance(node.meta.get("example_value"), torch.nn.Parameter):
        inputs = node.all_input_nodes
        if not inputs:
            return None
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        constants = [_text(arg) for arg in (*node.args, *node.kwargs.values()) if not isinstance(arg, fx.Node)]
        if (constants[0] if name == "getattr" else name) not in _WHOLE:
            calls.append("_".join([name, *constants]))
        node = bodies.outer(inputs[0])
    return Owner(node, ".".join(reversed(calls)))


def _text(constant: Any) -> str:
    if isinstance(constant, slice):
        ends = f"{constant.start or ''}:{'' if constant.stop is None else constant.stop}"
        return ends if constant.step is None else f"{ends}:{constant.step}"
    if isinstance(constant, tuple | list):
        return f"({','.join(map(_text, constant))})"
    return str(constant)
