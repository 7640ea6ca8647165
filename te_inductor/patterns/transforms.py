"""Sites inside transforms of torch.func, which Dynamo writes into the graph as calls that push and pop them.

torch.func.grad (and vjp) goes through the layer where it is the only transform of the graph. A custom op is out of
torch.func's reach while it is called, so what stands in the graph there is the op's Python function; such graphs have calls
that AOTAutograd's cache does not take anyway.
"""

import re

import torch
from torch import fx

from te_inductor import ops
from te_inductor.diagnostics import Refusal
from te_inductor.patterns.bodies import in_order
from te_inductor.patterns.support import is_tensor, value

GRAD = "grad"
_NESTING = re.compile(r"_(\w+)_(increment|decrement)_nesting")


def transforms_of(root: fx.GraphModule) -> dict[fx.Node, str]:
    """Of each node that is in one: the transforms ("grad", which is vjp and jacrev too, "vmap", "jvp"), the innermost first,
    and what else keeps a layer from running there."""
    around: dict[fx.Node, tuple[str, ...]] = {}
    nested: list[str] = []
    names = set()
    for node in in_order(root):
        call = _NESTING.fullmatch(getattr(node.target, "__name__", ""))
        if call and call[2] == "increment":
            names.add(call[1])
            nested.insert(0, call[1])
        elif call and nested:
            nested.pop(0)
        elif nested:
            around[node] = tuple(nested)
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


def refusal(transforms: str | None) -> Refusal | None:
    """Why a site in them stays as it is: casts know no batches or tangents, and a layer no gradient of its gradient."""
    return None if transforms in (None, GRAD) else Refusal("inside a transform of torch.func (%s)", transforms)


def translate(root: fx.GraphModule) -> None:
    """Put the Python function in the place of the op, in transforms."""
    for node in transforms_of(root):
        if node.target is ops.linears:
            node.target = ops.trace_linears
