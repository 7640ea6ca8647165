"""What runs before each optimizer's step, as a check, and what is told behind it.

torch calls such hooks while it iterates over them, so a hook must not remove itself (`OrderedDict mutated during
iteration` where there is a second one). These stay, once they were asked for: a step then costs a call of each."""

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_checks: dict[Callable[[Optimizer], None], None] = {}
_told: dict[Callable[[Optimizer], None], None] = {}


def check_before_each(check: Callable[[Optimizer], None]) -> None:
    """Call `check(optimizer)` before every optimizer's step from now on. What it raises keeps the step from running."""
    if not _checks:
        register_optimizer_step_pre_hook(_run)
    _checks[check] = None


def _run(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for check in list(_checks):
        check(optimizer)


def tell_after_each(listener: Callable[[Optimizer], None]) -> None:
    """Call `listener(optimizer)` after every optimizer's step from now on."""
    if not _told:
        register_optimizer_step_post_hook(_tell)
    _told[listener] = None


def _tell(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for listener in list(_told):
        listener(optimizer)
