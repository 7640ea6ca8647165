"""The passes that look at what other ranks have decided: Note [Ranks that decide]."""

from collections.abc import Sequence
from typing import Any

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.distributed import decisions
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.decide.report import plain
from te_inductor.passes.pre_grad.loss.site import LossPart
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites import exchanges


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
    sites = [site for site in plan.candidates if _goes_between(site)]
    if sites:
        decisions.compare(_layers(sites), list(map(_decided, sites)))


def compare_compiles(plan: Plan) -> None:
    """Raise where this rank alone could not compile such layers as it had decided, or another rank could not."""
    sites = [site for site in plan.candidates if _goes_between(site)]
    if sites:
        how = "as the user wrote it, since its compile failed" if plan.outcome.report.failure else "as decided"
        decisions.compare(_layers(sites), [f"{site.fqn or '(root)'} {how}" for site in sites], "compiled")


def _layers(sites: Sequence[Candidate]) -> object:
    return [(site.fqn, plain(site.match.sizes), _ranks(site), _trains(site)) for site in sites]


def _goes_between(site: Candidate) -> bool:
    return any(part.between_ranks for part in site.match.parts)


def _trains(site: Candidate) -> bool:
    return bool(value(site.match.node).requires_grad)


def _ranks(site: Candidate) -> Any:
    """Says which ranks' tensors they are, and where each is."""
    tensors = [site.match.gather.shard] if site.match.gather else [site.match.x, site.match.weight]
    found = []
    for tensor in map(value, tensors):
        mesh = compat.mesh_of_dtensor(tensor)
        found.append(None if mesh is None else (mesh.mesh.flatten().tolist(), str(tensor.placements)))  # type: ignore[attr-defined]
    return found, site.exchanges


def _decided(site: Candidate) -> str:
    how = f"in {site.recipe.name}" if site.low and site.recipe else "in high precision"
    loss = site.match.part(LossPart)
    how += ", its loss in chunks" if loss is not None and loss.is_taken(site.low) else ""
    return "; ".join([f"{site.fqn or '(root)'} {how}", *site.wires])
