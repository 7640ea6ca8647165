"""Rows that go back from the experts' order: ``y[back]``, where `back` undoes a sort. Autograd knows no permutation: the
gradient of an index is zeros, to which rows are added one by one, in the order of atomics. Of a permutation it is a
gather by the sort's own order, which Inductor computes where the rows are read. Beside experts in low precision alone."""

import operator

from torch import fx

from te_inductor import ops
from te_inductor.passes.graph.aliases import name
from te_inductor.passes.pre_grad.decide.support import is_tensor, value
from te_inductor.passes.pre_grad.match.gathers import is_order
from te_inductor.passes.pre_grad.match.rule import replace
from te_inductor.passes.pre_grad.plan import Plan


def rewrite_permutations(plan: Plan) -> None:
    """Gather by permutations both ways."""
    if not any(site.low and site.match.groups for site in plan.candidates):
        return
    for module in plan.graph_modules():
        for node in list(module.graph.nodes):
            order = _order_of(node)
            if order is not None:
                with module.graph.inserting_before(node):
                    replace(node, module.graph.call_function(ops.permute_rows, (*node.args[:2], order)))


def _order_of(node: fx.Node) -> fx.Node | None:
    """Of ``y[back]``: the permutation that `back` undoes."""
    if node.target is not operator.getitem or not is_tensor(node) or len(node.args) != 2:
        return None
    x, back = node.args
    if not (is_tensor(x) and is_tensor(back) and value(back).dim() == 1):  # type: ignore[arg-type]
        return None
    if name(back) == "argsort":
        order = back.args[0]
        return order if isinstance(order, fx.Node) and is_order(order) else None
    writes = [user for user in back.users if user.target is operator.setitem and user.args[0] is back]
    if name(back) not in ("empty_like", "zeros_like") or len(writes) != 1 or not writes[0] < node:
        return None
    _, order, places = writes[0].args
    counts = isinstance(places, fx.Node) and name(places) == "arange" and len(places.args) == 1
    return order if counts and isinstance(order, fx.Node) and is_order(order) else None
