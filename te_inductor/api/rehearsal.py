"""What only the graphs of forward and backward tell, of a graph of Dynamo's that is not run by them: it is traced as its
compile would trace it, on fake tensors, and no code is written."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from te_inductor.backend import rehearse
from te_inductor.config import Options
from te_inductor.distributed import amax_groups
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.presentation.report import SavedSite


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
