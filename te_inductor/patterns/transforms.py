"""Sites inside transforms of torch.func, which Dynamo writes into the graph as calls that push and pop them."""

import re

from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.patterns.bodies import in_order

_NESTING = re.compile(r"_(\w+)_(increment|decrement)_nesting")


def transforms_of(root: fx.GraphModule) -> dict[fx.Node, str]:
    """The innermost transform ("grad", which is vjp and jacrev too, "vmap" or "jvp") around each node that is in one."""
    found: dict[fx.Node, str] = {}
    nested: list[str] = []
    for node in in_order(root):
        call = _NESTING.fullmatch(getattr(node.target, "__name__", ""))
        if call and call[2] == "increment":
            nested.append(call[1])
        elif call and nested:
            nested.pop()
        elif nested:
            found[node] = nested[-1]
    return found


def refusal(transform: str | None) -> Refusal | None:
    """Why a site in it stays as it is: casts know no batches or tangents, and torch.func not the layer's gradient."""
    return None if transform is None else Refusal("inside a transform of torch.func (%s)", transform)
