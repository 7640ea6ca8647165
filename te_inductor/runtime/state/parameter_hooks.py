"""Parameters that take another's place in a module, as `load_state_dict(assign=True)` puts them there."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_calling: set[Callable[[Tensor, Tensor], None]] = set()


def when_replaced(inherit: Callable[[Tensor, Tensor], None]) -> None:
    """Has ``inherit(old, new)`` called before a module holds `new` by the name by which it held `old`. torch has
    one list of such hooks for all modules; ours looks one name up."""
    if inherit in _calling:
        return
    _calling.add(inherit)

    def hook(module: nn.Module, name: str, new: nn.Parameter | None) -> None:
        old = module._parameters.get(name)
        if old is not None and new is not None and new is not old:
            inherit(old, new)

    register_module_parameter_registration_hook(hook)
