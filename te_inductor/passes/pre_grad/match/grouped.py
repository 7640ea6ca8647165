"""The forms in which models write the linear layers of experts: grouped products of sorted rows with a 3D parameter, or
with what is computed from parameters, as adapters are added; and batched products of more matrices than are worth a
GEMM each.

Where the rows are gathered from a tensor that has each once, as behind a router that picks several experts a token, the
gather is part of the layer: each row is cast once and gathered in low precision, and the gradient's rows are added up
by a gather too, in fp32."""

from collections.abc import Iterator
from dataclasses import replace as changed
from typing import Any, ClassVar

import torch
from torch import fx

from te_inductor import ops, targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.aliases import may_share, memory, name, origin, written_by
from te_inductor.passes.pre_grad.decide import support
from te_inductor.passes.pre_grad.decide.support import is_tensor, value
from te_inductor.passes.pre_grad.match import experts_bias, gathers, parametrized
from te_inductor.passes.pre_grad.match.gathers import uncast
from te_inductor.passes.pre_grad.match.linear import Batched, from_parameter
from te_inductor.passes.pre_grad.match.rule import Emit, Groups, Match, Rule, replace_layer
from te_inductor.recipes import Slots
from te_inductor.recipes.formats import ALIGNMENT
from te_inductor.runtime import grouped, grouped_library

GROUPED = frozenset(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"))
aten = torch.ops.aten


class Grouped(Rule):
    """``F.grouped_mm(x, w, offs=ends)``: rows of x, sorted by expert, each times its expert's matrix."""

    pattern: ClassVar[str] = "grouped_linear"
    joins: ClassVar[bool] = True

    def match(self, node: fx.Node) -> Match | None:
        given = operands_of(node)
        x, weight, ends = (given.get(key) for key in ("x", "weight", "offs"))
        if not (is_tensor(x) and is_tensor(weight) and is_tensor(ends) and is_tensor(node)):
            return None
        if from_parameter(x) or (value(x).dim(), value(weight).dim()) != (2, 3):  # type: ignore[arg-type]
            return None  # of these two, what has a matrix for each group is the weight, whatever it was computed from
        options = tuple((key, one) for key, one in given.items() if key == "bias" and one is not None)
        weight, transposed = _untransposed(weight)  # type: ignore[arg-type]
        literal = Match(node, x, weight, transposed=transposed, options=options, groups=Groups(ends))  # type: ignore[arg-type]
        # Casts are the layer's own business: what the model holds is cast to low precision.
        weight, transposed = _untransposed(uncast(weight)) if transposed else (uncast(weight), False)
        x, groups = gathers.source_of(x, ends)  # type: ignore[arg-type]
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
        return parametrized.refusal(match.weight) or super().check(match)

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
        blocked = slots.fprop.blocked and not slots.fprop.microscaled
        return support.block_sizes(slots, n, k) if blocked else None

    def emulated(self, match: Match, slots: Slots, leaves: bool) -> Refusal | None:
        device, dtypes = value(match.weight).device, (value(match.node).dtype, value(match.weight).dtype)
        gemms = (slots.fprop, slots.dgrad, slots.wgrad)
        if all(grouped_library.multiplies(device, gemm, *dtypes, leaves=leaves) for gemm in gemms):
            return None
        why = Rule.emulated(self, match, slots, leaves)
        if why is not None or not slots.fprop.microscaled:
            return why
        return Refusal(
            "no kernel for experts with %s, scales of %s, %s activations and %s weights on %s: exact values, multiplied in"
            " bfloat16, no faster than high precision",
            *(", ".join(sorted({*slots.fprop.elements, *slots.wgrad.elements})),
              ", ".join(sorted({slots.input.scope, slots.weight.scope})),
              *(str(dtype).removeprefix("torch.") for dtype in dtypes), targets.of(device).name),
        )  # fmt: skip

    def rewrite(self, match: Match, emit: Emit) -> None:
        with match.node.graph.inserting_before(match.node):
            [new] = emit([match], rows_of(match), [weight_of(match)])
        if match.adder is not None:
            match.adder.replace_all_uses_with(new)
            match.node.graph.erase_node(match.adder)
        replace_layer(match, new)


def operands_of(node: fx.Node) -> dict[str, Any]:
    """Those of a grouped product, by the names `x`, `weight`, `offs`, `bias` and `out_dtype`; nothing of another node."""
    if node.op != "call_function" or name(node) not in GROUPED:
        return {}
    given = dict(zip(("x", "weight", "offs", "bias", "out_dtype"), node.args, strict=False))
    named = {"input": "x", "mat_a": "x", "self": "x", "mat_b": "weight", "mat2": "weight"}
    return given | {named.get(key, key): one for key, one in node.kwargs.items()}


def reads_early(match: Match) -> list[fx.Node]:
    """What the program reads earlier than the layer would: nothing may write it in between."""
    assert match.groups is not None and match.literal is not None
    found = [match.groups.rows, match.groups.order, match.bias]
    passed = [(match.weight, match.literal.weight)]
    if match.groups.rows is None:
        passed.append((match.x, match.literal.x))
    else:  # what writes the rows behind the gather, the match has seen
        found.append(match.x)
    for source, cast in passed:
        if not memory(source) & memory(cast):
            found += [source, cast, *source.all_input_nodes]
    return [one for one in found if one is not None]


def disturbed(match: Match, last: fx.Node | None = None) -> bool:
    """Whether anything writes what the program reads earlier than the layer would before the layer has read it, the last
    time in place of `last`; in a graph of ATen ops, whose schemas say what shares memory."""
    assert match.groups is not None and match.literal is not None
    early = [one for one in (match.groups.rows, match.groups.order) if one is not None]
    early += [*_passed(match.literal.x, match.x), *_passed(match.literal.weight, match.weight)]
    early += [] if match.adder is None else [match.adder.args[1]]  # type: ignore[list-item]
    read = {origin(one) for node in early for one in (node, *node.all_input_nodes)}
    last = last or (match.node if match.adder is None else max(match.node, match.adder))
    node = min(early, default=last)
    while node is not last:
        if any(may_share(origin(one), other) for one in written_by(node) for other in read):
            return True
        node = node.next
    return False


def _passed(node: fx.Node, source: fx.Node) -> Iterator[fx.Node]:
    """What stands between a source and what is made of it, the last one first. The source may be a cast that equals one
    of these."""
    while node is not source:
        yield node
        if (node.target, node.args, node.kwargs) == (source.target, source.args, source.kwargs):
            yield source
            break
        node = node.args[0]  # type: ignore[assignment]


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
        # Of the weight, whose sizes are no symbols.
        batch, k, n = value(match.weight).shape
        rows = value(match.x).shape[1]
        with graph.inserting_before(node):
            x = graph.call_function(aten.reshape.default, (match.x, [-1, k]))
            size = graph.call_function(aten.sym_size.int, (match.x, 1)) if not isinstance(rows, int) else rows
            count = graph.call_function(ops.equal_groups, (match.x, batch, size))
            made = changed(match, groups=Groups(count))
            [new] = emit([made], x, [weight_of(match)])
            replace_layer(match, graph.call_function(aten.reshape.default, (new, [batch, -1, n])))


def rows_of(match: Match) -> fx.Node:
    """What the layer reads: x, without what belongs to no expert."""
    assert match.groups is not None
    if match.groups.rows is not None or match.arrives is not None:  # which masks what came
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
    if name(weight) == "permute" and [dim % 3 for dim in ints(weight.args[1:])] == [0, 2, 1]:
        return weight.args[0], False  # type: ignore[return-value]
    if name(weight) in ("mT", "getattr") and (len(weight.args) == 1 or weight.args[1] == "mT"):
        return weight.args[0], False  # type: ignore[return-value]
    return weight, True


def ints(args: tuple[Any, ...]) -> list[int]:
    """Dimensions, one by one or as a tuple."""
    dims = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    return [dim for dim in dims if isinstance(dim, int)]
