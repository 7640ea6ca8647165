"""Checks that run before each optimizer's step.

torch calls such hooks while it iterates over them, so a hook must not remove itself (`OrderedDict mutated during
iteration` where there is a second one). These stay, once they were asked for: a step then costs a call of each."""

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_checks: dict[Callable[[Optimizer], None], None] = {}


def check_before_each(check: Callable[[Optimizer], None]) -> None:
    """Call `check(optimizer)` before every optimizer's step from now on. What it raises keeps the step from running."""
    if not _checks:
        register_optimizer_step_pre_hook(_run)
    _checks[check] = None


def _run(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for check in list(_checks):
        check(optimizer)
