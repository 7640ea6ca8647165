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
from te_inductor.passes.pre_grad.decide import support
from te_inductor.passes.pre_grad.decide.support import is_tensor, value
from te_inductor.passes.pre_grad.match import experts_bias
from te_inductor.passes.pre_grad.match.linear import Batched, from_parameter
from te_inductor.passes.pre_grad.match.rule import Emit, Groups, Match, Rule, replace
from te_inductor.recipes import Slots
from te_inductor.runtime import grouped

GROUPED = frozenset(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"))
_DIVISIONS = frozenset(("floordiv", "floor_divide", "__floordiv__", "div", "divide"))
_CASTS = frozenset(("to", "type", "type_as", "float", "bfloat16", "half"))
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
        literal = Match(node, x, weight, transposed=transposed, options=options, groups=Groups(ends))  # type: ignore[arg-type]
        # Casts are the layer's own business: what the model holds is cast to low precision.
        weight, transposed = _untransposed(_uncast(weight)) if transposed else (_uncast(weight), False)
        x = _first_cast(_uncast(x, lossless=True))  # type: ignore[arg-type]
        gathered = _gathered(x)
        x, groups = (gathered[0], changed(gathered[1], ends=ends)) if gathered else (x, literal.groups)
        bias, adder = experts_bias.added(node, ends, value(weight).shape[0]) or (None, None)  # type: ignore[arg-type]
        made = changed(literal, x=x, weight=weight, transposed=transposed, groups=groups, bias=bias, adder=adder)
        return changed(made, literal=literal)

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
        blocked = slots.fprop.blocked and not slots.fprop.microscaled
        return support.block_sizes(slots, *match.sizes[1:]) if blocked else None

    def rewrite(self, match: Match, emit: Emit) -> None:
        with match.node.graph.inserting_before(match.node):
            [new] = emit([match], rows_of(match), [weight_of(match)])
        if match.adder is not None:
            match.adder.replace_all_uses_with(new)
            match.node.graph.erase_node(match.adder)
        replace(match.node, new)


def reads(match: Match) -> list[fx.Node]:
    """What the layer reads later than the program did, if it is not the literal one."""
    groups = match.groups
    assert groups is not None
    passed: list[fx.Node] = []
    if match.literal:
        passed = [match.literal.x, match.literal.weight]
        passed += match.x.all_input_nodes if match.x is not match.literal.x else []  # another cast than the program's
    more = (groups.rows, groups.order, *(experts_bias.reads(match.adder) if match.adder else []))
    return [match.x, match.weight, groups.ends, *passed, *(one for one in more if one is not None)]


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

    check_slots = Grouped.check_slots

    def rewrite(self, match: Match, emit: Emit) -> None:
        graph, node = match.node.graph, match.node
        # Of the weight, whose sizes are no symbols.
        batch, k, n = value(match.weight).shape
        rows = value(match.x).shape[1]
        with graph.inserting_before(node):
            x = graph.call_function(aten.reshape.default, (match.x, [-1, k]))
            size = graph.call_function(aten.sym_size.int, (match.x, 1)) if not isinstance(rows, int) else rows
            count = graph.call_function(ops.equal_groups, (match.x, batch, size))
            made = changed(match, groups=Groups(count))
            [new] = emit([made], x, [weight_of(match)])
            replace(node, graph.call_function(aten.reshape.default, (new, [batch, -1, n])))


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
    if name(weight) == "permute" and [dim % 3 for dim in _ints(weight.args[1:])] == [0, 2, 1]:
        return weight.args[0], False  # type: ignore[return-value]
    if name(weight) in ("mT", "getattr") and (len(weight.args) == 1 or weight.args[1] == "mT"):
        return weight.args[0], False  # type: ignore[return-value]
    return weight, True


def _ints(args: tuple[Any, ...]) -> list[int]:
    """Dimensions, one by one or as a tuple."""
    dims = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    return [dim for dim in dims if isinstance(dim, int)]


def _uncast(node: fx.Node, lossless: bool = False) -> fx.Node:
    """What was cast from one dtype that layers can have to another; `lossless`: to one that holds all its values."""
    while name(node) in _CASTS and node.args and is_tensor(node.args[0]) and is_tensor(node):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        before, after = value(source), value(node)
        if not {before.dtype, after.dtype} <= set(support.DTYPES) or before.device != after.device:
            break
        if lossless and torch.promote_types(before.dtype, after.dtype) != after.dtype:
            break
        node = source
    return node


def _first_cast(node: fx.Node) -> fx.Node:
    """Of equal casts of one tensor the first, so that layers that cast their input each have the same one."""
    if name(node) not in _CASTS or not node.args or not isinstance(node.args[0], fx.Node):
        return node
    alike = (other for other in node.args[0].users if name(other) in _CASTS and other.graph is node.graph)
    same = [
        other for other in alike if (other.target, other.args, other.kwargs) == (node.target, node.args, node.kwargs)
    ]
    return min(same)


def _gathered(x: fx.Node) -> tuple[fx.Node, Groups] | None:
    """``t[order // each]``, where `order` sorts `each` choices of every row of t: t and what is known of its rows."""
    table, rows = _table_and_rows(x)
    if not (is_tensor(table) and is_tensor(rows) and value(table).dim() == 2 and value(rows).dim() == 1):  # type: ignore[arg-type]
        return None
    assert isinstance(table, fx.Node) and isinstance(rows, fx.Node)
    if name(rows) not in _DIVISIONS or len(rows.args) != 2 or rows.kwargs.get("rounding_mode", "floor") != "floor":
        return None
    order, each = rows.args
    if not (isinstance(order, fx.Node) and is_tensor(order) and isinstance(each, int) and _is_order(order)):
        return None
    if not statically_known_true(value(table).shape[0] * each == value(order).shape[0]):
        return None
    return table, Groups(x, rows, order, each)


def _table_and_rows(x: fx.Node) -> tuple[Any, Any]:
    """Of ``table[rows]``, in each way to write it."""
    called, given = name(x), dict(zip(("input", "dim", "index"), x.args, strict=False)) | x.kwargs
    if called == "getitem" and len(x.args) == 2:
        table, rows = x.args
        return table, rows[0] if isinstance(rows, tuple) and len(rows) == 1 else rows
    if called == "index_select" and given.get("dim") == 0:
        return given.get("input"), given.get("index")
    if called == "gather" and given.get("dim") == 0:
        return given.get("input"), _expanded(given.get("index"), x)
    return None, None


def _expanded(index: Any, x: fx.Node) -> Any:
    """The rows of a `gather` that takes whole rows: of ``rows.reshape(-1, 1).expand(-1, columns)``."""
    if not (is_tensor(index) and name(index) in ("expand", "expand_as", "broadcast_to") and index.args):
        return None
    column = index.args[0]
    if not (is_tensor(column) and name(column) in ("reshape", "view", "unsqueeze", "getitem")):
        return None
    rows = column.args[0]
    whole = value(x.args[0] if x.args else x.kwargs["input"]).shape[1]  # type: ignore[arg-type, index]
    if not (is_tensor(rows) and value(rows).dim() == 1 and value(column).dim() == value(index).dim() == 2):
        return None
    same = statically_known_true(value(column).shape[0] == value(rows).shape[0]) and value(column).shape[1] == 1
    return rows if same and statically_known_true(value(index).shape[1] == whole) else None


def _is_order(node: fx.Node) -> bool:
    """Whether it is the permutation that sorts something."""
    if name(node) == "argsort":
        return True
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and name(source) == "sort" and node.args[1] == 1
