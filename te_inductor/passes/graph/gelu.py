"""The pass that writes GELU and its gradient with what a kernel that casts computes in few instructions.

``1 + erf(z)``, of GELU, is ``erfc(-z)``, and ``1 + tanh(u)``, of GELU's other form, ``2 sigmoid(2 u)``. Both are exact,
and far below zero nothing cancels. For `erfc` and `sigmoid` there is PTX of ours (templates/triton/ptx.py); Triton's erf
has two polynomials, of which each element takes one, and tanh likewise. That counts in a kernel of GELU's backward,
which casts both GELU and its gradient and is bound by its instructions: 73 an element on sm_90, and 55 with this; 40 of
the form with tanh."""

import torch
from torch import fx

aten = torch.ops.aten


def fold(graph: fx.Graph) -> None:
    """Replace what GELU and its gradient make of `erf` and of `tanh`."""
    for plus_one in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        inner, one = plus_one.args
        if one != 1 or plus_one.kwargs or not isinstance(inner, fx.Node):
            continue
        if inner.target is aten.erf.default:
            with graph.inserting_before(plus_one):
                z = _call(plus_one, aten.neg.default, inner.args[0])
                _replace(plus_one, _call(plus_one, aten.erfc.default, z))
            if not inner.users:
                graph.erase_node(inner)
        elif inner.target is aten.tanh.default:
            _fold_tanh(inner, plus_one)


def _fold_tanh(tanh: fx.Node, plus_one: fx.Node) -> None:
    """``1 + tanh(u)`` as ``r = 2 sigmoid(2 u)``, and ``1 - tanh(u)^2`` as ``r (2 - r)``, if tanh is read by nothing
    else: it would be computed beside the sigmoid."""
    squares = [user for user in tanh.users if user.target is aten.mul.Tensor and user.args == (tanh, tanh)]
    rests = [rest for square in squares for rest in square.users]
    if set(tanh.users) != {plus_one, *squares} or any(
        rest.target is not aten.sub.Tensor or rest.args[0] != 1 or rest.kwargs for rest in rests
    ):
        return
    graph = tanh.graph
    with graph.inserting_before(tanh):
        sigmoid = _call(tanh, aten.sigmoid.default, _call(tanh, aten.mul.Tensor, tanh.args[0], 2))
        r = _call(tanh, aten.mul.Tensor, sigmoid, 2)
    for rest in rests:
        with graph.inserting_before(rest):
            _replace(rest, _call(rest, aten.mul.Tensor, r, _call(rest, aten.sub.Tensor, 2, r)))
    for square in squares:
        graph.erase_node(square)
    _replace(plus_one, r)
    graph.erase_node(tanh)


def _call(like: fx.Node, target: object, *args: object) -> fx.Node:
    """A node of the same shape and dtype as another."""
    node = like.graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = dict(like.meta)
    return node


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
