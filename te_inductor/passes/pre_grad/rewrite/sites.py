"""The passes that put low-precision layers in the place of the sites that were found to run."""

from collections.abc import Sequence

from torch import fx

from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.pre_grad.decide import (
    cached_weights as kept,
)
from te_inductor.passes.pre_grad.decide import (
    merging,
    regions,
    transforms,
    weight_grads,
)
from te_inductor.passes.pre_grad.match.rule import Emit, Match, call_linears
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.rewrite import annotations, delayed, selective
from te_inductor.passes.pre_grad.rewrite.extras import Extras
from te_inductor.recipes import DelayedScaling, Slots
from te_inductor.templates.cutlass import build


def guard_extras(plan: Plan) -> None:
    """Have Dynamo compile anew where what `check_extras` went by has changed."""
    if plan.options.wgrad == "main_grad":
        matches = (site.match for site in plan.candidates if site.low)
        weight_grads.guard_on_totals(matches, Bodies(plan.gm), plan.inputs)


def start_builds(plan: Plan) -> None:
    """Have CUTLASS's kernels built while the graph is compiled."""
    build.start(plan.libraries)


def rewrite_sites(plan: Plan) -> None:
    """Replace what passed by `te_inductor.linears`; last first, as a match's input may be the node of an earlier
    match."""
    sites = [candidate for candidate in plan.candidates if candidate.low]
    layers = {candidate.match.node for candidate in plan.candidates if candidate.low or candidate.stored}
    for node, inlined in plan.inlined.items():
        if node not in layers:
            inlined.undo()
    groups = {match.node: group for group in plan.merged for match in group}
    extras = _extras(plan, sites, groups)
    stateful = _delayed_sites(plan, sites, extras)
    for candidate in reversed(sites):
        recipe, match = candidate.recipe, candidate.match
        emit = stateful[recipe].emit if isinstance(recipe, DelayedScaling) else _stateless(candidate.slots, extras)  # type: ignore[arg-type]
        group = groups.get(match.node)
        if group is None:
            candidate.rule.rewrite(match, emit)
        elif group[0] is match:
            merging.rewrite(group, emit)
    for step in stateful.values():
        step.finish()
    transforms.translate(plan.gm)
    for module in plan.graph_modules():
        regions.erase(module.graph)
        annotations.spread(module.graph)
        selective.translate(module)
        module.recompile()


def _stateless(slots: Slots, extras: Extras) -> Emit:
    def emit(matches: Sequence[Match], x: fx.Node, weights: Sequence[fx.Node]) -> list[fx.Node]:
        return call_linears(matches, x, weights, slots, **extras.of(matches, x.graph))

    return emit


def _extras(plan: Plan, sites: list[Candidate], groups: dict[fx.Node, list[Match]]) -> Extras:
    """Append the inputs: first those of kept weights, then what takes gradients, as `kept_inputs.bind` brings them."""
    bodies = Bodies(plan.gm)
    extras = Extras(kept.KeptSites(bodies, plan.kept), weight_grads.GradientSites(bodies, plan.gradients))
    plan.kept.held = dict(plan.gm.named_parameters())
    if plan.options.weights != "each_call":
        for site in sites:
            group = groups.get(site.match.node, [site.match])
            if "weights" not in site.unmet and group[0] is site.match:
                extras.keeps.add(group, site.recipe, site.slots)  # type: ignore[arg-type]
    if plan.gradients.takers:
        for site in sites:
            if "wgrad" not in site.unmet and weight_grads.wanted(site.match):
                extras.gradients.add(site.match)
    return extras


def _delayed_sites(plan: Plan, sites: list[Candidate], extras: Extras) -> dict[DelayedScaling, delayed.DelayedSites]:
    by_recipe: dict[DelayedScaling, list[tuple[str, Match]]] = {}
    for site in sites:
        if isinstance(site.recipe, DelayedScaling):
            by_recipe.setdefault(site.recipe, []).append((site.fqn, site.match))
    bodies = Bodies(plan.gm)
    plan.state.held = dict(plan.gm.named_parameters())
    return {
        recipe: delayed.DelayedSites(bodies, plan.state, recipe, found, plan.merged, extras)
        for recipe, found in by_recipe.items()
    }
