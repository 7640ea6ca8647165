"""Training that goes on without the state of delayed scaling it had.

# Note [Lost state]
Parameters whose quantizers are new are remembered until an optimizer's step has them. If the optimizer has state of
such a parameter before that step, as behind `optimizer.load_state_dict`, the parameter was trained before, and its
scales are lost; that is said. Where the forward runs inside of the step, in its closure, as Lightning has it, the count
of steps behind it tells. A newly initialised model has no optimizer state then, and neither has one that is
fine-tuned from weights alone, for which nobody has scales to load. Not noticed: optimizers without state, those that
keep parameters of their own, and a step that is compiled."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from te_inductor import compat
from te_inductor.diagnostics import say, state_was_lost
from te_inductor.runtime.hooks import check_before_each, tell_after_each
from te_inductor.tensor_tables import TensorTable

_new: TensorTable[str] = TensorTable()  # parameters that wait for a step, with their module paths
_noted: TensorTable[bool] = TensorTable()  # all that ever did


def note_new(parameter: Tensor, site: str) -> None:
    """A training graph has made a quantizer of this parameter, and there was no state for it."""
    if not parameter.requires_grad or parameter in _noted:
        return
    _new[parameter] = site
    _noted[parameter] = True
    check_before_each(_before_step)
    tell_after_each(_behind_step)


def _before_step(optimizer: Optimizer) -> None:
    _say_what_was_lost(optimizer, _is_trained)


def _behind_step(optimizer: Optimizer) -> None:
    """Looks at parameters whose quantizers were made in the step itself."""
    _say_what_was_lost(optimizer, lambda state: float(state.get("step", 1)) > 1)


def _say_what_was_lost(optimizer: Optimizer, is_trained: Callable[[dict[str, Any]], bool]) -> None:
    if not len(_new) or compat.is_compiling():
        return
    found = {}
    for parameter, whole in _stepped(optimizer):
        site = _new.pop(whole, None)
        if site is not None and is_trained(optimizer.state.get(parameter, {})):
            found[site] = True
    if found:
        say(state_was_lost(found), "warn")  # no error: there may be nothing to load


def _stepped(optimizer: Optimizer) -> Iterable[tuple[Tensor, Tensor]]:
    """The optimizer's parameters, each with what a graph sees of it."""
    wholes = {id(shard): one.whole for one in compat.gathered() for shard in one.shards if one.whole is not None}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, wholes.get(id(parameter), parameter)


def _is_trained(state: dict[str, Any]) -> bool:
    """Whether an optimizer's state of a parameter is of steps; some make it before, all zeros but for a count."""
    tensors = [value for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
    return float(state.get("step", 1)) > 0 and any(bool((value != 0).any()) for value in tensors)
