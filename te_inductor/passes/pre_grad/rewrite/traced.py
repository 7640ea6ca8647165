"""The rewrites of graphs that Dynamo did not make: of exported programs, and of traced graphs of forward and
backward."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from te_inductor import ops
from te_inductor.diagnostics import Refusal
from te_inductor.ops import LayerSpec
from te_inductor.ops.layers.dense import DenseLayers
from te_inductor.ops.layers.experts import ExpertLayers
from te_inductor.passes.graph.casts import share
from te_inductor.passes.graph.operators import swaps
from te_inductor.passes.graph.tracing import take_place, traced_into
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.match.gradients import matrix
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites.grouped import Grouped
from te_inductor.passes.pre_grad.sites.linear import Addmm, ParameterProduct
from te_inductor.passes.pre_grad.sites.part import Backward, Gradients
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import Slots
from te_inductor.runtime.eager import grouped

aten = torch.ops.aten

# What torch.export calls the operators by which it keeps a region: what the region is in a program.
_REGIONS = {"wrap_with_autocast": "torch.autocast", "wrap_with_set_grad_enabled": "torch.no_grad"}


def refuse_what_has_no_place(plan: Plan) -> None:
    """Sites whose layer such a graph cannot hold."""
    for site in _running(plan):
        backward = site.match.part(Backward)
        site.refusal = None if backward is None else backward.unplaced
        if site.delayed:
            site.refusal = Refusal(
                "delayed scaling keeps scales from step to step, for which this graph has no inputs; recipe 'current'"
                " finds them at each call"
            )
        elif site.match.node.graph is not plan.gm.graph:
            site.refusal = _in_a_body(plan, site.match.node.graph)


def refuse_what_is_in_no_program(plan: Plan) -> None:
    """Sites that a program which leaves this process cannot hold, as it has no kernel for some experts."""
    for site in _running(plan):
        refusals = (part.refuse_in_program(site.match, site.slots) for part in site.match.parts)  # type: ignore[arg-type]
        site.refusal = next(filter(None, refusals), None)


def _running(plan: Plan) -> list[Candidate]:
    """The sites that would run in low precision."""
    return [site for site in plan.candidates if site.refusal is None and site.slots is not None]


def _in_a_body(plan: Plan, graph: fx.Graph) -> Refusal:
    """Why a site in a graph inside the graph stays: whose body it is, and what helps."""
    bodies = {one.graph: one for one in plan.graph_modules()}
    for module in plan.graph_modules():
        for node in module.graph.find_nodes(op="get_attr"):
            if getattr(module, str(node.target), None) is bodies[graph]:
                callers = {getattr(call.target, "__name__", str(call.target)) for call in node.users}
                if callers & _REGIONS.keys():
                    return Refusal(
                        "inside %s, of which torch.export makes a body of its own; program.run_decompositions() before"
                        " lowering writes it out",
                        _REGIONS[callers.pop()],
                    )
    return Refusal("inside a body of control flow")


def refuse_batches(plan: Plan) -> None:
    """Products whose backward is not looked for."""
    for site in _running(plan):
        if not isinstance(site.rule, ParameterProduct | Addmm | Grouped):
            site.refusal = Refusal("not mm, addmm or a grouped product, which are read in a graph with a backward")


def write_slots(plan: Plan) -> None:
    """Have each layer's constants stand in the graph as text, which a saved program can hold, and give every node of ours
    its value."""
    for node in plan.gm.graph.find_nodes(op="call_function", target=ops.layers):
        *operands, spec, dtype = node.args
        more = dict(node.kwargs)
        ends = [more.pop("ends")] if "ends" in more else []
        node.target = ops.exported_grouped_linears if ends else ops.exported_linears
        node.args, node.kwargs = (*operands, *ends, spec.slots.to_text(), dtype), more
    for node in reversed(plan.gm.graph.nodes):
        # Such as the transpose of a copy in autocast's dtype, of which none is read.
        if _is_new(node) and not node.users:
            plan.gm.graph.erase_node(node)
    values = (node.meta.get("val") for node in plan.gm.graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), nullcontext())
    for node in plan.gm.graph.nodes:
        if _is_new(node):
            take_place(node, next(iter(node.users)).meta)
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda one: one.meta["val"])
            with enable_python_dispatcher(), mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)


def _is_new(node: fx.Node) -> bool:
    """Whether a rewrite has put it into the graph. An assertion of the program's has no value either."""
    return node.op == "call_function" and "val" not in node.meta and not str(node.target).startswith("aten._assert")


def rewrite_triples(plan: Plan) -> None:
    """Write each layer's forward and backward in the places of their products."""
    so_far = _SoFar()
    for site in plan.candidates:
        if site.low and site.slots is not None:
            _Layer(site.match, site.slots, so_far).write()
    share(plan.gm.graph)  # layers of one input cast it once
    plan.gm.graph.eliminate_dead_code()
    plan.gm.recompile()


@dataclass
class _SoFar:
    """What the layers before this one have left."""

    moved: dict[fx.Node, fx.Node] = field(default_factory=dict)  # products that are gone: what stands for each
    masked: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)  # experts' rows without those of none


class _Layer:
    """One layer, of which both directions are traced as its operation computes them."""

    def __init__(self, match: Match, slots: Slots, so_far: _SoFar) -> None:
        self.match, self.graph, self.backward, self.so_far = match, match.node.graph, match.gradients, so_far
        kind = DenseLayers if match.groups is None else ExpertLayers
        self.operation = kind(LayerSpec(slots), value(match.node).dtype)
        self.weight_at = 0  # its place among the operation's inputs
        self.ctx = SimpleNamespace()
        self.saved: list[fx.Node | None] = []

    def write(self) -> None:
        gradients, node = self.backward, self.match.node
        with self.graph.inserting_before(node):
            operands, needs = self._operands()
            given = [place for place, one in enumerate(operands) if one is not None]

            def forward(*tensors: Tensor) -> tuple[Tensor | None, ...]:
                inputs = _at(given, tensors, len(operands))
                saved: list[Tensor | None] = []
                self.ctx.save_for_backward = lambda *tensors: saved.extend(tensors)
                [y], found = self.operation.compute(needs, *inputs)
                self.operation.setup_context(self.ctx, tuple(inputs), found)
                return y, *saved

            given_operands: Any = [operands[place] for place in given]
            y, *self.saved = traced_into(self.graph, forward, given_operands, node)
            self._replace(node, y)
        if gradients is not None:
            self._write_backward(gradients)

    def _operands(self) -> tuple[list[fx.Node | None], tuple[bool, ...]]:
        """The operation's inputs, and which of them want a gradient. That of a bias is a sum, and stays as it is."""
        match, gradients = self.match, self.backward
        x, weight = self._now(match.x), self._weight()
        bias = [] if match.bias is None else [self._now(match.bias)]
        between = [None]  # the step's token
        if match.groups is not None:
            ends, rows = match.groups.ends, match.groups.rows
            x = self._masked(x, ends) if rows is None else x
            between += [ends, rows, None]  # type: ignore[list-item]
        self.weight_at = 1 + len(between)
        needs = (False, False) if gradients is None else (gradients.dgrad is not None, gradients.wgrad is not None)
        return [x, *between, weight, *bias], (needs[0], *(False for _ in between), needs[1], *(False for _ in bias))

    def _masked(self, x: fx.Node, ends: fx.Node) -> fx.Node:
        """Masks rows once for all layers that read them."""
        if (x, ends) not in self.so_far.masked:
            [masked] = traced_into(self.graph, lambda *rows: [grouped.mask_rows(*rows)], [x, ends], self.match.node)
            self.so_far.masked[x, ends] = masked
        return self.so_far.masked[x, ends]

    def _weight(self) -> fx.Node:  # (N, K), or (E, N, K)
        weight = self.match.weight
        if not self.match.transposed:
            return weight
        found = matrix(weight)
        if found.transposed and value(found.root).dim() == value(weight).dim():
            return found.root
        return self._transposed(weight, self.match.node)

    def _write_backward(self, gradients: Gradients) -> None:
        x_dtype, w_dtype = (
            value(self.match.x if node is None else node).dtype for node in (gradients.dgrad, gradients.wgrad)
        )
        kept = [place for place, node in enumerate(self.saved) if node is not None]
        is_turned_back = gradients.wgrad is not None and all(map(swaps, gradients.wgrad.users))

        def backward(dy: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
            self.ctx.saved_tensors = _at(kept, saved, len(self.saved))
            self.ctx.dtypes, self.ctx.given = (x_dtype, None), replace(self.ctx.given, weight_dtype=w_dtype)
            found = self.operation.backward(self.ctx, dy)
            dx, dw = found[0], found[self.weight_at]
            if dw is not None:
                dw = dw.mT if gradients.wgrad_transposed else dw
                dw = dw if is_turned_back else dw.contiguous()  # as what is read by a view has to be
            return dx, dw

        first = min(gradients.nodes)
        with self.graph.inserting_before(first):
            dy = self._now(gradients.dy)
            dy = self._transposed(dy, first) if gradients.dy_transposed else dy
            saved = [node for node in self.saved if node is not None]
            made = traced_into(self.graph, backward, [dy, *saved], first)
        for node, new in zip((gradients.dgrad, gradients.wgrad), made, strict=True):
            if node is not None:
                self._replace(node, new)

    def _now(self, node: fx.Node) -> fx.Node:
        return self.so_far.moved.get(node, node)

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
        self.so_far.moved[node] = new

    def _transposed(self, operand: fx.Node, place: fx.Node) -> fx.Node:
        made = self.graph.call_function(aten.transpose.int, (operand, -2, -1))
        take_place(made, place.meta)
        made.meta["val"] = made.meta["example_value"] = value(operand).mT
        return made


def _at(places: Sequence[int], tensors: Sequence[Tensor], count: int) -> list[Any]:
    """A list of so many, with tensors at some places and None at the others."""
    found: list[Any] = [None] * count
    for place, tensor in zip(places, tensors, strict=True):
        found[place] = tensor
    return found
