"""What low precision saves in the linear layers of a traced graph, by the rates that the size rule weighs them with.

It is a sum over layers, of their GEMMs and casts alone. What lies between layers takes as long as before, so a whole
step gains less; casts that Inductor fuses cost less than they do here."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from te_inductor import targets
from te_inductor.passes.pre_grad.decide import size_rule
from te_inductor.passes.pre_grad.decide.support import value
from te_inductor.passes.pre_grad.plan import Candidate, Plan


@dataclass
class Times:
    """Seconds of the layers of a graph, and why they are not known."""

    high: float = 0.0  # all in high precision
    low: float = 0.0  # as they would run
    unknown: list[str] = field(default_factory=list)


def times(plan: Plan) -> Times:
    """Of the layers of a graph that was decided about."""
    found, groups = Times(), {}  # type: ignore[var-annotated]
    for site in plan.candidates:
        groups.setdefault((site.match.x, site.recipe if site.low else None), []).append(site)
    for sites in groups.values():
        _add(found, sites)
    return found


def _add(found: Times, sites: list[Candidate]) -> None:
    first = sites[0]
    target = targets.of(value(first.match.weight).device)
    why = _unknown(first, target)
    if why is not None:
        found.unknown.append(why)
        return
    assert target.rates is not None
    weight = size_rule.weigh([site.match for site in sites], target.rates, first.match.sizes[0])
    found.high += weight.high
    found.low += weight.high - (weight.saved - weight.cost if first.low else 0.0)


def _unknown(site: Candidate, target: targets.Target) -> str | None:
    sizes: Any = site.match.sizes
    if target.rates is None:
        return f"no GEMM was timed on {target.name}"
    if site.stored:
        return "stored weights are not weighed"
    if site.emulated:
        return "emulated layers are not weighed"
    return None if all(isinstance(size, int) for size in sizes) else "sizes are not known before it runs"


def sentence(found: Iterable[Times]) -> str | None:
    """For the report; None of a model without linear layers."""
    found = list(found)
    unknown = list(dict.fromkeys(why for one in found for why in one.unknown))
    if unknown:
        return f"estimated speed-up: unknown, as {'; '.join(unknown)}"
    high, low = sum(one.high for one in found), sum(one.low for one in found)
    if not high:
        return None
    return (
        f"estimated speed-up of the linear layers alone: {high / low:.2f} ({1e3 * high:.3g} ms in bf16,"
        f" {1e3 * low:.3g} ms so, by rates measured on an H200); what lies between them is not counted"
    )
