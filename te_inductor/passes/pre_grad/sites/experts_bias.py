"""Biases of experts, which torch's grouped product does not add: ``y.add_(bias[ids])`` behind it, where `ids` are the
sorted choices that the groups' ends count. Then each row is given the bias of its own group.

Ids below zero would be counted by no group, and stand in front of all: each row would then be in another group than its id
says. Ids that `topk` has chosen are none of these; of others, such as inputs of the graph, the first one is asked for on
the device."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Kind, arguments, name
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.writes import chain, written_by

aten = torch.ops.aten
NEGATIVE = (
    "an expert's id is below 0, expected 0 or above, as a bias is chosen by it; mark tokens of no expert by"
    " the number of experts, which stands behind all ids"
)


def added(product: fx.Node, ends: fx.Node, experts: int) -> tuple[fx.Node, fx.Node] | None:
    """The parameter (E, N) that is added, and the node that adds it, before anything else reads the product."""
    adder = min(product.users, default=None)
    if adder is None or operators.read(adder).name != "add" or adder.kwargs or len(adder.args) != 2:
        return None
    if adder.args[0] is not product or (len(product.users) > 1 and not operators.read(adder).in_place):
        return None
    chosen = adder.args[1]
    if not (isinstance(chosen, fx.Node) and is_tensor(chosen)) or len(chosen.users) > 1:
        return None  # one of which may write it
    bias, ids = _table_and_ids(chosen)
    if not (is_tensor(bias) and is_tensor(ids) and value(bias).dim() == 2 and value(ids).dim() == 1):  # type: ignore[arg-type]
        return None
    if bias.op not in ("placeholder", "get_attr") or value(bias).shape[0] != experts:
        return None
    if value(chosen).dtype != value(product).dtype or not _is_sorted(ids) or not counts(ends, ids, experts):
        return None
    return bias, adder


def counted(adder: fx.Node, ends: fx.Node, experts: int) -> tuple[list[fx.Node], set[fx.Node]]:
    """Returns, of what adds a bias, the nodes by whose values each row is given that of its own group, and what may
    write them. Ids of no expert may be clamped to the last one: their rows belong to no group."""
    chosen: Any = adder.args[1]
    ids = _table_and_ids(chosen)[1]
    clamps = {user for user in ids.users if name(user) == "clamp_" and user.args == (ids,)}
    return [ids, *chain(chosen, ids), *chain(ends, ids)], {
        user for user in clamps if user.kwargs == {"max": experts - 1}
    }


def check_ids(adder: fx.Node) -> None:
    """Has the graph raise where an id is below zero, if it may be."""
    ids = _table_and_ids(adder.args[1])[1]
    if _are_chosen(ids):
        return
    graph = ids.graph
    with graph.inserting_before(ids.next):
        first = graph.call_function(aten.slice.Tensor, (ids, 0, 0, 1))
        known = graph.call_function(aten.ge.Scalar, (first, 0))
        graph.call_function(aten._assert_async.msg, (graph.call_function(aten.all.default, (known,)), NEGATIVE))


def _are_chosen(ids: fx.Node) -> bool:
    """Whether what was sorted is what `topk` has chosen, written by nobody since."""
    reader: Any = ids.args[0]
    node = arguments(reader, "input").get("input")
    while isinstance(node, fx.Node):
        others = [user for user in node.users if user is not reader]
        if any(written_by(user) or operators.read(user).kind in Kind.VIEW for user in others):
            return False
        if node.target is operator.getitem and name(node.args[0]) == "topk":  # type: ignore[arg-type]
            return bool(node.args[1] == 1)
        if operators.read(node).kind not in Kind.RESHAPE | Kind.CAST or not node.args:
            return False
        reader, node = node, node.args[0]
    return False


def _table_and_ids(chosen: Any) -> tuple[Any, Any]:
    """The table and the ids of ``table[ids]``."""
    if chosen.target is operator.getitem and len(chosen.args) == 2:
        return chosen.args
    if name(chosen) == "index" and len(chosen.args) == 2 and isinstance(chosen.args[1], Sequence):
        return chosen.args[0], chosen.args[1][0] if len(chosen.args[1]) == 1 else None
    return None, None


def _is_sorted(ids: fx.Node) -> bool:
    """Whether these are the values of an ascending sort."""
    source = ids.args[0] if ids.target is operator.getitem and ids.args[1] == 0 else None
    return isinstance(source, fx.Node) and is_ascending(source, "sort")


def is_ascending(node: fx.Node, called: str) -> bool:
    """Whether it is a call of `sort` or `argsort`, whichever is asked for, that sorts in ascending order."""
    return name(node) == called and arguments(node, "input", "dim", "descending").get("descending", False) is False


def counts(ends: fx.Node, ids: fx.Node, experts: int) -> bool:
    """Whether `ends` are the sums of how often each id of an expert occurs."""
    total = _uncast(ends)
    node = _uncast(total.args[0]) if name(total) == "cumsum" else None
    if node is None or name(node) != "histc":
        return False
    given = arguments(node, "input", "bins", "min", "max")
    return _uncast(given.pop("input", None)) is ids and given == {"bins": experts, "min": 0, "max": experts - 1}


def _uncast(node: Any) -> fx.Node:
    while operators.read(node).kind is Kind.CAST and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]
