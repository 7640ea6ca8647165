"""Weights that are gathered in low precision. FSDP2 has cast them before the graph, for the recipe that their site then
has; those that the graph gathers itself are cast in it, where that is the same: Note [Graph FSDP]."""

from dataclasses import replace
from typing import Any

from torch import fx

from te_inductor.config import Options
from te_inductor.diagnostics import Refusal
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.decide import delayed
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites.sharded import SHARED
from te_inductor.passes.pre_grad.sites.weight_gather import Gather
from te_inductor.recipes import DelayedScaling, Recipe, Slots

_REMEDY = "give torch.compile and low_precision_all_gather the same recipe and policy"


def recipe_of(candidate: Candidate, wanted: Recipe | None, weight: GatheredWeight) -> Recipe | None:
    """The recipe of a site whose weight was gathered in low precision. Where the options want another one, `wanted`, that
    is noted as an option that does not reach the site. None where they keep the site in high precision."""
    found = weight.recipe
    assert found is not None  # as of all that FSDP2 gathered
    if wanted is None:
        candidate.unmet["recipe"] = Refusal(
            "its weight was gathered in low precision, for %r, and is multiplied in high precision; %s",
            *(found.name, _REMEDY),
        )
        return None
    if wanted != found:
        name = repr(found.name) if wanted.name != found.name else str(found)
        candidate.unmet["recipe"] = Refusal("its weight was gathered for %s, which it runs in; %s", name, _REMEDY)
    return found


def check_gathers(plan: Plan) -> None:
    """Decides which weights that the graph gathers are cast before that. All that read a shard gather it so, or none
    does."""
    bodies = Bodies(plan.gm)
    sites = [site for site in plan.candidates if site.low and site.match.gather]
    if not sites:
        return
    readers = bodies.readers()
    of_shard: dict[fx.Node, list[Candidate]] = {}
    for site in sites:
        gather: Any = site.match.gather
        written = Refusal("the graph writes its shards") if plan.writes.anywhere(gather.shard) else None
        _refuse(site, gather.refusal or written or _refusal(site, gather, site.slots, plan.options, bodies))  # type: ignore[arg-type]
        of_shard.setdefault(bodies.outer(gather.shard), []).append(site)
    for shard, of_one in of_shard.items():
        gathering = {site.match.gather.nodes[-1] for site in of_one if site.gathers}  # type: ignore[union-attr]
        if readers[shard] != gathering or len({site.recipe for site in of_one}) > 1:
            for site in of_one:
                _refuse(site, SHARED)


def _refuse(site: Candidate, refusal: Refusal | None) -> None:
    """Have the graph gather the weight in high precision, unless something else has it do so already."""
    gather = site.match.gather
    assert gather is not None
    site.match = site.match.having(replace(gather, refusal=gather.refusal or refusal))


def _refusal(site: Candidate, gather: Gather, slots: Slots, options: Options, bodies: Bodies) -> Refusal | None:
    """Why a weight is gathered as it was."""
    shard, scope = value(gather.shard), slots.weight.granularity
    n, k = shard.shape
    ranks = n // value(gather.shard)._local_tensor.shape[0]  # type: ignore[attr-defined]
    if not (scope.whole or (scope.transposes and not scope.microscaled)):
        return Refusal(
            "recipe %r has scales of its rows for fprop and of its columns for dgrad, which no one cast gives",
            site.recipe.name if site.recipe else "none",
        )
    if slots.weight.stochastic or slots.weight.hadamard:
        return Refusal("its cast is not the same for each rank's rows")
    rows = n if scope.whole else n // ranks  # no block may lie in two shards
    if rows % scope.alignment or k % scope.alignment:
        what = "its" if scope.whole else "a rank's"
        return Refusal("%s %d rows of %d columns are not multiples of %d", what, rows, k, scope.alignment)
    if not bodies.reaches(gather.shard.graph):
        return Refusal("it is gathered in a control-flow body")
    if isinstance(site.recipe, DelayedScaling):
        return delayed.of_mesh_shards(site.recipe, options, shard)
    return None
