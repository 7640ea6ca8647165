"""The passes that put low-precision layers in the place of the sites that were found to run."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from te_inductor import ops
from te_inductor.ops import LayerSpec
from te_inductor.ops.stored_weight import register_kernels
from te_inductor.passes.graph import regions
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.decide import merging, transforms, weight_grads
from te_inductor.passes.pre_grad.decide.between_ranks import note_forms
from te_inductor.passes.pre_grad.decide.delayed import GroupsOf, guard_on_moves
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.rewrite import between_ranks, delayed, selective
from te_inductor.passes.pre_grad.rewrite.extras import check_order, keep_copies, take_gradients
from te_inductor.passes.pre_grad.sites.rule import Match, replace_layer
from te_inductor.recipes import DelayedScaling, Recipe, Slots
from te_inductor.recipes.weight_only import fused
from te_inductor.runtime.state.state_inputs import StateInputs
from te_inductor.templates.cutlass import build


def guard_extras(plan: Plan) -> None:
    """Have Dynamo compile anew where what `check_extras` went by has changed."""
    matches = (site.match for site in plan.candidates if site.low)
    weight_grads.guard(matches, Bodies(plan.gm), plan.inputs, plan.options)


def start_builds(plan: Plan) -> None:
    """Have CUTLASS's kernels built while the graph is compiled."""
    build.start(plan.outcome.libraries)


def rewrite_sites(plan: Plan) -> None:
    """Replace what passed by `te_inductor.layers`; last first, as a match's input may be the node of an earlier
    match."""
    sites = [candidate for candidate in plan.candidates if candidate.low]
    layers = {candidate.match.node for candidate in plan.candidates if candidate.replaced}
    for node, inlined in plan.products.inlined.items():
        if node not in layers:
            inlined.undo()
    _store_what_learns(plan)
    between_ranks.without_gathers(sites)
    between_ranks.ask_for_sizes(sites)
    together = {site.match.node: group for group in plan.merged for site in group}
    calls = [call for site in sites if (call := together.get(site.match.node, [site]))[0] is site]
    gathers = between_ranks.GatheredWeights(Bodies(plan.gm))
    keep_copies(plan, calls)
    take_gradients(plan, calls)
    merged = [[site.match for site in group] for group in plan.merged]  # as earlier passes have left them
    groups = {match.node: group for group in merged for match in group}
    stateful = _delayed_sites(plan, sites, merged)
    gathers.add(sites)
    for candidate in reversed(plan.candidates):
        match = candidate.match
        if not candidate.low:
            if candidate.precision.in_order:
                candidate.rule.rewrite(match, _in_fixed_order)
            continue
        emit = functools.partial(_emit, candidate.slots, gathers, stateful.get(candidate.recipe))  # type: ignore[arg-type]
        group = groups.get(match.node)
        if group is None:
            candidate.rule.rewrite(match, emit)
        elif group[0] is match:
            merging.rewrite(group, emit)
    for step in stateful.values():
        step.finish()
    if plan.outcome.state is not None:
        note_forms(plan.outcome.state.agreements, plan.candidates)
    check_order(plan.gm.graph, plan.outcome.extra_inputs)
    transforms.translate(plan.gm)
    for module in plan.graph_modules():
        regions.erase(module.graph)
        _spread_annotations(module.graph)
        selective.translate(module)
        module.recompile()


def _store_what_learns(plan: Plan) -> None:
    """Have weights that `quantize_` is going to store be stored by each forward."""
    together = dict[Any, list[Match]]()
    for site in plan.candidates:  # one that does not learn is stored with the others too
        layers = fused(site.fqn) if site.recipe is not None and site.recipe.of_stored_weights else None
        if layers is not None and site.match.weight.op in ("placeholder", "get_attr") and site.match.dims == 2:
            together.setdefault((layers, site.recipe, site.match.node.graph), []).append(site.match)
    amaxes = dict[fx.Node, fx.Node]()  # by the layers' nodes
    for matches in together.values():
        if len(matches) > 1:
            first = min(match.node for match in matches)
            with first.graph.inserting_before(first):
                weights = [match.weight for match in matches]
                amaxes |= dict.fromkeys(
                    [match.node for match in matches], first.graph.call_function(ops.nvfp4_shared_amax, (weights,))
                )
    for site in reversed(plan.candidates):
        if site.precision.learns:
            register_kernels()  # of stored weights, which generated code from a cache calls, too
            match, recipe = site.match, site.recipe
            with match.node.graph.inserting_before(match.node):
                operands: Any = (match.x, match.weight, match.bias, recipe.prefill, value(match.node).dtype)  # type: ignore[union-attr]
                new = match.node.graph.call_function(ops.nvfp4_trained, operands, {"amax": amaxes.get(match.node)})
                replace_layer(match, new)


def _in_fixed_order(matches: Sequence[Match], x: fx.Node, weights: Sequence[fx.Node]) -> list[fx.Node]:
    """Layers in high precision."""
    layers: Any = [
        (x, weight, match.bias, value(match.node).dtype) for match, weight in zip(matches, weights, strict=True)
    ]
    return [x.graph.call_function(ops.fixed_linear, operands) for operands in layers]


def _emit(
    slots: Slots,
    gathers: between_ranks.GatheredWeights,
    delayed_sites: delayed.DelayedSites | None,  # of a recipe that has state
    matches: Sequence[Match],
    x: fx.Node,
    weights: Sequence[fx.Node],  # (N, K) each
) -> list[fx.Node]:
    """Inserts `te_inductor.layers` at the graph's insertion point, a node a match; its output dtype is the node's own,
    which honours torch.autocast."""
    match, graph, known, spec, more = matches[0], x.graph, None, LayerSpec(slots), dict[str, Any]()
    if delayed_sites is not None:
        scales = delayed_sites.scales(match, x, weights, gathers.has(match))
        spec, more, known = replace(spec, scales=scales.source), scales.arguments, scales.of_weight
    weights = gathers.of(match, weights, spec, known)
    for part in match.parts:
        spec, of_part = part.emit(spec, graph)
        more |= of_part
    biases = [one.bias for one in matches if one.bias is not None]
    # fx has no name for a constant among arguments.
    operands: Any = (x, list(weights), biases, spec, value(match.node).dtype)
    ys = graph.call_function(ops.layers, operands, more)
    return [graph.call_function(operator.getitem, (ys, place)) for place in range(len(weights))]


def _delayed_sites(
    plan: Plan, sites: list[Candidate], merged: list[list[Match]]
) -> dict[Recipe | None, delayed.DelayedSites]:
    by_recipe: dict[DelayedScaling, list[tuple[str, Match]]] = {}
    for site in sites:
        if site.delayed is not None:
            by_recipe.setdefault(site.delayed, []).append((site.module, site.match))
    bodies = Bodies(plan.gm)
    asks = plan.options.guard == "heal" and guard_on_moves(plan.candidates, bodies, plan.inputs)
    if not by_recipe:
        return {}
    state = StateInputs(plan.options.fallback, plan.options.guard, dict(plan.gm.named_parameters()))
    state.stays = "" if asks else "nothing can have its graph compiled anew"
    plan.outcome.extra_inputs.append(state)
    groups = GroupsOf(plan.gm.graph, plan.options, plan.inputs, state.held)
    return {
        recipe: delayed.DelayedSites(bodies, state, recipe, found, merged, groups, plan.writes)
        for recipe, found in by_recipe.items()
    }


def _spread_annotations(graph: fx.Graph) -> None:
    """Give nodes that a rewrite has made, which are the ones without any meta, what users said of the node behind them by
    `torch.fx.traceback.annotate`, for whose sake they stand there; at the end of the graph, of the node in front. What
    torch says by it, as `region_activation_memory_budget`, is refused where some op is not in the region."""
    for nodes in (reversed(graph.nodes), graph.nodes):
        annotations = None
        for node in (node for node in nodes if node.op.startswith("call_")):
            if not node.meta and annotations:
                node.meta["custom"] = annotations
            annotations = node.meta.get("custom")
