"""`explain(model, *inputs)`: what would run where, without compiling a kernel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from te_inductor import recipes
from te_inductor.api import speedup
from te_inductor.api.eager_products import EagerProduct, EagerProducts, Names, report_of
from te_inductor.api.lowering import Program, parse_options, plan_of
from te_inductor.api.tracing import traced
from te_inductor.backend import parse, run_passes
from te_inductor.config import Options
from te_inductor.errors import OptionError
from te_inductor.passes.pre_grad import DECIDE, DECIDE_EXPORTED
from te_inductor.passes.pre_grad.decide import policy
from te_inductor.passes.pre_grad.plan import Plan
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
    times: list[speedup.Times] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        plan = Plan(gm, parsed, example_inputs)
        reports.append(run_passes(plan, DECIDE))
        times.append(speedup.times(plan) if reports[-1].failure is None else speedup.Times())
        return eager.aside(gm.forward)

    eager = EagerProducts()
    with traced(model, backend, parsed.fallback) as run, eager:
        run(*inputs, **kwargs)
    report = merge([*reports, _of_eager(eager.found, Names(model, (*inputs, *kwargs.values())), parsed)])
    return replace(report, speedup=speedup.sentence(times))


def _of_eager(found: Sequence[EagerProduct], names: Names, options: Options) -> Report:
    """Reports layers that no graph has, with the recipes that they would have in one."""
    default, entries, used = recipes.resolve(options.recipe), policy.entries(options.policy, options.policy_name), set()

    def recipe_of(fqn: str, product: EagerProduct) -> str | None:
        entry = policy.first(entries, names_of(fqn), product.sizes)
        used.add(entry)
        recipe = entry.recipe if entry else product.region.recipe or default
        return recipe.name if product.region.enabled and recipe is not None else None  # type: ignore[union-attr]

    report = report_of(found, names, recipe_of)
    return replace(report, unused_policy=[entry.name for entry in entries if entry not in used])
