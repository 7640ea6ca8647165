"""The passes of `backend.PASSES`, each over one `Plan`. They read and rewrite the Dynamo graph, before autograd sees it."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from te_inductor import recipes
from te_inductor.config import Options
from te_inductor.diagnostics import Refusal, Report, Site, Unmet
from te_inductor.patterns import (
    RULES,
    aliases,
    annotations,
    attention,
    contractions,
    delayed,
    gemm_kernels,
    kept,
    merging,
    policy,
    products,
    regions,
    selective,
    size_rule,
    support,
    transforms,
    weight_grads,
)
from te_inductor.patterns.bodies import Bodies, in_order
from te_inductor.patterns.extras import Extras
from te_inductor.patterns.gemm_kernels import Choice
from te_inductor.patterns.module_path import module_path
from te_inductor.patterns.products import Product
from te_inductor.patterns.rule import Emit, Match, Rule, call_linears
from te_inductor.recipes import DelayedScaling, Recipe, Slots
from te_inductor.regions import Region, active
from te_inductor.runtime.delayed import check_functions
from te_inductor.runtime.gradient_inputs import GradientInputs
from te_inductor.runtime.kept_inputs import KeptInputs
from te_inductor.runtime.state_inputs import StateInputs
from te_inductor.stored_weight import StoredWeight
from te_inductor.templates.cutlass import build
from te_inductor.templates.cutlass.scaled_mm import Kernel


@dataclass
class Candidate:
    """A place that a rule matched, and what the passes decide about it."""

    rule: Rule
    match: Match
    fqn: str
    regions: tuple[Region | None, ...] = (None,)  # of autocast; more than one where a body has callers in several
    recipe: Recipe | None = None
    slots: Slots | None = None  # the recipe's, for this site
    stored: bool = False  # its weight is stored in low precision, which is its recipe: there is nothing to rewrite
    by_policy: bool = False  # named by a policy entry
    refusal: Refusal | None = None  # why it stays in high precision
    emulated: Refusal | None = None  # why its GEMMs multiply in high precision what low precision holds
    unmet: dict[str, Refusal] = field(default_factory=dict)  # what the options ask for and it does not do: why

    @property
    def low(self) -> bool:
        """Whether the site is to be rewritten."""
        return self.recipe is not None and self.refusal is None and not self.stored


@dataclass
class Unlowered:
    """A product with a weight that no rule matched."""

    product: Product
    fqn: str
    regions: tuple[Region | None, ...]
    refusal: Refusal
    recipe: Recipe | None = None  # that it would have


@dataclass
class Plan:
    """What the passes of one compile know."""

    gm: fx.GraphModule
    options: Options
    inputs: Sequence[Any] = ()  # the graph's, as Dynamo hands them to a backend: parameters are the model's own
    inlined: dict[fx.Node, contractions.Inlined] = field(default_factory=dict)  # layers that were written otherwise
    candidates: list[Candidate] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)  # all of the graph, the candidates' too
    unlowered: list[Unlowered] = field(default_factory=list)
    merged: list[list[Match]] = field(default_factory=list)  # sites that are one GEMM
    report: Report = field(default_factory=Report)
    libraries: set[Kernel] = field(default_factory=set)  # CUTLASS kernels that its GEMMs will be
    state: StateInputs = field(init=False)  # what the rewritten graph takes besides its inputs
    kept: KeptInputs = field(init=False)  # and before that
    gradients: GradientInputs = field(init=False)  # and between those

    def __post_init__(self) -> None:
        self.state = StateInputs(self.options.fallback)
        self.kept = KeptInputs(kept.refresh_on, self.options.fallback)
        self.gradients = GradientInputs(weight_grads.TAKERS.get(self.options.wgrad))

    @property
    def reads_active_region(self) -> bool:
        """Whether the thread's autocast has a say in any site."""
        return any(None in site.regions for site in self.candidates) or any(
            None in site.regions for site in self.unlowered
        )

    @functools.cached_property
    def regions_of(self) -> dict[fx.Node, list[Region | None]]:
        """The regions of autocast that each node is in. Asked for once, behind the passes that put nodes in."""
        return regions.regions_of(self.gm)

    @functools.cached_property
    def written(self) -> set[StorageWeakRef]:
        """The memory that the graph writes."""
        return aliases.written(self.gm, self.inputs)

    def graph_modules(self) -> list[fx.GraphModule]:
        """The graph and the bodies of its higher-order ops, such as checkpoint's."""
        return [module for module in self.gm.modules() if isinstance(module, fx.GraphModule)]


def inline_attention(plan: Plan) -> None:
    """Open `F.multi_head_attention_forward`, one node for Dynamo, so that its projections can be seen."""
    for module in plan.graph_modules():
        attention.inline(module.graph)
        module.recompile()


def inline_contractions(plan: Plan) -> None:
    """Put linear layers in the place of other sums of products that are ones."""
    for module in plan.graph_modules():
        plan.inlined |= contractions.inline(module.graph)
        module.recompile()


def match_sites(plan: Plan) -> None:
    """Find every linear layer, and the region of autocast that it is in."""
    regions_of = plan.regions_of  # even of a graph without layers, which may leave a region open
    for module in plan.graph_modules():
        for node in module.graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            for rule in RULES:
                match = rule.match(node)
                if match is not None:
                    plan.candidates.append(
                        Candidate(rule, match, module_path(node), tuple(regions_of.get(node, [None])))
                    )
                    break


def list_products(plan: Plan) -> None:
    """Find all matrix products, and those with a weight among them that no rule matched."""
    nodes = (node for module in plan.graph_modules() for node in module.graph.nodes)
    plan.products.extend(product for product in map(products.read, nodes) if product is not None)
    matched = {candidate.match.node for candidate in plan.candidates}
    layers = {product.node for product in plan.products if products.is_layer(product)} | matched
    weights = products.Weights(Bodies(plan.gm), layers, lambda: plan.written)
    for product, refusal in products.unmatched(plan.products, matched, weights):
        around = tuple(plan.regions_of.get(product.node, [None]))
        plan.unlowered.append(Unlowered(product, module_path(product.node), around, refusal))


def resolve_recipes(plan: Plan) -> None:
    """Give each site its recipe: none where autocast is disabled, else that of the first policy entry that matches it, else
    that of the region, else the default."""
    default = recipes.resolve(plan.options.recipe)
    entries = policy.entries(plan.options.policy)
    used = set()
    for candidate in plan.candidates:
        region = _region(candidate.regions)
        entry = policy.first(entries, candidate.fqn, candidate.match.sizes)
        used.add(entry)
        weight = support.value(candidate.match.weight)
        if isinstance(weight, StoredWeight):
            candidate.recipe, candidate.stored = weight.recipe, True
        elif region.enabled:
            candidate.by_policy = entry is not None
            candidate.recipe = entry.recipe if entry else region.recipe or default  # type: ignore[assignment]
            if candidate.recipe is not None and not candidate.recipe.of_stored_weights:
                candidate.slots = candidate.recipe.slots_of(candidate.fqn)
    for site in plan.unlowered:
        region = _region(site.regions)
        entry = policy.first(entries, site.fqn, site.product.sizes)
        used.add(entry)
        if region.enabled:
            site.recipe = entry.recipe if entry else region.recipe or default  # type: ignore[assignment]
    plan.report.unused_policy.extend(entry.name for entry in entries if entry not in used)


def _region(regions: Sequence[Region | None]) -> Region:
    """Of several, which are refused, one that is enabled: so that the refusal is told."""
    around = [region or active() for region in regions]
    return next((region for region in around if region.enabled), around[0])


def check_sites(plan: Plan) -> None:
    """Ask each rule whether the site can run as it should; a refusal leaves the site in high precision."""
    bodies, transforms_of = Bodies(plan.gm), transforms.transforms_of(plan.gm)
    for candidate in plan.candidates:
        match, weight = candidate.match, support.value(candidate.match.weight)
        if candidate.recipe is not None and candidate.recipe.of_stored_weights and not candidate.stored:
            candidate.refusal = support.not_stored(candidate.recipe, weight)
        elif candidate.slots is not None:
            candidate.refusal = (
                regions.refusal(candidate.regions)
                or transforms.refusal(transforms_of.get(match.node))
                or candidate.rule.check(match)
                or support.blocks(candidate.slots, weight, *match.sizes[1:])
            )
            candidate.emulated = None if candidate.refusal else support.emulated(candidate.slots, weight.device)
        if candidate.low and isinstance(candidate.recipe, DelayedScaling):
            check_functions(candidate.recipe, weight.device)
            candidate.refusal = delayed.refusal(match, bodies, transforms_of.get(match.node))


def weigh_sites(plan: Plan) -> None:
    """Sites that would be slower in low precision stay as they are, unless the policy names them, or they are emulated,
    which is never faster and is asked for the sake of its numerics."""
    by_input: dict[Any, list[Candidate]] = {}
    for site in plan.candidates:
        if site.low and not site.by_policy and not site.emulated:
            by_input.setdefault((site.match.x, site.recipe), []).append(site)
    for sites in by_input.values():
        refusal = size_rule.refusal([site.match for site in sites])
        for site in sites:
            site.refusal = refusal


def merge_sites(plan: Plan) -> None:
    """Linear layers of the same input and recipe become one GEMM."""
    sites = [
        (site.rule, site.match, site.recipe, site.slots)
        for site in plan.candidates
        if site.recipe and site.slots and not site.refusal
    ]
    plan.merged.extend(merging.groups(sites, plan.written))


def check_extras(plan: Plan) -> None:
    """Which weights are cast once, and which gradients do not go to autograd, where the options ask for it; sites that are
    one GEMM all are, or none."""
    bodies, sites = Bodies(plan.gm), {site.match.node: site for site in plan.candidates if site.low}
    checks: dict[str, Callable[[Candidate], Refusal | None]] = {}
    if plan.options.weights != "each_call":
        checks["weights"] = lambda site: kept.refusal(site.match, site.slots, bodies, plan.inputs, plan.written)  # type: ignore[arg-type]
    if plan.gradients.takers:
        checks["wgrad"] = lambda site: (
            weight_grads.refusal(site.match, site.slots, bodies, plan.inputs, plan.options)  # type: ignore[arg-type]
            if weight_grads.wanted(site.match)
            else None
        )
    for option, check in checks.items():
        refusals = {node: check(site) for node, site in sites.items()}
        for group in plan.merged:
            why = next((refusals[match.node] for match in group if refusals[match.node]), None)
            refusals |= {match.node: why for match in group}
        for node, refusal in refusals.items():
            if refusal is not None:
                sites[node].unmet[option] = refusal
                plan.report.unmet.append(Unmet(option, sites[node].fqn, str(refusal)))
    if plan.gradients.takers:
        high = (site for site in plan.candidates if site.refusal and weight_grads.wanted(site.match))
        reason = "the layer stays in high precision, so that its weight gradient goes to autograd"
        plan.report.unmet.extend(Unmet("wgrad", site.fqn, reason) for site in high)


def report_sites(plan: Plan) -> None:
    """Write down what was decided, before the rewrite erases the matched nodes."""
    paths = {candidate.match.node: candidate.fqn for candidate in plan.candidates}
    joined = {match.node: group for group in plan.merged for match in group}
    flops = {product.node: product.flops for product in plan.products}
    kernels = {}
    for candidate in plan.candidates:
        group = joined.get(candidate.match.node, [])
        merged = tuple(paths[match.node] for match in group)
        rows = sum(match.sizes[1] for match in group) or None  # of the weight of the GEMM that they are
        fprop, *others = _sites(plan, candidate, merged, rows)
        plan.report.sites.extend((replace(fprop, flops=flops.get(candidate.match.node)), *others))
        kernels[candidate.match.node] = fprop.kernel
    plan.report.sites.extend(map(_unlowered_site, plan.unlowered))
    calls = Counter(in_order(plan.gm))
    for product in plan.products:
        low = kernels.get(product.node, "high_precision") != "high_precision"
        known = None if product.flops is None else product.flops * max(calls[product.node], 1)
        plan.report.flops.add(known, low)


def guard_extras(plan: Plan) -> None:
    """Have Dynamo compile anew where what `check_extras` went by has changed."""
    if plan.options.wgrad == "main_grad":
        matches = (site.match for site in plan.candidates if site.low)
        weight_grads.guard_on_totals(matches, Bodies(plan.gm), plan.inputs)


def start_builds(plan: Plan) -> None:
    """Have CUTLASS's kernels built while the graph is compiled."""
    build.start(plan.libraries)


def rewrite_sites(plan: Plan) -> None:
    """Replace what passed by `te_inductor.linears`; last first, as a match's input may be the node of an earlier match."""
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


def _sites(plan: Plan, candidate: Candidate, merged: tuple[str, ...], rows: int | None) -> Iterator[Site]:
    recipe = "none" if candidate.recipe is None else candidate.recipe.name
    refusal = candidate.refusal or candidate.emulated
    reason = None if refusal is None else str(refusal)
    match = candidate.match
    for (gemm, shapes), (_, merged_shapes) in zip(match.gemms(), match.gemms(rows), strict=True):
        accumulates = gemm == "wgrad" and plan.options.wgrad == "main_grad" and "wgrad" not in candidate.unmet
        choice = _choice(plan, candidate, gemm, shapes if accumulates else merged_shapes, accumulates)
        if choice.library is not None:
            plan.libraries.add(choice.library)
        yield Site(candidate.fqn, candidate.rule.pattern, gemm, plain(shapes), recipe, choice.name, reason, merged)


def _unlowered_site(site: Unlowered) -> Site:
    product, recipe = site.product, "none" if site.recipe is None else site.recipe.name
    reason = None if site.recipe is None else str(site.refusal)
    sizes = plain(product.sizes)
    return Site(site.fqn, product.pattern, "fprop", sizes, recipe, "high_precision", reason, flops=product.flops)


def _choice(plan: Plan, candidate: Candidate, gemm: str, shapes: tuple[Any, int, int], accumulates: bool) -> Choice:
    if candidate.stored:
        if gemm == "fprop":
            return gemm_kernels.of_stored_weight(candidate.match, candidate.recipe, plan.options)
    elif candidate.low and candidate.slots is not None:
        if candidate.emulated:
            return Choice("emulated")
        return gemm_kernels.choose(candidate.match, candidate.slots, gemm, shapes, plan.options, accumulates)
    return Choice("high_precision")


def plain(shapes: tuple[Any, int, int]) -> tuple[Any, int, int]:
    m, n, k = (size if isinstance(size, int) else str(size) for size in shapes)
    return m, n, k  # type: ignore[return-value]
