"""The forms in which models write the linear layers of experts: grouped products of sorted rows with a 3D parameter,
and batched products of more matrices than are worth a GEMM each.

Where the rows are gathered from a tensor that has each once, as behind a router that picks several experts a token, the
gather is part of the layer: each row is cast once and gathered in low precision, and the gradient's rows are added up
by a gather too, in fp32."""

import operator
from dataclasses import replace as changed
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops, targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.aliases import name
from te_inductor.passes.pre_grad.decide.support import is_tensor, value
from te_inductor.passes.pre_grad.match.linear import Batched, from_parameter
from te_inductor.passes.pre_grad.match.rule import Emit, Groups, Match, Rule, replace
from te_inductor.recipes import Slots
from te_inductor.recipes.formats import ALIGNMENT
from te_inductor.runtime import grouped

GROUPED = frozenset(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"))
_DIVISIONS = frozenset(("floordiv", "floor_divide", "__floordiv__", "div", "divide"))
_CASTS = frozenset("to int float type".split())
aten = torch.ops.aten


class Grouped(Rule):
    """``F.grouped_mm(x, w, offs=ends)``: rows of x, sorted by expert, each times its expert's matrix."""

    pattern: ClassVar[str] = "grouped_linear"
    joins: ClassVar[bool] = True

    def match(self, node: fx.Node) -> Match | None:
        if node.op != "call_function" or name(node) not in GROUPED:
            return None
        given = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), node.args, strict=False))
        named = {"input": "x", "mat_a": "x", "self": "x", "mat_b": "weight", "mat2": "weight"}
        given |= {named.get(key, key): one for key, one in node.kwargs.items()}
        x, weight, ends = (given.get(key) for key in ("x", "weight", "offs"))
        if not (is_tensor(x) and is_tensor(weight) and is_tensor(ends) and is_tensor(node)):
            return None
        if not from_parameter(weight) or from_parameter(x) or (value(x).dim(), value(weight).dim()) != (2, 3):  # type: ignore[arg-type]
            return None
        options = tuple((key, one) for key, one in given.items() if key == "bias" and one is not None)
        weight, transposed = _untransposed(weight)  # type: ignore[arg-type]
        gathered = _gathered(x, ends)  # type: ignore[arg-type]
        groups = changed(gathered[1], ends=ends) if gathered else Groups(ends)  # type: ignore[arg-type]
        x = gathered[0] if gathered else x
        return Match(node, x, weight, transposed=transposed, options=options, groups=groups)  # type: ignore[arg-type]

    def check(self, match: Match) -> Refusal | None:
        assert match.groups is not None
        if match.options:
            return Refusal("a grouped product with a bias of its own, which torch does not define yet")
        ends = value(match.groups.ends)
        if ends.dtype != torch.int32 or ends.dim() != 1:
            return Refusal("offsets are %s of %d dimensions, expected int32 of one", str(ends.dtype), ends.dim())
        return super().check(match)

    def check_slots(self, match: Match, slots: Slots) -> Refusal | None:
        scopes = [one.granularity for one in (slots.input, slots.grad_output)]
        if any(scope.blocked and not scope.one_row for scope in scopes):
            return Refusal("blocks of several rows, which may belong to several experts, share a scale")
        device = value(match.weight).device
        if device.type == "cuda" and not slots.fprop.microscaled and not grouped.has_kernel(device, slots.fprop):
            return Refusal("no grouped FP8 GEMM on %s", targets.of(device).name)
        _, n, k = match.sizes
        if device.type == "cuda" and (n % ALIGNMENT or k % ALIGNMENT):
            return Refusal("N=%d, K=%d, of which the grouped GEMM wants multiples of %d", n, k, ALIGNMENT)
        return None

    def emulated(self, match: Match, slots: Slots) -> Refusal | None:
        why = Rule.emulated(self, match, slots)
        if why is not None or not slots.fprop.microscaled:
            return why
        return Refusal(
            "no kernel for experts with scales of %s on %s yet: exact values, multiplied in bfloat16, no faster than"
            " high precision",
            *(", ".join(sorted({slots.input.scope, slots.weight.scope})), targets.of(value(match.weight).device).name),
        )

    def rewrite(self, match: Match, emit: Emit) -> None:
        with match.node.graph.inserting_before(match.node):
            [new] = emit([match], rows_of(match), [weight_of(match)])
            replace(match.node, new)


class ManyBatched(Batched):
    """``torch.bmm(x, p)`` and ``x @ p`` with a (B, K, N) parameter of so many matrices that a grouped product computes
    them: equal groups."""

    pattern: ClassVar[str] = "grouped_linear"

    def match(self, node: fx.Node) -> Match | None:
        match = super().match(node)
        if match is None or not isinstance(value(match.weight).shape[0], int):
            return None
        return changed(match, groups=Groups(match.x)) if value(match.weight).shape[0] > self.most else None

    def check(self, match: Match) -> Refusal | None:
        return Rule.check(self, match)

    check_slots, emulated = Grouped.check_slots, Grouped.emulated

    def rewrite(self, match: Match, emit: Emit) -> None:
        graph, node = match.node.graph, match.node
        batch, rows, _ = value(match.x).shape
        with graph.inserting_before(node):
            x = graph.call_function(aten.reshape.default, (match.x, [-1, value(match.x).shape[2]]))
            size = graph.call_function(aten.sym_size.int, (match.x, 1)) if not isinstance(rows, int) else rows
            count = graph.call_function(ops.equal_groups, (match.x, batch, size))
            made = changed(match, groups=Groups(count))
            [new] = emit([made], x, [weight_of(match)])
            shape: list[Any] = [batch, -1, match.sizes[1]]
            replace(node, graph.call_function(aten.reshape.default, (new, shape)))


def rows_of(match: Match) -> fx.Node:
    """What the layer reads: x, without what belongs to no expert."""
    assert match.groups is not None
    if match.groups.rows is not None:
        return match.x
    return match.x.graph.call_function(ops.mask_rows, (match.x, match.groups.ends))


def weight_of(match: Match) -> fx.Node:  # (E, N, K)
    if not match.transposed:
        return match.weight
    return match.node.graph.call_function(aten.transpose.int, (match.weight, 1, 2))


def _untransposed(weight: fx.Node) -> tuple[fx.Node, bool]:
    """Experts' weights (E, K, N): the parameter (E, N, K) that they are the transpose of, or they themselves."""
    if name(weight) in ("transpose", "swapaxes", "swapdims") and len(weight.args) == 3:
        dims = {dim % 3 for dim in weight.args[1:] if isinstance(dim, int)}
        if dims == {1, 2}:
            return weight.args[0], False  # type: ignore[return-value]
    if name(weight) in ("mT", "getattr") and (len(weight.args) == 1 or weight.args[1] == "mT"):
        return weight.args[0], False  # type: ignore[return-value]
    return weight, True


def _gathered(x: fx.Node, ends: fx.Node) -> tuple[fx.Node, Groups] | None:
    """``t[order // each]``, where `order` sorts `each` choices of every row of t: t and what is known of its rows."""
    if name(x) not in ("getitem", "index_select") or not x.args or not is_tensor(x.args[0]):
        return None
    table, *rest = x.args
    rows = rest[-1]
    if isinstance(rows, tuple) and len(rows) == 1:
        [rows] = rows
    if (
        not (is_tensor(rows) and isinstance(table, fx.Node))
        or value(rows).dim() != 1  # type: ignore[arg-type]
        or value(table).dim() != 2
        or (name(x) == "index_select" and rest[0] != 0)
    ):
        return None
    assert isinstance(rows, fx.Node)
    if name(rows) not in _DIVISIONS or len(rows.args) != 2 or rows.kwargs.get("rounding_mode", "floor") != "floor":
        return None
    order, each = rows.args
    if not (isinstance(order, fx.Node) and is_tensor(order) and isinstance(each, int) and is_order(order)):
        return None
    if not statically_known_true(value(table).shape[0] * each == value(order).shape[0]):
        return None
    changes = [user for user in x.users if name(user).endswith("_") and user.args[:1] == (x,)]
    if not all(_empties_tail(change, order, ends) for change in changes):
        return None
    return table, Groups(x, rows, order, each)


def _empties_tail(change: fx.Node, order: fx.Node, ends: fx.Node) -> bool:
    """Whether a change in place writes zeros into the rows that belong to no expert, which are never read:
    ``x.masked_fill_(ids >= E, 0)``, the ids being those that `order` sorts and `ends` counts."""
    if name(change) != "masked_fill_" or len(change.args) != 3 or change.args[2] != 0 or change.kwargs:
        return False
    mask: Any = change.args[1]
    while isinstance(mask, fx.Node) and name(mask) in ("unsqueeze", "view", "reshape"):
        mask = mask.args[0]
    if not isinstance(mask, fx.Node) or name(mask) != "ge" or mask.args[1:] != (value(ends).shape[0],):
        return False
    ids = mask.args[0]
    sort = order.args[0] if order.target is operator.getitem else None
    sorts = isinstance(ids, fx.Node) and ids.target is operator.getitem and ids.args == (sort, 0)
    return sorts and _counts(ends, ids, value(ends).shape[0])  # type: ignore[arg-type]


def _counts(ends: fx.Node, ids: fx.Node, experts: int) -> bool:
    """Whether `ends` are the sums of how often each id of an expert occurs."""
    node: Any = ends
    for called in ("cumsum", "histc"):
        while isinstance(node, fx.Node) and name(node) in _CASTS:
            node = node.args[0]
        if not isinstance(node, fx.Node) or name(node) != called:
            return False
        if called == "histc":
            given = dict(zip(("bins", "min", "max"), node.args[1:], strict=False)) | node.kwargs
            if given != {"bins": experts, "min": 0, "max": experts - 1}:
                return False
        node = node.args[0]
    while isinstance(node, fx.Node) and name(node) in _CASTS:
        node = node.args[0]
    return node is ids


def is_order(node: fx.Node) -> bool:
    """Whether it is the permutation that sorts something."""
    if name(node) == "argsort":
        return True
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and name(source) == "sort" and node.args[1:] == (1,)
