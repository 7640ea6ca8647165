"""The time that each layer is expected to take under each recipe that it may have, as the size rule counts it."""

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from te_inductor import recipes
from te_inductor.diagnostics import Refusal
from te_inductor.passes.effects import under
from te_inductor.passes.pre_grad import CHECK
from te_inductor.passes.pre_grad.decide import memory_rule, size_rule
from te_inductor.passes.pre_grad.decide.report import plain
from te_inductor.passes.pre_grad.plan import Candidate, Outcome, Plan
from te_inductor.presentation.report import Weighing
from te_inductor.recipes import BackwardPrecision, Recipe
from te_inductor.recipes.backward_precision import HIGH_PRECISION

NAMES = ("delayed", "current", "rowwise", "block")
GEMMS = ("fprop", "dgrad", "wgrad")
Choice = Recipe | None  # None: the whole layer in high precision


@functools.cache
def choices() -> tuple[Recipe, ...]:
    """Every recipe that a layer may have: one of `NAMES`, whose dgrad and wgrad each are its own, another one's that
    keeps no state, or in high precision. The recipe as it is stands before those with another backward."""
    found = []
    for name in NAMES:
        others = [None, *(one for one in NAMES if one not in (name, "delayed")), HIGH_PRECISION]
        own: Recipe = recipes.resolve(name)  # type: ignore[assignment]
        found += [replace(own, backward=BackwardPrecision(dgrad, wgrad)) for dgrad in others for wgrad in others]
    return tuple(found)


def by_gemm(choice: Choice) -> dict[str, str]:
    """The name of the recipe that casts the operands of each GEMM."""
    if choice is None:
        return dict.fromkeys(GEMMS, HIGH_PRECISION)
    names = (None if choice.backward is None else choice.backward.name_of(gemm) for gemm in GEMMS)
    return {gemm: name or choice.name for gemm, name in zip(GEMMS, names, strict=True)}


@dataclass(frozen=True)
class Group:
    """Layers of one input in one graph. They have one choice, as they share the cast of their input, and may be one
    GEMM."""

    layers: dict[str, tuple[Any, int, int]]  # (M, N, K) of each, by module path
    high_s: float  # seconds of their GEMMs in high precision
    gains: dict[Choice, float]  # seconds that each choice saves
    refusal: str | None  # why there is no choice but high precision


@dataclass(frozen=True)
class GraphTimes:
    """The layers of one graph that there is a choice for."""

    groups: list[Group]
    device_s: float  # seconds that the whole graph takes the device in high precision, without attention
    rates: str  # where the rates come from


@dataclass(frozen=True)
class _Offer:
    sites: list[Candidate]
    refusal: Refusal | None
    weight: Weighing

    @property
    def gain(self) -> float:
        return self.weight.saved_s - self.weight.cost_s


def times_of(plan: Plan) -> GraphTimes | None:
    """Weighs every choice of the layers of a graph whose layers have been found. A recipe is offered to layers of one
    input where all of them can have it and the size rule lets each have it; where the rule leaves the whole graph even
    with the fastest choices, there is none. None on a device without rates."""
    first = decided(plan, choices()[0])
    offers = {x: _offered(found) for x, found in _by_input(plan).items()}
    fastest = {x: max(found.values(), key=lambda one: one.gain) for x, found in offers.items() if found}
    # The rule is asked about the graph as it would be: with what is offered, and what is not.
    sites = [site for site in first.candidates if site.match.x not in fastest]
    decision = _with(plan, [*sites, *(site for one in fastest.values() for site in one.sites)])
    size_rule.weigh(decision)
    if not decision.outcome.report.weights:
        return None
    groups = []
    for x, best in fastest.items():
        refusal = best.refusal or best.sites[0].refusal
        gains: dict[Choice, float] = {None: 0.0}
        if refusal is None:
            gains |= {recipe: offer.gain for recipe, offer in offers[x].items() if offer.refusal is None}
        sizes = {site.fqn: plain(site.match.sizes) for site in best.sites}
        groups.append(Group(sizes, best.weight.bf16_s, gains, None if refusal is None else str(refusal)))
    [weight] = decision.outcome.report.weights
    return GraphTimes(groups, weight.device_s, weight.rates)


def _by_input(plan: Plan) -> dict[fx.Node, dict[Choice, _Offer]]:
    """What each choice weighs, by the input of the layers. Layers whose recipe the policy or a region says are none of
    them."""
    found: dict[fx.Node, dict[Choice, _Offer]] = {}
    for recipe in choices():
        for sites, _, refusal, weight in size_rule.judge(decided(plan, recipe)):
            if weight is not None and not sites[0].by_policy and sites[0].recipe == recipe:
                found.setdefault(sites[0].match.x, {})[recipe] = _Offer(sites, refusal, weight)
    return found


def _offered(found: dict[Choice, _Offer]) -> dict[Choice, _Offer]:
    """The choices that all layers of an input can have, and of those the ones that pay; where none does, the first,
    which says why."""
    nodes = {site.match.node for offer in found.values() for site in offer.sites}
    whole = {recipe: offer for recipe, offer in found.items() if {site.match.node for site in offer.sites} == nodes}
    pays = {recipe: offer for recipe, offer in whole.items() if offer.refusal is None}
    return pays or dict(list(whole.items())[:1])


def decided(plan: Plan, recipe: Recipe) -> Plan:
    """The plan as it would be with one recipe for every layer that the policy says nothing of."""
    tried = _with(plan, [replace(site) for site in plan.candidates])
    tried.options = replace(plan.options, recipe=recipe)
    for step in (*under(tried.options, CHECK), memory_rule.spare):
        step(tried)
    return tried


def _with(plan: Plan, candidates: list[Candidate]) -> Plan:
    """The plan with other candidates, and with nothing decided; what is known of the graph is not asked again."""
    made = copy.copy(plan)
    made.candidates, made.outcome = candidates, Outcome()
    made.products = replace(plan.products, losses=[], unlowered=[replace(one) for one in plan.products.unlowered])
    return made


def merged(graphs: Sequence[GraphTimes]) -> Iterator[list[Group]]:
    """Yields the groups that have one choice together, as a module is in several of them: a policy knows layers by their
    modules."""
    units: list[tuple[set[str], list[Group]]] = []
    for group in (group for graph in graphs for group in graph.groups):
        joined = [unit for unit in units if unit[0] & set(group.layers)]
        units = [unit for unit in units if unit not in joined]
        names = set(group.layers).union(*(unit[0] for unit in joined))
        units.append((names, [one for unit in joined for one in unit[1]] + [group]))
    yield from (groups for _, groups in units)
