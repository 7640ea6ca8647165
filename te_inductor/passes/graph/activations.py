"""The passes that write activations and their gradients with what a kernel computes in few instructions.

SiLU and its gradient have one sigmoid: ``x * sigmoid(x)`` for ``x / (1 + exp(-x))``. The two differ by the order of two
fp32 roundings. A kernel of SwiGLU's backward computes SiLU's gradient, which is made of the sigmoid, and SiLU itself,
for the gradient of what it multiplies and for a copy. Torch decomposes each into a sigmoid of its own, a division by
``1 + exp(-x)`` or (from 2.13) `aten.sigmoid`: a division and often an exponential too many, in a kernel that is bound
by its instructions where the GEMMs around it have lowered the card's clock. On sm_90 with triton 3.6 these are 61 an
element with torch 2.11, 69 with 2.13, 52 with one sigmoid, and 8 fewer with that of lowerings/codegen/column_pairs.py.

``1 + erf(z)``, of GELU, is ``erfc(-z)``, and ``1 + tanh(u)``, of GELU's other form, ``2 sigmoid(2 u)``. Both are exact,
and far below zero nothing cancels. For `erfc` and `sigmoid` there is PTX of ours (templates/triton/ptx.py); Triton's erf
has two polynomials, of which each element takes one, and tanh likewise. That counts in a kernel of GELU's backward,
which casts both GELU and its gradient and is bound by its instructions: 73 an element on sm_90, and 55 with this; 40 of
the form with tanh."""

import torch
from torch import fx

from te_inductor.passes.graph.tracing import erase

aten = torch.ops.aten


def share_sigmoids(graph: fx.Graph) -> None:
    """Replace ``1 / (1 + exp(-x))`` by a sigmoid, and ``x`` over the same by x times it."""
    for node in graph.find_nodes(op="call_function", target=aten.reciprocal.default):
        x = _behind(node.args[0])
        if x is not None:
            with graph.inserting_before(node):
                _replace(node, _call(node, aten.sigmoid.default, x))
    for node in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        x = _behind(node.args[1])
        if x is not None and node.args[0] is x:
            with graph.inserting_before(node):
                _replace(node, _call(node, aten.mul.Tensor, x, _call(node, aten.sigmoid.default, x)))


def _behind(denominator: object) -> fx.Node | None:
    """x, of ``1 + exp(-x)``."""
    if not _is(denominator, aten.add.Tensor) or denominator.args[1] != 1:  # type: ignore[attr-defined]
        return None
    exp = denominator.args[0]  # type: ignore[attr-defined]
    return exp.args[0].args[0] if _is(exp, aten.exp.default) and _is(exp.args[0], aten.neg.default) else None


def _is(value: object, target: object) -> bool:
    return isinstance(value, fx.Node) and value.target is target


def fold_gelu(graph: fx.Graph) -> None:
    """Replace what GELU and its gradient make of `erf` and of `tanh`."""
    for plus_one in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        inner, one = plus_one.args
        if one != 1 or plus_one.kwargs or not isinstance(inner, fx.Node):
            continue
        if inner.target is aten.erf.default:
            with graph.inserting_before(plus_one):
                z = _call(plus_one, aten.neg.default, inner.args[0])
                _replace(plus_one, _call(plus_one, aten.erfc.default, z))
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
    _replace(plus_one, r)


def _call(like: fx.Node, target: object, *args: object) -> fx.Node:
    """A node of the same shape and dtype as another."""
    node = like.graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = dict(like.meta)
    return node


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    erase(node)
