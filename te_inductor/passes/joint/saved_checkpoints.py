"""What checkpoints of a graph compute again in the backward, of a value that may be saved in E4M3.

A checkpoint keeps the inputs of a block; the backward computes the block again from them. Of a rounded input it computes
what the block makes of that input, and gradients are those of the block there. Norms, attention and masks then come of the
same numbers as what the backward reads beside them, so that any function may read the value, where
- nothing is read beside them that the forward has computed of the exact value, as under a selective policy: a row of
  attention's probabilities would not add up to one;
- no integers are computed of it, as a router's choice of experts is: the forward has chosen others."""

from collections.abc import Container
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.walks import reached

_INTEGERS = (torch.int16, torch.int32, torch.int64)


class Recomputation:
    """What a backward computes again of a value, `source` in the forward, with what it computes of that in turn before
    a gradient comes; `later` is what depends on gradients."""

    def __init__(self, value: fx.Node, source: fx.Node, later: Container[fx.Node]) -> None:
        self.later, self.nodes = later, set[fx.Node]()
        of_exact = {node.name for node in reached([source], lambda node: node.users) if node is not source}
        inputs = [node for node in value.graph.find_nodes(op="placeholder") if node.name in of_exact]
        self.exact = reached(inputs, lambda node: [one for one in node.users if one not in later])

    def reads(self, node: fx.Node, of_value: Container[fx.Node]) -> bool:
        """Whether a node is such a one, or reads one; `of_value` is what else is computed of the value."""
        again = node not in self.later and is_computed_again(node)
        return any(one in self.nodes or (again and one in of_value) for one in node.all_input_nodes)

    def add(self, node: fx.Node) -> Refusal | None:
        """Takes a node in, or says why the value stays as it is."""
        exact = [one.name for one in node.all_input_nodes if one in self.exact]
        if exact:
            return Refusal("a checkpoint reads it beside %s, which is saved of what it was", exact[0])
        if node in self.later:
            return None
        self.nodes.add(node)
        return (
            Refusal("%s makes integers of it, others than of a rounded value", node.target) if _chooses(node) else None
        )


def is_computed_again(node: fx.Node) -> bool:
    """Whether a checkpoint does. What torch puts around a random operator has no mark, its results have."""
    marked = [one for one in (node, *node.users) if "ac_graph_id" in one.meta]
    return node.op == "call_function" and (node in marked or len(marked) == len(node.users) > 0)


def _chooses(node: fx.Node) -> bool:
    """Whether it computes integers, apart from the seeds that attention returns."""
    operators = [one for one in (node.target, *node.args) if isinstance(one, torch._ops.OpOverload)]
    arguments = [argument.name for operator in operators for argument in operator._schema.arguments]
    results: Any = pytree.tree_leaves(node.meta.get("val"))
    made = any(isinstance(one, torch.Tensor) and one.dtype in _INTEGERS for one in results)
    return made and "dropout_p" not in arguments
