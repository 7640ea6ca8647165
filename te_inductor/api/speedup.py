"""What low precision saves in the linear layers of a traced graph, as the size rule weighed them.

It is a sum over layers, of their GEMMs and casts alone. What lies between layers takes as long as before, so a whole
step gains less."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from te_inductor import targets
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.plan import Candidate, Plan


@dataclass
class Times:
    """Seconds of the layers of a graph, and why they are not known."""

    high: float = 0.0  # all in high precision
    low: float = 0.0  # as they would run
    rates: str = ""  # where the rates come from
    unknown: list[str] = field(default_factory=list)


def times(plan: Plan) -> Times:
    """The times of the layers of a graph that was decided about."""
    found = Times()
    for site in plan.candidates:
        device = value(site.match.weight).device
        rates = targets.rates_of(device)
        why = _unknown(site, targets.of(device).name, rates)
        if why is not None:
            found.unknown.append(why)
        elif rates is not None:
            m, n, k = site.match.sizes
            found.high += 2 * len(list(site.match.gemms())) * m * n * k / rates.bf16_flops
            found.rates = rates.source
    found.low = found.high - sum(weight.gain_s for weight in plan.outcome.report.weights)
    return found


def _unknown(site: Candidate, name: str, rates: targets.Rates | None) -> str | None:
    if rates is None:
        return f"no GEMM was timed on {name}"
    if site.stored:
        return "stored weights are not weighed"
    if site.emulated:
        return "emulated layers are not weighed"
    return None if all(isinstance(size, int) for size in site.match.sizes) else "sizes are not known before it runs"


def sentence(found: Iterable[Times]) -> str | None:
    """Returns the report's sentence; None for a model without linear layers."""
    found = list(found)
    unknown = list(dict.fromkeys(why for one in found for why in one.unknown))
    if unknown:
        return f"estimated speed-up: unknown, as {'; '.join(unknown)}"
    high, low = sum(one.high for one in found), sum(one.low for one in found)
    if not high:
        return None
    sources = " and ".join(dict.fromkeys(one.rates for one in found if one.rates))
    return (
        f"estimated speed-up of the linear layers alone: {high / low:.2f} ({1e3 * high:.3g} ms in bf16,"
        f" {1e3 * low:.3g} ms so, by rates {sources}); what lies between them is not counted"
    )
