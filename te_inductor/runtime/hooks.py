"""What is to run at each step of any optimizer, where a parameter takes another's place, and where a module gets another
part.

torch has one list of such hooks for all, and iterates over it as it calls them, so that a hook must not remove itself
(`OrderedDict mutated during iteration` where there is a second one). These stay, once they were asked for: a step then
costs a call of each."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_Listener = Callable[[Optimizer], None]
_before: dict[_Listener, None] = {}
_after: dict[_Listener, None] = {}


def check_before_each(check: _Listener) -> None:
    """Call `check(optimizer)` before every optimizer's step from now on. What it raises keeps the step from running."""
    _add(check, _before, register_optimizer_step_pre_hook)


def tell_after_each(listener: _Listener) -> None:
    """Call `listener(optimizer)` after every optimizer's step from now on."""
    _add(listener, _after, register_optimizer_step_post_hook)


def _add(listener: _Listener, listeners: dict[_Listener, None], register: Callable[..., Any]) -> None:
    def run(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for one in list(listeners):
            one(optimizer)

    if not listeners:
        register(run)
    listeners[listener] = None


_noticing: set[Callable[[nn.Module], None]] = set()
_calling: set[Callable[[Tensor, Tensor], None]] = set()


def when_replaced(inherit: Callable[[Tensor, Tensor], None]) -> None:
    """Has ``inherit(old, new)`` called before a module holds `new` by the name by which it held `old`, as
    `load_state_dict(assign=True)` puts it there. The hook, which all modules call, looks one name up."""
    if inherit in _calling:
        return
    _calling.add(inherit)

    def hook(module: nn.Module, name: str, new: nn.Parameter | None) -> None:
        old = module._parameters.get(name)
        if old is not None and new is not None and new is not old:
            inherit(old, new)

    register_module_parameter_registration_hook(hook)


def when_built(notice: Callable[[nn.Module], None]) -> None:
    """Has ``notice(module)`` called before a module holds a module or a parameter where it holds none or another."""
    if notice in _noticing:
        return
    _noticing.add(notice)

    def hook(module: nn.Module, name: str, new: nn.Module | nn.Parameter | None) -> None:
        held = module._modules if isinstance(new, nn.Module) else module._parameters
        if held.get(name) is not new:
            notice(module)

    register_module_module_registration_hook(hook)
    register_module_parameter_registration_hook(hook)
