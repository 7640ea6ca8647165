"""Sites inside transforms of torch.func and forward-mode AD, which Dynamo writes into the graph as calls that push and
pop them.

torch.func.grad (and vjp) goes through the layer where it is the only transform of the graph. A custom op is out of
torch.func's reach while it is called, so what stands in the graph there is the op's Python function; such graphs have
calls that AOTAutograd's cache does not take anyway."""

import re

import torch
from torch import fx

from te_inductor import ops
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.bodies import in_order
from te_inductor.passes.graph.values import is_tensor, value

GRAD, JVP, FORWARD = "grad", "jvp", "forward-mode AD"
_NESTING = re.compile(r"_(\w+)_(increment|decrement)_nesting")
_LEVEL = {"_enter_dual_level": True, "_exit_dual_level": False}


def transforms_of(root: fx.GraphModule) -> dict[fx.Node, str]:
    """Returns, for each node that is in one, the transforms ("grad", which is vjp and jacrev too, "vmap", "jvp",
    "forward-mode AD"), the innermost first, and what else keeps a layer from running there."""
    around: dict[fx.Node, tuple[str, ...]] = {}
    nested: list[str] = []
    names = set()
    for node in in_order(root):
        name, enters = _bound(node)
        if name is None:
            if nested:
                around[node] = tuple(nested)
        elif enters and not (name == FORWARD and nested[:1] == [JVP]):  # jvp enters a level of its own
            names.add(name)
            nested.insert(0, name)
        elif not enters and nested[:1] == [name]:
            nested.pop(0)
    tracked = torch.is_grad_enabled() and any(
        is_tensor(node) and value(node).requires_grad for node in root.graph.find_nodes(op="placeholder")
    )
    found = {}
    for node, stack in around.items():
        others = sorted(names - set(stack))  # jacrev runs the backward in a vmap that the layer itself is not in
        found[node] = " in ".join(stack) + "".join(f", beside {other}" for other in others)
        if found[node] == GRAD and tracked:
            found[node] = "grad, of inputs that require gradients themselves"
    return found


def _bound(node: fx.Node) -> tuple[str | None, bool]:
    """Says which transform a node enters, or leaves."""
    target = getattr(node.target, "__name__", "")
    if target in _LEVEL:
        return FORWARD, _LEVEL[target]
    call = _NESTING.fullmatch(target)
    return (call[1], call[2] == "increment") if call else (None, False)


def refusal(transforms: str | None) -> Refusal | None:
    """Why a site in them stays as it is: casts know no batches or tangents, and a layer no gradient of its gradient."""
    return None if transforms in (None, GRAD) else Refusal("inside a transform of torch.func (%s)", transforms)


def translate(root: fx.GraphModule) -> None:
    """Put the Python function in the place of the op, in transforms."""
    for node in transforms_of(root):
        if node.target is ops.layers:
            node.target = ops.trace_layers
