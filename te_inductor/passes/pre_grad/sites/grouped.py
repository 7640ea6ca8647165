"""The forms in which models write the linear layers of experts: grouped products of sorted rows with a 3D parameter, or
with what is computed from parameters, as adapters are added; and batched products of more matrices than are worth a
GEMM each. Products with matrices that are picked from a stored weight of experts are there for the report.

Where the rows are gathered from a tensor that has each once, as behind a router that picks several experts a token, the
gather is part of the layer: each row is cast once and gathered in low precision, and the gradient's rows are added up
by a gather too, in fp32."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import fx

from te_inductor import ops, targets
from te_inductor.diagnostics import Refusal
from te_inductor.kernels import grouped_mm
from te_inductor.kernels.problem import Problem, Program, Sizes
from te_inductor.kernels.select import select
from te_inductor.ops.stored_experts import PickedExperts
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.module_path import held_for_one_call
from te_inductor.passes.graph.operators import Call
from te_inductor.passes.graph.owners import from_parameter
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.walks import reached
from te_inductor.passes.graph.writes import Writes, chain, last_read
from te_inductor.passes.pre_grad.sites import experts_bias, gathers, requirements
from te_inductor.passes.pre_grad.sites.gathers import uncast
from te_inductor.passes.pre_grad.sites.groups import Groups, Original
from te_inductor.passes.pre_grad.sites.linear import Batched
from te_inductor.passes.pre_grad.sites.part import Unfit
from te_inductor.passes.pre_grad.sites.rule import Emit, Match, Rule, replace_layer
from te_inductor.recipes import Slots
from te_inductor.recipes.formats import ALIGNMENT

OWN_BIAS = Refusal("a grouped product with a bias of its own, which torch does not define yet")
aten = torch.ops.aten


class Grouped(Rule):
    """``F.grouped_mm(x, w, offs=ends)``: rows of x, sorted by expert, each times its expert's matrix."""

    pattern: ClassVar[str] = "grouped_linear"
    joins: ClassVar[bool] = True

    def match(self, node: fx.Node) -> Match | None:
        given = operators.grouped_operands(node)
        x, weight, ends = (given.get(key) for key in ("x", "weight", "offs"))
        if not (is_tensor(x) and is_tensor(weight) and is_tensor(ends) and is_tensor(node)):
            return None
        if from_parameter(x) or (value(x).dim(), value(weight).dim()) != (2, 3):  # type: ignore[arg-type]
            return None  # of these two, what has a matrix for each group is the weight, whatever it was computed from
        weight, transposed = _untransposed(weight)  # type: ignore[arg-type]
        unfit = () if given.get("bias") is None else (Unfit(OWN_BIAS),)
        literal = Match(node, x, weight, transposed=transposed, parts=(Groups(ends), *unfit))  # type: ignore[arg-type]
        # Casts are the layer's own business: what the model holds is cast to low precision.
        weight, transposed = _untransposed(uncast(weight)) if transposed else (uncast(weight), False)
        x, groups = gathers.source_of(x, ends)  # type: ignore[arg-type]
        bias, adder = experts_bias.added(node, ends, value(weight).shape[0]) or (None, None)  # type: ignore[arg-type]
        parts = (groups, *unfit, Original(literal, adder))
        return Match(node, x, weight, bias, transposed, parts=parts)

    def check_form(self, match: Match) -> Refusal | None:
        assert match.groups is not None
        ends = value(match.groups.ends)
        if ends.dtype != torch.int32 or ends.dim() != 1:
            return Refusal("offsets are %s of %d dimensions, expected int32 of one", str(ends.dtype), ends.dim())
        return _computed_for_one_call(match.weight)

    def check_slots(self, match: Match, slots: Slots) -> Refusal | None:
        scopes = [one.granularity for one in (slots.input, slots.grad_output)]
        if any(scope.blocked and not scope.one_row for scope in scopes):
            return Refusal("blocks of several rows, which may belong to several experts, share a scale")
        target = targets.of(value(match.weight).device)
        if target.is_gpu and not slots.fprop.microscaled and not grouped_mm.runs(target, slots.fprop):
            return Refusal("no grouped FP8 GEMM on %s", target.name)
        _, n, k = match.sizes
        if target.is_gpu and (n % ALIGNMENT or k % ALIGNMENT):
            return Refusal("N=%d, K=%d, of which the grouped GEMM wants multiples of %d", n, k, ALIGNMENT)
        blocked = slots.fprop.blocked and not slots.fprop.microscaled
        return requirements.block_sizes(slots, n, k) if blocked else None

    def emulated(self, match: Match, slots: Slots, program: Program) -> Refusal | None:
        device, dtypes = value(match.weight).device, (value(match.node).dtype, value(match.weight).dtype)
        target, sizes = targets.of(device), Sizes(*match.sizes, match.experts)
        problems = (
            Problem(target, sizes, gemm, dtypes[0], program=program, held=dtypes[1])
            for gemm in (slots.fprop, slots.dgrad, slots.wgrad)
            if not gemm.is_high
        )
        if all(select(problem).family is grouped_mm.LIBRARY for problem in problems):
            return None
        why = Rule.emulated(self, match, slots, program)
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
        adder = adder_of(match)
        if adder is not None:
            experts_bias.check_ids(adder)
            adder.replace_all_uses_with(match.node)
            match.node.graph.erase_node(adder)
        super().rewrite(match, emit)


def undisturbed(match: Match, writes: Writes, last: fx.Node | None = None) -> Match:
    """The layer, which reads what its operands were made of: or what the product itself reads, and without a bias, where
    anything is written in between. `last` reads the operands for the last time."""
    literal = literal_of(match)
    if literal is None:
        return match
    if _bias_is_written(match, writes):
        match = without_adder(match)
    if not _source_is_written(match, literal, writes, last or last_read(match.node)):
        return match
    assert literal.groups is not None
    return match.having(literal.groups, x=literal.x, weight=literal.weight, transposed=literal.transposed)


def literal_of(match: Match) -> Match | None:
    """The layer of what the product itself reads, where this one reads what that was made of."""
    original = match.part(Original)
    return None if original is None else original.literal


def adder_of(match: Match) -> fx.Node | None:
    original = match.part(Original)
    return None if original is None else original.adder


def without_adder(match: Match) -> Match:
    """The layer without a bias that another node adds."""
    original = match.part(Original)
    return match if original is None else match.having(replace(original, adder=None), bias=None)


def _source_is_written(match: Match, literal: Match, writes: Writes, last: fx.Node | None) -> bool:
    """Whether anything writes what the program reads earlier than the layer, or what stands between that and the
    product, before the layer has read it. What stands between them has to be known: an operand that is not computed
    from what the layer reads in its place counts as written."""
    groups = match.groups
    assert groups is not None
    stand_ins = (literal.x, match.x), (literal.weight, match.weight)
    if any(operand is not source and not chain(operand, source) for operand, source in stand_ins):
        return True
    sorts = [] if groups.order is None else [groups.order]
    made = [*sorts, *chain(literal.x, match.x, *sorts), *chain(literal.weight, match.weight)]
    read = [match.x, match.weight]
    read += [source for one in read if one in made for source in one.all_input_nodes]  # of an equal cast, made before
    emptied = {change: by for node in made for change, by in gathers.emptied(node, groups).items()}
    return bool(made) and (
        writes.behind(made, last, emptied.keys())
        or writes.between(read, min(made), last, emptied.keys())
        or any(writes.within(nodes, match.node) for nodes in emptied.values())
    )


def _bias_is_written(match: Match, writes: Writes) -> bool:
    """Whether anything writes a bias between the product and what adds it, or makes it that of another group."""
    groups, adder = match.groups, adder_of(match)
    if adder is None or match.bias is None or groups is None:
        return False
    counted, clamps = experts_bias.counted(adder, groups.ends, match.experts)
    around = match.node, adder
    return writes.within(counted, max(around), clamps) or writes.between([match.bias], min(around), max(around))


class ManyBatched(Batched):
    """``torch.bmm(x, p)`` and ``x @ p`` with a (B, K, N) parameter of so many matrices that a grouped product computes
    them: equal groups."""

    pattern: ClassVar[str] = "grouped_linear"

    def match(self, node: fx.Node) -> Match | None:
        match = super().match(node)
        if match is None or not isinstance(value(match.weight).shape[0], int):
            return None
        return match.having(Groups(match.x)) if value(match.weight).shape[0] > self.most else None

    check_form, check_slots, emulated = Rule.check_form, Grouped.check_slots, Grouped.emulated

    def rewrite(self, match: Match, emit: Emit) -> None:
        graph, node = match.node.graph, match.node
        # These are the weight's, whose sizes are no symbols.
        batch, k, n = value(match.weight).shape
        rows = value(match.x).shape[1]
        with graph.inserting_before(node):
            x = graph.call_function(aten.reshape.default, (match.x, [-1, k]))
            size = graph.call_function(aten.sym_size.int, (match.x, 1)) if not isinstance(rows, int) else rows
            count = graph.call_function(ops.equal_groups, (match.x, batch, size))
            [new] = emit([match.having(Groups(count))], x, [match.matrices()])
            replace_layer(match, graph.call_function(aten.reshape.default, (new, [batch, -1, n])))


def _untransposed(weight: fx.Node) -> tuple[fx.Node, bool]:
    """Experts' weights (E, K, N): the parameter (E, N, K) that they are the transpose of, or they themselves."""
    return (weight.args[0], False) if operators.swaps(weight) else (weight, True)  # type: ignore[return-value]


class Picked(Rule):
    """``torch.bmm(p[ids], x)``, also the other way round, with stored weights of experts: for the report, as the
    product finds its kernel by itself."""

    pattern: ClassVar[str] = "grouped_linear"

    def match(self, node: fx.Node) -> Match | None:
        call = Call.read(node)
        if call is None or call.name not in ("bmm", "matmul") or len(call.operands) != 2:
            return None
        first, second = call.operands.values()
        for picked, x in ((first, second), (second, first)):
            if is_tensor(picked) and isinstance(value(picked), PickedExperts) and is_tensor(x):
                break
        else:
            return None
        transposed = picked is second
        while operators.read(picked).name not in ("getitem", "index", "index_select"):
            transposed ^= bool(operators.swaps(picked))
            picked = picked.args[0]
        numbers = [one for one in picked.all_input_nodes if one is not picked.args[0]]
        if not from_parameter(picked.args[0]) or len(numbers) != 1:
            return None
        weight = picked.args[0]
        return Match(node, x, weight, transposed=transposed, parts=(Groups(numbers[0], numbered=True),))


def _computed_for_one_call(weight: fx.Node) -> Refusal | None:
    """Refuses a weight that is computed from plain attributes of a parametrization, which are no parameters and no
    buffers: so peft registers one with the factors of each call. Dynamo has compiled for the old one alone, compiles
    anew at each call, and after `recompile_limit` calls runs the code uncompiled."""
    made_of = reached([weight], lambda node: node.all_input_nodes)
    if not any(node.op == "placeholder" and held_for_one_call(node) for node in made_of):
        return None
    return Refusal(
        "the weight is computed from what a parametrization holds for one call, so that each call compiles anew; with"
        " peft's target_parameters call te_inductor.integrations.peft.register() first"
    )
