"""Rows that a sort brings into the experts' order, and back. Autograd knows no permutation: the gradient of an index is
zeros, to which rows are added one by one, in their own dtype and in the order of atomics; and a model that adds up the
rows of a token with `index_add` does the same. Of a permutation each is a gather by where rows went, which Inductor
computes where the rows are read, and sums are in fp32. Beside experts in low precision alone::

    y[back]                                  back undoes a sort      -> permute_rows
    x[order // each], sent to other ranks    order is a sort         -> spread_rows
    zeros.index_add(0, order // each, rows)                          -> sum_rows

In traced graphs, whose gradients are there already, ``zeros.index_put([order // each], dx, accumulate=True)`` is the
last of these.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.tracing import traced_into
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.writes import AtenWrites, Writes, chain, last_read
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites import rule
from te_inductor.passes.pre_grad.sites.exchanges import Exchanges
from te_inductor.passes.pre_grad.sites.experts_bias import is_ascending
from te_inductor.passes.pre_grad.sites.gathers import expanded_rows, is_order, order_of, table_and_rows

aten = torch.ops.aten
_ZEROS = frozenset(("new_zeros", "zeros", "zeros_like"))
_SUMS = frozenset(("index_add", "scatter_add"))


def rewrite_permutations(plan: Plan) -> None:
    """Gather by permutations both ways."""
    sites = [site for site in plan.experts if site.low]
    if not sites:
        return
    for module in plan.graph_modules():
        for node in list(module.graph.nodes):
            order = _order_of(node, plan.writes)
            if order is not None:
                with module.graph.inserting_before(node):
                    rule.replace(node, module.graph.call_function(ops.permute_rows, (*node.args[:2], order)))
            elif operators.read(node).name in _SUMS:
                _rewrite_sum(node, plan.writes)
    _spread(sites, plan.writes)


def _order_of(node: fx.Node, writes: Writes) -> fx.Node | None:
    """Returns, of ``y[back]``, the permutation that `back` undoes."""
    if node.target is not operator.getitem or not is_tensor(node) or len(node.args) != 2:
        return None
    x, back = node.args
    if not (is_tensor(x) and is_tensor(back) and value(back).dim() == 1):  # type: ignore[arg-type]
        return None
    order, made, fills = back.args[0] if back.args else None, [back], list[fx.Node]()
    if is_ascending(back, "argsort"):
        pass
    elif name(back) in ("empty_like", "zeros_like"):
        fills = [user for user in back.users if user.target is operator.setitem and user.args[0] is back]
        if len(fills) != 1 or not fills[0] < node:
            return None
        _, order, places = fills[0].args
        if not (is_tensor(places) and name(places) == "arange" and len(places.args) == 1):
            return None
        made.append(places)
    else:
        return None
    if not (is_tensor(order) and is_order(order)):
        return None
    sizes = [value(one).shape for one in (order, *made)]
    alike = all(len(size) == 1 and statically_known_true(size[0] == value(x).shape[0]) for size in sizes)  # type: ignore[arg-type]
    return order if alike and not writes.behind([order, *made], last_read(node), set(fills)) else None


def _rewrite_sum(node: fx.Node, writes: Writes) -> None:
    """Rewrites a sum of rows that are added to zeros. What adds in place is who first reads the zeros: all others read
    its result."""
    given = operators.arguments(node, ("base", "input"), "dim", "index", ("rows", "source", "src"))
    base, index, rows = given.get("base"), given.get("index"), given.get("rows")
    if given.get("dim") != 0 or given.get("alpha", 1) != 1 or not (is_tensor(base) and is_tensor(rows)):
        return
    if "out" in given or "out" in base.kwargs:  # memory of the program's, which it reads by other names too
        return
    places = expanded_rows(index, value(rows).shape[-1]) if name(node).startswith("scatter") else index
    found = order_of(places, value(base).shape[0]) if is_tensor(places) else None
    readers: Sequence[fx.Node] = [user for user in base.users if user is not node]
    if name(base) not in _ZEROS or value(base).dim() != 2 or found is None:
        return
    if (readers and not operators.read(node).in_place) or not all(node < reader for reader in readers):
        return
    order, each = found
    if writes.behind([order, *chain(index, order)], last_read(node)):  # type: ignore[arg-type]
        return
    same = statically_known_true(value(rows).shape[0] == value(order).shape[0])
    if not (same and value(rows).dtype == value(base).dtype and value(rows).shape[1:] == value(base).shape[1:]):
        return
    with node.graph.inserting_before(node):
        made = node.graph.call_function(ops.sum_rows, (rows, order, each))
    for reader in readers:
        reader.replace_input_with(base, made)
    rule.replace(node, made)


def _spread(sites: Sequence[Candidate], writes: Writes) -> None:
    """Spreads rows that go to other ranks. What is gathered on the layer's own rank the layer gathers."""
    done: dict[fx.Node, fx.Node] = {}
    for site in sites:
        part, exchange = site.match.part(Exchanges), site.match.arrives
        if part is None or exchange is None:
            continue
        node = exchange.rows
        if node not in done:
            table, rows = table_and_rows(node)
            found = order_of(rows, value(table).shape[0]) if is_tensor(table) and is_tensor(rows) else None
            if found is None or value(table).dim() != 2 or value(rows).dim() != 1 or writes.anywhere(node):
                continue
            if writes.behind([found[0], *chain(rows, found[0])], last_read(node)):
                continue
            with node.graph.inserting_before(node):
                done[node] = node.graph.call_function(ops.spread_rows, (table, *found))
            rule.replace(node, done[node])
        made = done[node]
        site.match = site.match.having(replace(part, arrives=replace(exchange, rows=made)), x=made)


def rewrite_scattered_rows(plan: Plan) -> None:
    """Gather by where rows went, beside experts in low precision."""
    graph = plan.gm.graph
    if not any(site.low for site in plan.experts):
        return
    writes = AtenWrites(graph)
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        found = _scattered(node)
        if found is None:
            continue
        zeros, places, order, rows, each = found
        if writes.behind([zeros, order, *chain(places, order)], node):
            continue
        with graph.inserting_before(node):
            [made] = traced_into(graph, lambda *given, each=each: [ops.sum_rows(*given, each)], [rows, order], node)
        rule.replace(node, made)
    graph.eliminate_dead_code()
    plan.gm.recompile()


def _scattered(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, int] | None:
    """The zeros, the places, the order, the rows, and how many there are of each, where all rows of a matrix of zeros
    are added to."""
    given = operators.arguments(node, "zeros", "places", "rows", "accumulate")
    zeros, places, rows = given["zeros"], given["places"], given["rows"]
    if not given.get("accumulate") or name(zeros) not in _ZEROS or len(zeros.users) > 1 or len(places) != 1:
        return None
    if not (is_tensor(places[0]) and is_tensor(rows) and value(rows).dim() == 2):
        return None
    order, each = order_of(places[0], value(zeros).shape[0]) or (None, 1)
    return None if order is None else (zeros, places[0], order, rows, each)
