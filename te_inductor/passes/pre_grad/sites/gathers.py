"""What experts read: rows that are gathered from a tensor that has each once, and casts on the way."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Kind, arguments, name
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.writes import chain
from te_inductor.passes.pre_grad.sites import requirements
from te_inductor.passes.pre_grad.sites.experts_bias import counts
from te_inductor.passes.pre_grad.sites.groups import Groups


def source_of(x: fx.Node, ends: fx.Node) -> tuple[fx.Node, Groups]:
    """What the experts' input was cast and gathered from, and what is known of its rows; or the input itself."""
    source = first_cast(uncast(x, lossless=True))
    return gathered(source, ends) or (source, Groups(ends))


def uncast(node: fx.Node, lossless: bool = False) -> fx.Node:
    """What was cast from one dtype that layers can have to another; `lossless`: to one that holds all its values."""
    while operators.read(node).kind is Kind.CAST and node.args and is_tensor(node.args[0]) and is_tensor(node):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        before, after = value(source), value(node)
        if not {before.dtype, after.dtype} <= set(requirements.DTYPES) or before.device != after.device:
            break
        if lossless and torch.promote_types(before.dtype, after.dtype) != after.dtype:
            break
        node = source
    return node


def first_cast(node: fx.Node) -> fx.Node:
    """The first of equal casts of one tensor, so that layers that cast their input each have the same one."""
    if operators.read(node).kind is not Kind.CAST or not node.args or not isinstance(node.args[0], fx.Node):
        return node
    alike = (
        other for other in node.args[0].users if operators.read(other).kind is Kind.CAST and other.graph is node.graph
    )
    same = [
        other for other in alike if (other.target, other.args, other.kwargs) == (node.target, node.args, node.kwargs)
    ]
    return min(same)


def gathered(x: fx.Node, ends: fx.Node) -> tuple[fx.Node, Groups] | None:
    """``t[order // each]``, where `order` sorts `each` choices of every row of t: t and what is known of its rows."""
    table, rows = table_and_rows(x)
    if not (is_tensor(table) and is_tensor(rows) and value(table).dim() == 2 and value(rows).dim() == 1):  # type: ignore[arg-type]
        return None
    found = order_of(rows, value(table).shape[0])
    return None if found is None else (table, Groups(ends, rows, *found))


def emptied(x: fx.Node, groups: Groups) -> dict[fx.Node, list[fx.Node]]:
    """What writes zeros in place into rows of `x` that belong to no expert, which are never read, and for each the nodes
    by whose values it does no more than that."""
    if groups.order is None:
        return {}
    found = {user: _emptied_by(user, groups.order, groups.ends) for user in x.users if user.args[:1] == (x,)}
    return {change: nodes for change, nodes in found.items() if nodes}


def order_of(rows: fx.Node, count: Any) -> tuple[fx.Node, int] | None:
    """The two operands of ``order // each``, where `order` sorts `each` choices of every one of so many rows."""
    divides = operators.read(rows).name in ("floordiv", "div") and len(rows.args) == 2
    if not divides or rows.kwargs.get("rounding_mode", "floor") != "floor":
        return None
    order, each = rows.args
    if not (isinstance(order, fx.Node) and is_tensor(order) and isinstance(each, int) and is_order(order)):
        return None
    return (order, each) if statically_known_true(count * each == value(order).shape[0]) else None


def table_and_rows(x: fx.Node) -> tuple[Any, Any]:
    """The two operands of ``table[rows]``, in each way to write it."""
    called, given = name(x), arguments(x, "input", "dim", "index")
    if called == "getitem" and len(x.args) == 2:
        table, rows = x.args
        return table, rows[0] if isinstance(rows, tuple) and len(rows) == 1 else rows
    if called == "index" and len(x.args) == 2 and isinstance(x.args[1], Sequence) and len(x.args[1]) == 1:
        return x.args[0], x.args[1][0]
    if called == "index_select" and given.get("dim") == 0:
        return given.get("input"), given.get("index")
    if called == "gather" and given.get("dim") == 0:
        table = given.get("input")
        return table, expanded_rows(given.get("index"), value(table).shape[-1]) if is_tensor(table) else None
    return None, None


def expanded_rows(index: Any, columns: Any) -> Any:
    """The rows of a `gather` or `scatter` of whole rows: of ``rows.reshape(-1, 1).expand(-1, columns)``."""
    if not (is_tensor(index) and operators.read(index).kind is Kind.EXPAND and index.args):
        return None
    column = index.args[0]
    if not is_tensor(column) or operators.read(column).kind not in Kind.RESHAPE | Kind.PART:
        return None  # such as rows that an index of the program's brings into another order
    rows = column.args[0]
    if not (is_tensor(rows) and value(rows).dim() == 1 and value(column).dim() == value(index).dim() == 2):
        return None
    same = statically_known_true(value(column).shape[0] == value(rows).shape[0]) and value(column).shape[1] == 1
    return rows if same and statically_known_true(value(index).shape[1] == columns) else None


def _emptied_by(change: fx.Node, order: fx.Node, ends: fx.Node) -> list[fx.Node]:
    """The nodes from the ids to the mask and to the ends, of ``x.masked_fill_(ids >= E, 0)``, the ids being those that
    `order` sorts and `ends` counts; none of another node."""
    if name(change) != "masked_fill_" or len(change.args) != 3 or change.args[2] != 0 or change.kwargs:
        return []
    mask: Any = change.args[1]
    while isinstance(mask, fx.Node) and operators.read(mask).kind is Kind.RESHAPE:
        mask = mask.args[0]
    if not isinstance(mask, fx.Node) or name(mask) != "ge" or mask.args[1:] != (value(ends).shape[0],):
        return []
    ids = mask.args[0]
    sort = order.args[0] if order.target is operator.getitem else None
    sorts = isinstance(ids, fx.Node) and ids.target is operator.getitem and ids.args == (sort, 0)
    if not sorts or not counts(ends, ids, value(ends).shape[0]):  # type: ignore[arg-type]
        return []
    return [ids, *chain(change.args[1], ids), *chain(ends, ids)]  # type: ignore[list-item, arg-type]


def is_order(node: fx.Node) -> bool:
    """Whether it is made as the permutation that sorts something. Whether it still is one, `Writes` knows."""
    if name(node) == "argsort":
        return True
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and name(source) == "sort" and node.args[1:] == (1,)
