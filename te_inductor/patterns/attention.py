"""`F.multi_head_attention_forward`, which `nn.MultiheadAttention` calls, is one node of a Dynamo graph that hides two linear
layers. `inline` puts its body in its place, as ATen ops, so that the rules see them.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from te_inductor.patterns.support import is_tensor, value


def inline(graph: fx.Graph) -> None:
    """Replace every such node of `graph` by what it computes."""
    for node in graph.find_nodes(op="call_function", target=F.multi_head_attention_forward):
        # A symbolic number among the inputs (torch.compile(dynamic=True) makes one of the dropout probability) would have
        # to be guarded upon; Dynamo's guards are closed by now.
        known = all(is_tensor(item) for item in node.all_input_nodes)
        if known and all(user.target is operator.getitem for user in node.users):
            _inline(node)
            graph.erase_node(node)


def _inline(node: fx.Node) -> None:
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    inputs = list(dict.fromkeys(item for item in flat if is_tensor(item)))  # once each: the body asks `query is key`

    def body(*tensors: torch.Tensor) -> Any:
        known = dict(zip(inputs, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten([known[item] if item in inputs else item for item in flat], spec)
        return F.multi_head_attention_forward(*args, **kwargs)

    fakes = [value(item) for item in inputs]
    output = node.meta["example_value"][0]
    mixed = any(fake.is_floating_point() and fake.dtype != output.dtype for fake in fakes)
    autocast = torch.autocast(output.device.type, dtype=output.dtype, enabled=mixed)
    with output.fake_mode, torch.set_grad_enabled(output.requires_grad), autocast:  # as Dynamo traced the node
        traced = make_fx(body, pre_dispatch=True)(*fakes)
        values = _Values(traced)
        values.run(*fakes)
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with node.graph.inserting_before(node):
        results = node.graph.graph_copy(traced.graph, copies)
    for old, new in copies.items():
        if old.op != "placeholder":
            new.meta = _meta(node, new, values.of[old])
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index, arg-type]
        node.graph.erase_node(user)


class _Values(fx.Interpreter):
    """Keeps the fake value of every node, with its requires_grad, which make_fx's own record lacks."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.of: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.of[n] = super().run_node(n)
        return self.of[n]


def _meta(node: fx.Node, new: fx.Node, example: Any) -> dict[str, Any]:
    """As Dynamo would have written it: the value, and the module path, which for the output projection is its own."""
    meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "custom") if key in node.meta}
    stack = meta.get("nn_module_stack")
    projection = node.args[11] if len(node.args) > 11 else node.kwargs.get("out_proj_weight")
    if stack and new.target is torch.ops.aten.linear.default and new.args[1] is projection:
        path = list(stack.values())[-1][0]
        meta["nn_module_stack"] = {**stack, "out_proj": (f"{path}.out_proj", torch.nn.Linear)}
    return meta | {"example_value": example}
