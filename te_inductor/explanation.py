"""`explain(model, *inputs)`: what would run where, without compiling a kernel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from te_inductor import compat, regions
from te_inductor.backend import DECIDE, parse, run_passes
from te_inductor.diagnostics import Report, merge, say
from te_inductor.errors import TEInductorError
from te_inductor.passes import Plan

_NOTHING_TRACED = (
    "te_inductor: Dynamo gave no graph of the model, so there is nothing to explain. Either the model computes nothing that"
    " it captures, or it has given up on the model's code in this process, by its limit on recompiles: explain the model"
    " before, or call torch._dynamo.reset(), which forgets everything compiled"
)


def explain(model: Callable[..., Any], *inputs: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """What `torch.compile(model, backend="te", options=options)` would do with each linear layer, and why not.

    Traces the model with Dynamo and runs it once, uncompiled, on `inputs` and `kwargs` (a trace can only go on behind a
    graph break by running what comes before it). The random state is left as it was; buffers that the forward updates
    are updated. A compiled model is explained as the model inside it.

    Raises:
        OptionError, RecipeError: the options are wrong, or a recipe's factory is.
        FallbackError: there was nothing to trace, with ``fallback="error"``; else a warning says so.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    regions.note_compile()
    parsed = parse(None, options)
    model = getattr(model, "_orig_mod", model)
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reports.append(run_passes(Plan(gm, parsed, example_inputs), DECIDE))
        return gm.forward

    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            compat.compile_apart(model, backend)(*inputs, **kwargs)
    except BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, TEInductorError):
            raise failed.inner_exception from None
        raise
    if not reports:
        say(_NOTHING_TRACED, parsed.fallback)
    return merge(reports)
