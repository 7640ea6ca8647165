"""Stored weights that follow the parameters which training updates: stored anew where these have changed, before they are
multiplied.

# Note [Weights that follow]
`quantize_` stores a weight once. In a view that `rollout` returns, the stored tensors are those of parameters that go on
learning, and are written again, in place, so that compiled graphs and CUDA graphs go on reading them. A step of
generation reads them many times between two changes, and is bound by what it reads: it cannot afford to read the
parameters as well and to compare them, as weights that are cast once do (Note [A weight that has not changed]). So a
change is seen on the host, by four numbers that cost no launch: which tensor the module holds, its address, its version
counter, and how many steps of an optimizer it has been through, as fused optimizers count no version. What writes
otherwise, `p.data.mul_()`, a kernel or a collective of the program's own, is not seen: `refresh_rollout` is for those.

The look is where a weight is used: in eager code each use looks at that weight, a compiled graph looks at all of its
weights before it runs. Neither is traced, so that no guard and no kernel comes of it."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from te_inductor.runtime.hooks import tell_after_each
from te_inductor.tensor_tables import TensorReference, TensorTable

_LOCK = threading.RLock()  # two threads may generate at once


@dataclass(eq=False)
class FollowedWeights:
    """Parameters that are stored together, and by what their changes are seen."""

    # The modules that hold them, each with the name there, and what is beside them, such as biases.
    sources: Sequence[tuple[nn.Module, str]]
    store: Callable[[bool], None]  # writes what is stored of them; is given whether the program asks for it
    _seen: list[tuple[TensorReference, tuple[int, ...]]] = field(default_factory=list)
    _stores: bool = False  # whether it does: what writes a stored weight uses it

    def look(self, again: bool = False) -> None:
        """Stores the parameters if they have changed, or `again` in any case."""
        with _LOCK:
            if self._stores:
                return
            weights = [module._parameters[name] for module, name in self.sources]
            if not again and self._are(weights):
                return
            self._seen, self._stores = [], True  # of nothing, where `store` raises
            try:
                self.store(again)
            finally:
                self._stores = False
            held = [one for one in weights if one is not None]
            self._seen = [(TensorReference(one), _mark(one, _steps.setdefault(one, 0))) for one in held]

    def _are(self, weights: Sequence[Tensor | None]) -> bool:
        """Whether these are the parameters that were stored, as they were."""
        return len(weights) == len(self._seen) and all(
            one is not None and reference() is one and mark == _mark(one, _steps.get(one, 0))
            for one, (reference, mark) in zip(weights, self._seen, strict=True)
        )


_followed: TensorTable[FollowedWeights] = TensorTable()  # by the stored weight
_steps: TensorTable[int] = TensorTable()  # of optimizers, by the parameter


def add(stored: Iterable[Tensor], weights: FollowedWeights) -> None:
    """Has these stored weights follow."""
    for one in stored:
        _followed[one] = weights
    tell_after_each(_count)


def of(stored: Iterable[Any]) -> list[FollowedWeights]:
    """What those of some values follow that do, each once."""
    if not len(_followed):
        return []
    found = (_followed.get(one, None) for one in stored)
    return list(dict.fromkeys(one for one in found if one is not None))


def follow(stored: Iterable[Any]) -> None:
    """Has stored weights be those of their parameters as these are."""
    for one in of(stored):
        one.look()


def following(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """The compiled graph, which first looks at the stored weights among its inputs. Also where the first to call it are
    none that follow: the modules of a class share their graphs."""
    if not places:
        return compiled

    def run(*inputs: Any) -> Any:
        follow(inputs[place] for place in places)
        return compiled(*inputs)

    return run


def _mark(weight: Tensor, steps: int) -> tuple[int, ...]:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version, steps


def _count(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            steps = _steps.get(parameter, None)
            if steps is not None:
                _steps[parameter] = steps + 1
