"""Tensors that layers have from other ranks in low precision. Weights that FSDP2 gathers have been cast before the graph,
for the recipe that their site then has; those that the graph gathers itself are cast in it, where that is the same: Note
[Graph FSDP]. Layers of experts cast their rows before these go to the ranks that have the experts: Note [Rows between
ranks] in ops/layers/operands.py. Ranks decide alike, or raise: Note [Ranks that decide] of what they exchange, Note [Ranks
that agree] of amaxes that they reduce, both in distributed/."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch import distributed as dist

from te_inductor import compat
from te_inductor.config import Options
from te_inductor.diagnostics import Refusal
from te_inductor.distributed import agreement, amax_groups, decisions
from te_inductor.distributed.agreement import Agreement
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.owners import owner_of
from te_inductor.passes.graph.values import value
from te_inductor.passes.graph.writes import last_read
from te_inductor.passes.pre_grad.decide import delayed
from te_inductor.passes.pre_grad.decide.delayed import parameter_of
from te_inductor.passes.pre_grad.decide.report import plain
from te_inductor.passes.pre_grad.loss.site import LossPart
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites import exchanges
from te_inductor.passes.pre_grad.sites.exchanges import ExchangeNodes, Exchanges
from te_inductor.passes.pre_grad.sites.parallel import SHARED
from te_inductor.passes.pre_grad.sites.part import Gather
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
    if wanted.own != found.own:
        name = repr(found.name) if wanted.name != found.name else str(found)
        candidate.unmet["recipe"] = Refusal("its weight was gathered for %s, which it runs in; %s", name, _REMEDY)
    return found.with_backward(wanted.backward)


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
        why_not = gather.refusal or written or _why_not_gathered(site, gather, site.slots, plan.options, bodies)  # type: ignore[arg-type]
        _leave_gather(site, why_not)
        of_shard.setdefault(bodies.outer(gather.shard), []).append(site)
    for shard, of_one in of_shard.items():
        gathering = {site.match.gather.nodes[-1] for site in of_one if site.gathers}  # type: ignore[union-attr]
        if readers[shard] != gathering or len({site.recipe for site in of_one}) > 1:
            for site in of_one:
                _leave_gather(site, SHARED)


def _leave_gather(site: Candidate, refusal: Refusal | None) -> None:
    """Have the graph gather the weight in high precision, unless something else has it do so already."""
    gather = site.match.gather
    assert gather is not None
    site.match = site.match.having(replace(gather, refusal=gather.refusal or refusal))


def _why_not_gathered(
    site: Candidate, gather: Gather, slots: Slots, options: Options, bodies: Bodies
) -> Refusal | None:
    """Why a weight is gathered as it was."""
    shard, scope = value(gather.shard), slots.weight.granularity
    n, k = shard.shape
    ranks = n // value(gather.shard)._local_tensor.shape[0]  # type: ignore[attr-defined]
    if not (scope.whole or (scope.transposes and not scope.microscaled)):
        return Refusal(
            "recipe %r has scales of its rows for fprop and of its columns for dgrad, which no one cast gives",
            site.recipe.name if site.recipe else "none",
        )
    if (of_part := site.match.first_refusal(lambda part: part.refuse_gathered())) is not None:
        return of_part
    if slots.weight.stochastic or slots.weight.hadamard:
        return Refusal("its cast is not the same for each rank's rows")
    rows = n if scope.whole else n // ranks  # no block may lie in two shards
    if rows % scope.alignment or k % scope.alignment:
        what = "its" if scope.whole else "a rank's"
        return Refusal("%s %d rows of %d columns are not multiples of %d", what, rows, k, scope.alignment)
    if not bodies.reaches(gather.shard.graph):
        return Refusal("it is gathered in a control-flow body")
    if site.delayed is not None:
        return delayed.of_mesh_shards(site.delayed, options, shard)
    return None


_X, _DY = "rows between ranks go in {} to the experts", "gradients between ranks go in {} to the experts"


def check_exchanges(plan: Plan) -> None:
    """Have the layers around an exchange do it, where they can. Those that read the same rows all do, or none does."""
    bodies, readers = Bodies(plan.gm), dict[fx.Node, list[tuple[Candidate, ExchangeNodes]]]()
    for site in plan.candidates:
        groups = site.match.groups
        if groups is None or groups.numbered:
            continue
        front = exchanges.in_front(site.match.x) if groups.rows is None else None
        behind = exchanges.behind(site.match.end)
        around = tuple(found.group for found in (front, behind) if found is not None)
        if around:
            site.match = site.match.having(Exchanges(around))
        if front is not None and site.low:
            readers.setdefault(front.waited, []).append((site, front))
        if behind is not None and site.low:
            _leave(site, behind, _why_not_exchanged(plan, site, behind, bodies))
    for of_one in readers.values():
        refusal = next((why for site, found in of_one if (why := _why_not_exchanged(plan, site, found, bodies))), None)
        sizes, left = exchanges.others(of_one[0][1], [site.match.node for site, _ in of_one])
        if left or len({site.recipe for site, _ in of_one}) > 1:
            refusal = refusal or exchanges.OTHERS
        for site, found in of_one:
            _arrive(site, found, sizes, refusal)


def _arrive(site: Candidate, found: ExchangeNodes, sizes: Sequence[fx.Node], refusal: Refusal | None) -> None:
    part = _note(site, _text(_X, found, site.slots.input.element if site.slots else "", refusal))
    if refusal is None:
        before = tuple(reversed(found.nodes))
        site.match = site.match.having(replace(part, arrives=found, sizes_of=tuple(sizes)), x=found.rows, before=before)


def _leave(site: Candidate, found: ExchangeNodes, refusal: Refusal | None) -> None:
    if site.match.bias is not None:
        refusal = refusal or Refusal("the gradient of its bias is the sum of what is exchanged")
    part = _note(site, _text(_DY, found, site.slots.grad_output.element if site.slots else "", refusal))
    if refusal is None:
        site.match = site.match.having(replace(part, leaves=found), behind=found.nodes)


def _note(site: Candidate, wire: str) -> Exchanges:
    """What is known of a site's exchanges, with one more line of the report."""
    part = site.match.part(Exchanges)
    assert part is not None
    part = replace(part, wires=(*part.wires, wire))
    site.match = site.match.having(part)
    return part


def _text(template: str, found: ExchangeNodes, element: str, refusal: Refusal | None) -> str:
    dtype = str(value(found.rows).dtype).removeprefix("torch.")
    return template.format(element) if refusal is None else f"{template.format(dtype)}: {refusal}"


def _why_not_exchanged(plan: Plan, site: Candidate, found: ExchangeNodes, bodies: Bodies) -> Refusal | None:
    """Why rows are exchanged in high precision."""
    slots: Any = site.slots
    if (of_part := site.match.first_refusal(lambda part: part.refuse_exchanged())) is not None:
        return of_part
    scopes = [slots.input.granularity, slots.grad_output.granularity]
    if not all(scope.whole for scope in scopes):
        return Refusal(
            "recipe %r reads them with scales of rows for one product and of columns for another",
            site.recipe.name if site.recipe else "none",
        )
    read = [found.rows, found.waited, *found.splits, *found.nodes]
    around = [*found.nodes, site.match.node]
    if plan.writes.between(read, min(around), last_read(max(around)), set(found.nodes)):
        return Refusal("the graph writes them, or what tells which they are")
    if any(not (node < site.match.node) for node in found.splits):
        return Refusal("how they are exchanged is not known before the layer")
    if site.delayed is not None:
        ranks = dist.get_process_group_ranks(amax_groups.process_group(found.group))
        own = not site.delayed.reduce_amax
        if not own and plan.options.amax_group is None and not _shares_scales(site, ranks, bodies):
            return Refusal("nothing tells that their ranks have one scale: pass option 'amax_group'")
        return delayed.one_scale(site.delayed, plan.options, ranks)
    return None


def _shares_scales(site: Candidate, ranks: Sequence[int], bodies: Bodies) -> bool:
    """Whether amaxes of delayed scaling are reduced over these ranks, as the mesh of the parameter says."""
    owner = owner_of(site.match.weight, bodies)
    mesh = None if owner is None else compat.mesh_of_dtensor(value(owner.parameter))
    return mesh is not None and set(ranks) <= set(amax_groups.of_mesh(mesh).ranks)


def follow_ranks(plan: Plan) -> None:
    """Have experts whose rows go between ranks run as the first rank to compile them has it by its own sizes."""
    found = [exchanges.in_front(site.match.x) or exchanges.behind(site.match.end) for site in plan.experts]
    groups = sorted({exchange.group for exchange in found if exchange is not None})
    sites = [site for site in plan.experts if site.weighed]
    if not groups or not sites:
        return
    layers = [(site.fqn, site.match.sizes[1:], site.match.experts, _trains(site)) for site in sites]
    told = decisions.of_first("weighed", (groups, layers), ["low" if site.low else "high" for site in sites])
    for site, how in zip(sites, told[1] if told else (), strict=bool(told)):
        if how == "high" and site.low:
            site.refusal = Refusal("rank %d, with which it exchanges rows, has left it in high precision", told[0])  # type: ignore[index]
        elif how == "low":
            site.refusal = None


def compare_ranks(plan: Plan) -> None:
    """Raise where another rank runs a layer of tensors that go between ranks otherwise."""
    sites = [site for site in plan.candidates if site.match.between_ranks]
    if sites:
        decisions.compare(_layers(sites), list(map(_decided, sites)))
        changes: list[decisions.Change] = []
        bodies = Bodies(plan.gm)
        one_step = f", in one graph with {', '.join(site.fqn or '(root)' for site in sites if site.delayed)}"
        for site in sites:
            parameter = parameter_of(site.match, bodies, plan.inputs)[1]
            if parameter is not None:
                layer = site.fqn, _trains(site)
                decided = _decided(site) + (one_step if site.delayed else "")  # of which ranks reduce amaxes together
                changes += decisions.changes_of(parameter, _groups(site), layer, decided)
        decisions.follow(changes)


def compare_compiles(plan: Plan) -> None:
    """Raise where this rank alone could not compile such layers as it had decided, or another rank could not."""
    sites = [site for site in plan.candidates if site.match.between_ranks]
    if sites:
        how = "as the user wrote it, since its compile failed" if plan.outcome.report.failure else "as decided"
        decisions.compare(_layers(sites), [f"{site.fqn or '(root)'} {how}" for site in sites], "compiled")


def _layers(sites: Sequence[Candidate]) -> object:
    return [(site.fqn, plain(site.match.sizes), _ranks(site), _trains(site)) for site in sites]


def _groups(site: Candidate) -> set[tuple[int, ...]]:
    """The ranks with which a site exchanges tensors."""
    meshes = [mesh for mesh in map(compat.mesh_of_dtensor, _shared(site)) if mesh is not None]
    names = map(amax_groups.process_group, site.exchanges)
    groups = [*(mesh.mesh.flatten().tolist() for mesh in meshes), *map(dist.get_process_group_ranks, names)]
    return {tuple(sorted(group)) for group in groups}


def _shared(site: Candidate) -> list[Any]:
    """The tensors of a site that ranks share, among others."""
    nodes = [site.match.gather.shard] if site.match.gather else [site.match.x, site.match.weight]
    return list(map(value, nodes))


def _trains(site: Candidate) -> bool:
    return bool(value(site.match.node).requires_grad)


def _ranks(site: Candidate) -> Any:
    """Says which ranks' tensors they are, and where each is."""
    found = []
    for tensor in _shared(site):
        mesh = compat.mesh_of_dtensor(tensor)
        found.append(None if mesh is None else (mesh.mesh.flatten().tolist(), str(tensor.placements)))  # type: ignore[attr-defined]
    return found, site.exchanges


def _decided(site: Candidate) -> str:
    how = f"in {site.recipe.name}" if site.low and site.recipe else "in high precision"
    loss = site.match.part(LossPart)
    how += ", its loss in chunks" if loss is not None and loss.is_taken(site.low) else ""
    return "; ".join([f"{site.fqn or '(root)'} {how}", *site.wires])


def note_forms(agreements: Sequence[Agreement], candidates: Iterable[Candidate]) -> None:
    """Note the precision of a graph's layers, of which ranks may agree to reduce amaxes together."""
    sites = [site for site in candidates if site.delayed is not None and not site.match.between_ranks]
    agreement.note_forms(agreements, [(_layer(site, site.delayed), site.low) for site in sites])


def leave_ranks(plan: Plan) -> None:
    """Raise where this rank alone trains layers otherwise whose amaxes it reduces with others."""
    bodies, left = Bodies(plan.gm), dict[str, Tensor]()
    for site in plan.candidates:
        parameter = parameter_of(site.match, bodies, plan.inputs)[1]
        if parameter is not None and not (site.low and site.delayed) and value(site.match.node).requires_grad:
            left[repr(_layer(site, None))] = parameter
    agreement.leave(left)


def form_of(site: Candidate, recipe: Recipe | None) -> bool | None:
    """Whether ranks that reduce amaxes with this one have a site in low precision, which then stays so for any number
    of rows; None where none do."""
    if not isinstance(recipe, DelayedScaling) or site.match.between_ranks:
        return None
    return agreement.form_of(_layer(site, recipe))


def _layer(site: Candidate, recipe: Recipe | None) -> Hashable:
    return site.fqn, *site.match.sizes[1:], recipe
