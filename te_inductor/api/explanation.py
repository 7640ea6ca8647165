"""`explain(model, *inputs)`: what would run where, without compiling a kernel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from te_inductor.api.tracing import traced
from te_inductor.backend import parse, run_passes
from te_inductor.diagnostics import Report, merge
from te_inductor.passes.pre_grad import DECIDE
from te_inductor.passes.pre_grad.plan import Plan


def explain(model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """What `torch.compile(model, backend="te", options=options)` would do with each linear layer, and why not.

    Traces the model with Dynamo and runs it once, uncompiled, on `inputs` and `kwargs` (a trace can only go on behind a
    graph break by running what comes before it). The random state is left as it was; buffers that the forward updates
    are updated. A compiled model is explained as the model inside it.

    Raises:
        OptionError, RecipeError: the options are wrong, or a recipe's factory is.
        FallbackError: there was nothing to trace, with ``fallback="error"``; else a warning says so.
    """
    parsed = parse(None, options)
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reports.append(run_passes(Plan(gm, parsed, example_inputs), DECIDE))
        return gm.forward

    with traced(model, backend, parsed.fallback) as run:
        run(*inputs, **kwargs)
    return merge(reports)
