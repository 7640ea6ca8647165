"""A run of a model under Dynamo that nothing is left of, for reports about it; and what only the graphs of forward and
backward tell, of a graph that is not run by them: it is traced as its compile would trace it, on fake tensors, and no
code is written."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from te_inductor import compat
from te_inductor.backend import rehearse
from te_inductor.config import Options
from te_inductor.diagnostics import say
from te_inductor.distributed import amax_groups
from te_inductor.errors import OptionError, TEInductorError, wrong_type
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.presentation.report import SavedSite
from te_inductor.recipes import regions

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_NOTHING_TRACED = (
    "te_inductor: Dynamo gave no graph of the model, so there is nothing in low precision to report. Either the model"
    " computes nothing that it captures, or it has given up on the model's code in this process, by its limit on"
    " recompiles: ask for the report before, or call torch._dynamo.reset(), which forgets everything compiled"
)


@contextmanager
def traced(model: Callable[..., Any], backend: Backend, fallback: str) -> Iterator[Callable[..., Any]]:
    """The model, compiled by a backend for the calls in this context. Of a compiled model, the one inside it.

    The random state is left as it was. What Dynamo keeps of it is let go of at the end, but for functions behind a
    graph break: those keep what the backend returned for them, apart from the user's own graphs.

    Raises:
        OptionError: the model cannot be called.
        TEInductorError: the backend did.
        FallbackError: there was nothing to trace, with ``fallback="error"``; else a warning says so.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    if not callable(model):
        raise OptionError(wrong_type("the model", model, "an nn.Module or a function"))
    regions.note_compile()
    graphs = 0

    def counted(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return backend(gm, inputs)

    try:
        with (
            torch.random.fork_rng(devices=range(torch.cuda.device_count())),
            torch._dynamo.config.patch(optimize_ddp=False),  # which would call pieces of a graph one by one
            compat.compiled_apart(_inside(model), counted) as run,
        ):
            yield run
    except BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, TEInductorError):
            raise failed.inner_exception from None
        raise
    if not graphs:
        say(_NOTHING_TRACED, fallback)


def _inside(model: Callable[..., Any]) -> Callable[..., Any]:
    """The module or function that was compiled, whose own options are not those that are asked about."""
    model = getattr(model, "_orig_mod", model)
    while hasattr(model, "_torchdynamo_inline"):  # what torch.compile has made of a function
        model = model._torchdynamo_inline
    return model


def module_of(model: Any) -> nn.Module:
    """The module that is called; an empty one of a function."""
    module = getattr(model, "__self__", model)
    return module if isinstance(module, nn.Module) else nn.Module()


def saved_by(gm: fx.GraphModule, options: Options, inputs: Sequence[Any]) -> list[SavedSite]:
    """What the forward of a graph would save where option `saved` asks for low precision; empty where it does not, or
    no backward follows."""
    if not options.saves_low:
        return []
    plan = Plan(gm, alone(options), inputs)
    rehearse(plan, lambda inner: stand_in)
    return plan.outcome.report.saved


def alone(options: Options) -> Options:
    """The options of a compile of which no other rank learns, and which says nothing."""
    return replace(options, amax_group=amax_groups.resolve(amax_groups.NONE), fallback="silent")


def stand_in(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Stands where Inductor's compiler of single graphs does."""

    def run(inputs: list[Any]) -> Any:
        return fx.Interpreter(gm).boxed_run(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
