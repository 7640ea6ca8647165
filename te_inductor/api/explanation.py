"""`explain(model, *inputs)`: what would run where, without compiling a kernel."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from te_inductor import recipes, targets
from te_inductor.api.eager_products import EagerProduct, EagerProducts, Names, report_of
from te_inductor.api.lowering import Program, parse_options, plan_of
from te_inductor.api.tracing import traced
from te_inductor.backend import parse, run_passes
from te_inductor.config import Options
from te_inductor.errors import OptionError
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad import DECIDE, DECIDE_EXPORTED
from te_inductor.passes.pre_grad.decide.policy import Policy
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.presentation.paths import names_of
from te_inductor.presentation.report import Report, merge


def explain(model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """What `torch.compile(model, backend="te", options=options)` would do with each linear layer, and why not. Of an
    exported program, which takes no inputs here: what `te_inductor.lower` would.

    Traces the model with Dynamo and runs it once, uncompiled, on `inputs` and `kwargs` (a trace can only go on behind a
    graph break by running what comes before it). The random state is left as it was; buffers that the forward updates
    are updated. A compiled model is explained as the model inside it. Layers that run outside of every graph, behind a
    graph break or in code that Dynamo skips, are sites in high precision.

    Raises:
        OptionError, RecipeError: the options are wrong, or a recipe's factory is, or a program was given inputs.
        FallbackError: there was nothing to trace, with ``fallback="error"``; else a warning says so.
    """
    if isinstance(model, Program):
        if inputs or kwargs:
            raise OptionError("explain was given inputs beside an exported program, which has its own; expected none")
        return run_passes(plan_of(model, parse_options(options)), DECIDE_EXPORTED)
    parsed = parse(None, options)
    reports: list[Report] = []
    times: list[Times] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = Plan(gm, parsed, example_inputs)
        reports.append(run_passes(plan, DECIDE))
        times.append(times_of(plan) if reports[-1].failure is None else Times())
        return eager.aside(gm.forward)

    eager = EagerProducts()
    with traced(model, backend, parsed.fallback) as run, eager:
        run(*inputs, **kwargs)
    report = merge([*reports, _of_eager(eager.found, Names(model, (*inputs, *kwargs.values())), parsed)])
    return replace(report, speedup=_sentence(times))


def _of_eager(found: Sequence[EagerProduct], names: Names, options: Options) -> Report:
    """Reports layers that no graph has, with the recipes that they would have in one."""
    default, policy = recipes.resolve(options.recipe), Policy(options.policy, options.policy_name)

    def recipe_of(fqn: str, product: EagerProduct) -> str | None:
        entry = policy.of(names_of(fqn), product.sizes)
        recipe = entry.recipe if entry else product.region.recipe or default
        return recipe.name if product.region.enabled and recipe is not None else None  # type: ignore[union-attr]

    report = report_of(found, names, recipe_of)
    return replace(report, unused_policy=policy.unused)


@dataclass
class Times:
    """Seconds of the linear layers of a graph, of their GEMMs and casts alone, as the size rule weighed them, and why they
    are not known. What lies between layers takes as long as before, so a whole step gains less."""

    high: float = 0.0  # all in high precision
    low: float = 0.0  # as they would run
    rates: str = ""  # where the rates come from
    unknown: list[str] = field(default_factory=list)


def times_of(plan: Plan) -> Times:
    """The times of the layers of a graph that was decided about."""
    found = Times()
    for site in plan.candidates:
        device = value(site.match.weight).device
        rates = targets.rates_of(device)
        why = _why_unknown(site, targets.of(device).name, rates)
        if why is not None:
            found.unknown.append(why)
        elif rates is not None:
            m, n, k = site.match.sizes
            found.high += 2 * len(list(site.match.gemms())) * m * n * k / rates.bf16_flops
            found.rates = rates.source
    found.low = found.high - sum(weight.gain_s for weight in plan.outcome.report.weights)
    return found


def _why_unknown(site: Candidate, name: str, rates: targets.Rates | None) -> str | None:
    if rates is None:
        return f"no GEMM was timed on {name}"
    if site.stored:
        return "stored weights are not weighed"
    if site.emulated:
        return "emulated layers are not weighed"
    return None if all(isinstance(size, int) for size in site.match.sizes) else "sizes are not known before it runs"


def _sentence(found: Iterable[Times]) -> str | None:
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
