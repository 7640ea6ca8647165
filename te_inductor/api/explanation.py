"""`explain(model, *inputs)`: what would run where, without compiling a kernel, and what a call on a device elsewhere is
expected to take, by what the size rule and the memory rule know of graphs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from te_inductor import recipes, targets
from te_inductor.api.eager_products import EagerProduct, EagerProducts, Names, report_of
from te_inductor.api.lowering import Program, parse_options, plan_of
from te_inductor.api.statistics import statistics
from te_inductor.api.tracing import module_of, saved_by, traced
from te_inductor.backend import parse, run_passes
from te_inductor.config import Options
from te_inductor.errors import OptionError
from te_inductor.kernels import cutlass_packages
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad import DECIDE, DECIDE_EXPORTED
from te_inductor.passes.pre_grad.decide import memory_rule
from te_inductor.passes.pre_grad.decide.policy import Policy
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites.products import hint
from te_inductor.presentation.paths import names_of
from te_inductor.presentation.report import Expected, Report, merge


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    target: Any = None,
    live: Any = None,
    **kwargs: Any,
) -> Report:
    """What `torch.compile(model, backend="te", options=options)` would do with each linear layer, and why not. Of an
    exported program, which takes no inputs here: what `te_inductor.lower` would.

    Traces the model with Dynamo and runs it once, uncompiled, on `inputs` and `kwargs` (a trace can only go on behind a
    graph break by running what comes before it). The random state is left as it was; buffers that the forward updates
    are updated. A compiled model is explained as the model inside it. Layers that run outside of every graph, behind a
    graph break or in code that Dynamo skips, are sites in high precision.

    With ``target="h100"``, or the name of another device, the report says what would run there, which layers the size
    rule would leave, and what a step is expected to take (`Report.expected`). Nothing runs there. The model may be on
    the CPU, or on the meta device (built under ``with torch.device("meta")``), where it takes no memory and inputs go to
    the meta device, too. A `target` that is no string is an argument of the model's.

    With ``live=compiled``, a compiled model that trains, the report has its `statistics`. A `live` that is no module is
    an argument of the model's.

    Raises:
        OptionError, RecipeError: the options are wrong, or a recipe's factory is, a program was given inputs or a target, or
            there is no such target.
        FallbackError: there was nothing to trace, with ``fallback="error"``; else a warning says so.
    """
    if target is not None and not isinstance(target, str):
        target, kwargs = None, {**kwargs, "target": target}
    if live is not None and not isinstance(live, nn.Module):
        live, kwargs = None, {**kwargs, "live": live}
    there = None if target is None else targets.by_name(target)
    if isinstance(model, Program):
        return _of_program(model, options, bool(inputs or kwargs), there, live)
    if there is not None:
        inputs, kwargs = _beside(model, inputs, kwargs)
    report = _of_run(model, inputs, kwargs, parse(None, options), there)
    return report if live is None else replace(report, statistics=statistics(live))


def _of_run(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    parsed: Options,
    there: targets.Target | None,
) -> Report:
    """Traces the model while it runs on the inputs, and decides about each graph."""
    eager = EagerProducts()
    reports: list[Report] = []
    times: list[Times] = []
    memory: list[GraphMemory] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = Plan(gm, parsed, example_inputs)
        with targets.taken_for(there):
            saved = saved_by(gm, parsed, example_inputs)
            reports.append(replace(run_passes(plan, DECIDE), saved=saved))
            if reports[-1].failure is None:
                times.append(times_of(plan))
                memory.append(memory_of(plan))
        return eager.aside(gm.forward)

    with traced(model, backend, parsed.fallback) as run, eager:
        run(*inputs, **kwargs)
    report = merge([*reports, _of_eager(eager.found, Names(model, (*inputs, *kwargs.values())), parsed)])
    expected = None if there is None else expected_of(there, report, memory)
    return replace(report, speedup=_sentence(times), expected=expected)


def _of_program(
    program: Program, options: Mapping[str, Any] | None, has_inputs: bool, there: object, live: object
) -> Report:
    for given, what in ((there is not None, "a target"), (has_inputs, "inputs"), (live is not None, "a live model")):
        if given:
            raise OptionError(f"explain was given {what} beside an exported program, which has its own; expected none")
    return run_passes(plan_of(program, parse_options(options)), DECIDE_EXPORTED)


def _beside(model: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
    """The inputs on the meta device, where parameters of the model are."""
    if not any(one.is_meta for one in module_of(model).parameters()):
        return inputs, kwargs
    return pytree.tree_map_only(torch.Tensor, lambda one: one.to("meta"), (inputs, kwargs))


def _of_eager(found: Sequence[EagerProduct], names: Names, options: Options) -> Report:
    """Reports layers that no graph has, with the recipes that they would have in one."""
    default, policy = recipes.resolve(options.recipe), Policy(options.policy, options.recipe_called("policy"))

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


@dataclass
class GraphMemory:
    """What the parameters of a graph take, and what low precision changes at the peak of its step."""

    parameters: dict[int, nn.Parameter]  # by identity: graphs share some
    peak_bytes: int | None


def memory_of(plan: Plan) -> GraphMemory:
    """Returns the memory of a graph that was decided about."""
    held = {id(one): one for one in plan.inputs if isinstance(one, nn.Parameter)}
    known = all(hint(site.match.sizes[0]) is not None for site in plan.candidates)
    return GraphMemory(held, round(memory_rule.balance(plan)) if known else None)


def expected_of(there: targets.Target, report: Report, memory: Sequence[GraphMemory]) -> Expected:
    """Sums up what graphs are expected to take, those that were weighed."""
    bf16_s, step_s, rates = 0.0, 0.0, targets.rates_in(there)
    by_host = False
    for graph in report.weights:
        launches = sum(one.weight.launches for one in graph.layers if one.low)
        host = graph.host_s or 0.0
        bf16_s += max(graph.device_s, host - launches * (rates.host_launch if rates else 0.0))
        step_s += max(graph.device_s - graph.gain_s, host)
        by_host |= host > graph.device_s - graph.gain_s
    parameters = {key: one for each in memory for key, one in each.parameters.items()}.values()
    peaks = [each.peak_bytes for each in memory if each.peak_bytes is not None]
    return Expected(
        there.product,
        " and ".join(dict.fromkeys(graph.rates for graph in report.weights)) or None,
        bf16_s if report.weights else None,
        step_s if report.weights else None,
        by_host,
        sum(one.nbytes for one in parameters),
        sum(one.nbytes for one in parameters if one.requires_grad and torch.is_grad_enabled()),
        sum(peaks) if len(peaks) == len(memory) else None,
        None if there.cutlass is None else cutlass_packages.missing(),
    )
