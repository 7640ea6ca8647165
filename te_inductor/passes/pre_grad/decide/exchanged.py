"""The layers of experts that cast their rows before these go to the ranks that have the experts: Note [Rows between
ranks] in distributed/exchange.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import distributed as dist
from torch import fx

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.distributed import amax_groups
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.owners import owner_of
from te_inductor.passes.graph.values import value
from te_inductor.passes.graph.writes import last_read
from te_inductor.passes.pre_grad.decide import delayed
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites import exchanges
from te_inductor.passes.pre_grad.sites.exchanges import ExchangeNodes, Exchanges
from te_inductor.recipes import DelayedScaling

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
            _leave(site, behind, _refusal(plan, site, behind, bodies))
    for of_one in readers.values():
        refusal = next((why for site, found in of_one if (why := _refusal(plan, site, found, bodies))), None)
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


def _refusal(plan: Plan, site: Candidate, found: ExchangeNodes, bodies: Bodies) -> Refusal | None:
    """Why rows are exchanged in high precision."""
    slots: Any = site.slots
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
    if isinstance(site.recipe, DelayedScaling):
        ranks = dist.get_process_group_ranks(amax_groups.process_group(found.group))
        own = not site.recipe.reduce_amax
        if not own and plan.options.amax_group is None and not _shares_scales(site, ranks, bodies):
            return Refusal("nothing tells that their ranks have one scale: pass option 'amax_group'")
        return delayed.one_scale(site.recipe, plan.options, ranks)
    return None


def _shares_scales(site: Candidate, ranks: Sequence[int], bodies: Bodies) -> bool:
    """Whether amaxes of delayed scaling are reduced over these ranks, as the mesh of the parameter says."""
    owner = owner_of(site.match.weight, bodies)
    mesh = None if owner is None else compat.mesh_of_dtensor(value(owner.parameter))
    return mesh is not None and set(ranks) <= set(amax_groups.of_mesh(mesh).ranks)
