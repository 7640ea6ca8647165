"""The pass that writes SiLU with a sigmoid: ``x * sigmoid(x)`` for ``x / (1 + exp(-x))``.

The two differ by the order of two fp32 roundings. Where a kernel computes SiLU's gradient, which is made of the sigmoid, and
SiLU itself, for the gradient of what it multiplies and for a copy, Inductor writes both forms: an exponential and a division
more an element. The kernel of SwiGLU's backward with its casts is bound by instructions: 69 an element on sm_90, and 52 with
one sigmoid.
"""

import torch
from torch import fx

aten = torch.ops.aten


def fold(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        x = node.args[0]
        if isinstance(x, fx.Node) and _is_one_more_than_exp_of_minus(node.args[1], x):
            with graph.inserting_before(node):
                sigmoid = graph.call_function(aten.sigmoid.default, (x,))
                product = graph.call_function(aten.mul.Tensor, (x, sigmoid))
            for new in (sigmoid, product):
                new.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)


def _is_one_more_than_exp_of_minus(denominator: object, x: fx.Node) -> bool:
    if not _is(denominator, aten.add.Tensor) or denominator.args[1] != 1:  # type: ignore[attr-defined]
        return False
    [exp, _] = denominator.args  # type: ignore[attr-defined]
    return _is(exp, aten.exp.default) and _is(exp.args[0], aten.neg.default) and exp.args[0].args[0] is x


def _is(value: object, target: object) -> bool:
    return isinstance(value, fx.Node) and value.target is target
