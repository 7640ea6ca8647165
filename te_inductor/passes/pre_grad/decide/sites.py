"""The passes that decide about each site: its recipe, whether it can run, whether that pays, and beside which
others."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from te_inductor import compat, recipes
from te_inductor.config import OPTIONS
from te_inductor.diagnostics import Refusal
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.ops.stored_weight import StoredWeight
from te_inductor.passes.graph import regions
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.decide import (
    between_ranks,
    cached_weights,
    delayed,
    memory_rule,
    merging,
    routers,
    size_rule,
    transforms,
    weight_grads,
)
from te_inductor.passes.pre_grad.decide.policy import Entry, Policy
from te_inductor.passes.pre_grad.plan import Candidate, LoweredPlan, Plan, Precision, Unlowered
from te_inductor.passes.pre_grad.sites import requirements
from te_inductor.passes.pre_grad.sites.held import held_weight
from te_inductor.passes.pre_grad.sites.part import OwnBackward
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.presentation.report import Unmet
from te_inductor.recipes import DelayedScaling, Recipe
from te_inductor.recipes.backward_precision import resolve_backward
from te_inductor.recipes.regions import Region, active
from te_inductor.runtime.eager.delayed import check_functions
from te_inductor.runtime.state.store import any_moved


def resolve_recipes(plan: Plan) -> None:
    """Give each site its recipe: none where autocast is disabled, else that of the first policy entry that matches it,
    else that of the region, else the default."""
    default = recipes.resolve(plan.options.recipe)
    backward = resolve_backward(plan.options.backward, plan.options.called("backward"))
    policy = Policy(plan.options.policy, plan.options.recipe_called("policy"))
    bodies = Bodies(plan.gm) if any_moved() else None
    recording = Bodies(plan.gm).in_grad_mode()
    for candidate in plan.candidates:
        sizes = (None, *candidate.match.sizes[1:]) if plan.options.batch_invariant else candidate.match.sizes
        entry = policy.of(candidate.place.names, sizes)
        weight = compat.shard_of(value(candidate.match.weight))
        recipe, by_policy = _recipe(candidate, entry, default), entry is not None
        moved = None
        if bodies is not None and isinstance(recipe, DelayedScaling):
            moved = delayed.moved_to(candidate.match, bodies, plan.inputs, recipe)
            recipe = moved or recipe
        recipe = None if recipe is None else recipe.with_backward(backward)
        if recipe is not None and recipe.of_stored_weights and recipe.backward is not None:
            candidate.unmet["backward"] = Refusal("its gradient goes straight through the cast of its weight")
            recipe = recipe.own
        if isinstance(weight, StoredWeight):
            candidate.precision = Precision(weight.recipe, stored=True)
            if recipe is not None and recipe.backward is not None:
                candidate.unmet["backward"] = Refusal("its weight is stored, as a constant, in a precision of its own")
            continue
        if isinstance(weight, GatheredWeight):
            recipe, by_policy = between_ranks.recipe_of(candidate, recipe, weight), True
        if _region(candidate.place.regions).enabled:
            slots = None if recipe is None or recipe.of_stored_weights else recipe.slots_of(candidate.fqn)
            form = between_ranks.form_of(candidate, recipe) if candidate.match.node in recording else None
            candidate.precision = Precision(recipe, slots, by_policy or bool(form), moved=moved is not None, form=form)
            if slots is not None and slots.has_own_backward:
                candidate.match = candidate.match.having(OwnBackward(slots))
            if slots is not None and not isinstance(plan, LoweredPlan):
                held = held_weight(candidate.match, recipe, slots, plan.writes)  # type: ignore[arg-type]
                candidate.match = candidate.match if held is None else candidate.match.having(held)
    for site in plan.products.unlowered:
        names, sizes = site.place.names, site.product.sizes
        if not site.outside:
            site.precision = Precision(_recipe(site, policy.of(names, sizes), default))
        elif (entry := policy.first(names, sizes)) and entry.recipe is None:
            policy.of(names, sizes)  # which it has, and no recipe
    plan.outcome.report.unused_policy.extend(policy.unused)


def _recipe(site: Candidate | Unlowered, entry: Entry | None, default: Recipe | None) -> Recipe | None:
    region = _region(site.place.regions)
    if not region.enabled:
        return None
    return entry.recipe if entry else region.recipe or default  # type: ignore[return-value]


def _region(regions: Sequence[Region | None]) -> Region:
    """The region that is enabled, of several, which are refused: so that the refusal is told."""
    around = [region or active() for region in regions]
    return next((region for region in around if region.enabled), around[0])


def check_sites(plan: Plan) -> None:
    """Ask each rule whether the site can run as it should; a refusal leaves the site in high precision."""
    bodies, transforms_of = Bodies(plan.gm), transforms.transforms_of(plan.gm)
    choosing = routers.of_groups((site.match for site in plan.candidates), {one.node for one in plan.products.all})
    for candidate in plan.candidates:
        match, weight = candidate.match, value(candidate.match.weight)
        if candidate.recipe is not None and candidate.recipe.of_stored_weights and not candidate.stored:
            plain = not (match.transposed or match.parts or match.before or match.behind)
            candidate.refusal = (
                requirements.not_stored(candidate.recipe, weight, candidate.rule.pattern, plain)
                or regions.refusal(candidate.place.regions)
                or transforms.refusal(transforms_of.get(match.node))
                or candidate.rule.check(match)
                or refusal_of_dtypes(match, plan)
                or _refusal_of_rows(candidate)
                or (Refusal("a graph with a backward of its own") if isinstance(plan, LoweredPlan) else None)
            )
            if candidate.refusal is None:
                candidate.precision = replace(candidate.precision, stored=True, learns=True)
                candidate.unmet |= {
                    option: why
                    for option, why in _LEARNS.items()
                    if getattr(plan.options, option) != OPTIONS[option].default
                }
        elif candidate.slots is not None:
            candidate.refusal = (
                regions.refusal(candidate.place.regions)
                or transforms.refusal(transforms_of.get(match.node))
                or (None if candidate.by_policy else routers.refusal(match, choosing))
                or candidate.rule.check(match)
                or refusal_of_dtypes(match, plan)
                or next(
                    filter(None, (candidate.rule.check_slots(match, slots) for slots in candidate.slots.all())), None
                )
                or _refusal_of_rows(candidate)
                or _refusal_here(match, plan)
            )
            if candidate.refusal is None:
                candidate.emulated = candidate.rule.emulated(match, candidate.slots, plan.program)
        if candidate.low and candidate.delayed is not None:
            check_functions(candidate.delayed, weight.device)
            candidate.refusal = delayed.refusal(match, bodies, transforms_of.get(match.node))
            if match.parallel is not None:
                candidate.refusal = candidate.refusal or delayed.of_shards(
                    candidate.delayed, plan.options, match.parallel
                )


# Options that do not reach a weight which each forward stores.
_LEARNS = {
    "weights": Refusal("each forward stores the weight, which learns"),
    "wgrad": Refusal("its gradient goes straight through the cast of the weight, to autograd"),
}


def _refusal_here(match: Match, plan: Plan) -> Refusal | None:
    is_cpp = plan.program.cpp_wrapper and not plan.leaves
    return match.first_refusal(lambda part: part.refuse_here(match, plan.writes, is_cpp))


def refusal_of_dtypes(match: Match, plan: Plan) -> Refusal | None:
    """Leaves operands that torch refuses to torch, which says so when the graph runs. Casts in front of experts are the
    layer's own."""
    if match.dims > 2:
        return None
    operands = [value(one) for one in (match.x, match.weight, match.bias) if one is not None]
    dtypes = dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in operands)
    if len(dtypes) == 1 or plan.may_autocast(operands[0].device):
        return None
    return Refusal("operands of %s, which torch multiplies inside of torch.autocast alone", " and ".join(dtypes))


def _refusal_of_rows(site: Candidate) -> Refusal | None:
    rows, form = site.match.sizes[0], site.precision.form
    if form is False:
        return Refusal("ranks that reduce amaxes with this one have left it in high precision")
    return Refusal("empty batch") if isinstance(rows, int) and rows == 0 and not form else None


def weigh_sites(plan: Plan) -> None:
    """Sites that would be slower in low precision, or take more memory, stay as they are, unless the policy names them,
    or they are emulated, which is never faster and is asked for the sake of its numerics."""
    memory_rule.spare(plan)
    size_rule.weigh(plan)
    memory_rule.spare(plan)  # layers that the size rule left save nothing


def merge_sites(plan: Plan) -> None:
    """Linear layers of the same input and recipe become one GEMM."""
    sites = {site.match.node: site for site in plan.candidates if site.recipe and site.slots and not site.refusal}
    found = merging.groups(
        [(site.rule, site.match, site.recipe, site.slots) for site in sites.values()],  # type: ignore[misc]
        plan.writes,
    )
    plan.merged.extend([sites[match.node] for match in group] for group in found)


def check_extras(plan: Plan) -> None:
    """Decides which weights are cast once, which gradients do not go to autograd, and which amaxes are reduced over a
    group, where the options ask for it; sites that are one GEMM all are, or none."""
    bodies, sites = Bodies(plan.gm), {site.match.node: site for site in plan.candidates if site.low}
    checks: dict[str, Callable[[Candidate], Refusal | None]] = {}
    if plan.options.weights != "each_call":
        checks["weights"] = lambda site: cached_weights.refusal(
            site.match,
            site.slots,  # type: ignore[arg-type]
            bodies,
            plan.inputs,
            plan.writes,
        )
    checks["wgrad"] = lambda site: (
        weight_grads.refusal(site.match, site.slots, bodies, plan.inputs, plan.options)  # type: ignore[arg-type]
        if weight_grads.wanted(site.match)
        else None
    )
    if plan.options.amax_group:
        checks["amax_group"] = lambda site: delayed.not_over_group(site.delayed, plan.options)
    plan.outcome.report.unmet.extend(
        Unmet(option, site.fqn, str(why)) for site in plan.candidates for option, why in site.unmet.items()
    )
    for option, check in checks.items():
        refusals = {node: check(site) for node, site in sites.items()}
        for group in plan.merged:
            matches = [site.match for site in group]
            why = next((refusals[match.node] for match in matches if refusals[match.node]), None)
            if option == "weights" and why is None:
                why = cached_weights.group_refusal(matches)
            refusals |= {match.node: why for match in matches}
        for node, refusal in refusals.items():
            if refusal is not None:
                sites[node].unmet[option] = refusal
                plan.outcome.report.unmet.append(Unmet(option, sites[node].fqn, str(refusal)))
    if plan.options.wgrad in weight_grads.SINKS:
        plan.outcome.report.unmet.extend(weight_grads.left_to_autograd(plan, bodies))
