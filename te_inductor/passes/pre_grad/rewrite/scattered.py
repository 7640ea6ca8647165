"""Gradients of experts' rows in traced graphs. Autograd adds them up where a token's row was gathered several times:
``zeros.index_put([order // each], dx, accumulate=True)``, in dx's dtype and, on a GPU, in the order of atomics or of a
sort. As behind a compile they become a gather by where each row went, added up in fp32."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from te_inductor import ops
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.tracing import traced_into
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.writes import chain, of_aten
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.passes.pre_grad.rewrite.permutations import ZEROS
from te_inductor.passes.pre_grad.sites.gathers import order_of
from te_inductor.passes.pre_grad.sites.rule import replace

aten = torch.ops.aten


def rewrite_scattered_rows(plan: Plan) -> None:
    """Gather by where rows went, beside experts in low precision."""
    graph = plan.gm.graph
    if not any(site.low for site in plan.experts):
        return
    writes = of_aten(graph)
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        found = _scattered(node)
        if found is None:
            continue
        zeros, places, order, rows, each = found
        if writes.behind([zeros, order, *chain(places, order)], node):
            continue
        with graph.inserting_before(node):
            [made] = traced_into(graph, partial(_summed, each), [rows, order], node)
        replace(node, made)
    graph.eliminate_dead_code()
    plan.gm.recompile()


def _summed(each: int, rows: Tensor, order: Tensor) -> list[Tensor]:
    return [ops.sum_rows(rows, order, each)]


def _scattered(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, int] | None:
    """The zeros, the places, the order, the rows, and how many there are of each, where all rows of a matrix of zeros
    are added to."""
    given: Any = dict(zip(("zeros", "places", "rows", "accumulate"), node.args, strict=False)) | node.kwargs
    zeros, places, rows = given["zeros"], given["places"], given["rows"]
    if not given.get("accumulate") or name(zeros) not in ZEROS or len(zeros.users) > 1 or len(places) != 1:
        return None
    if not (is_tensor(places[0]) and is_tensor(rows) and value(rows).dim() == 2):
        return None
    order, each = order_of(places[0], value(zeros).shape[0]) or (None, 1)
    return None if order is None else (zeros, places[0], order, rows, each)
