"""Stored weights that follow the parameters which training updates: stored anew where these have changed, before they are
multiplied.

# Note [Weights that follow]
`quantize_` stores a weight once. In a view that `rollout` returns, the stored tensors are those of parameters that go on
learning, and are written again, in place, so that compiled graphs and CUDA graphs go on reading them. A step of
generation reads them many times between two changes, and is bound by what it reads: it cannot afford to read the
parameters as well and to compare them, as weights that are cast once do (Note [A weight that has not changed]). So a
change is seen on the host, by four numbers that cost no launch: which tensor the module holds, its address, its version
counter, and how many steps of an optimizer it has been through, as fused optimizers count no version. Where it learns and is
a part of a larger buffer, as frameworks make them, which copy all at once from what their optimizers step, any optimizer's
steps count, but under FSDP2, where not all ranks' shards need be parts. What writes
otherwise, `p.data.mul_()`, a kernel or a collective of the program's own, is not seen: `refresh_rollout` is for those.

The look is where a weight is used: in eager code each use looks at that weight, a compiled graph looks at all of its
weights before it runs. Neither is traced, so that no guard and no kernel comes of it. A look that sees a change stores
whatever has changed in the view, not only the weights that it looks at: a few launches serve all weights, and the host
waits once, for whether their values are finite. What cannot be stored is an error where it is looked at, before anything
is written, and is left as it is where it is not.

A view copies the model's modules, and so does not follow where the model gets others, as by peft or a parametrization.
torch tells of a module's new parts. A look behind that compares what the two are made of, as does one that stores, and
raises.

Parameters that FSDP2 shards are gathered where they have changed, which all ranks do at once. A look that sees nothing asks
no other rank, so that ranks may generate for as long as they like, each for itself. One that sees a change waits on the
host, by the key-value store, until all ranks have come to one that does; then all of them store what any of them has seen,
in one order, or none stores what one of them cannot (`api/rollout_shards.py`)."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from te_inductor.errors import OptionError, StoredWeightError
from te_inductor.runtime.hooks import tell_after_each, when_built
from te_inductor.tensor_tables import TensorReference, TensorTable

_LOCK = threading.RLock()  # two threads may generate at once
_FOLLOWS = "_te_follows"  # a stored weight's attribute, which lives and dies with it


class ParameterPlace(NamedTuple):
    """The place of a parameter, whichever tensor is there."""

    held: Mapping[str, Any]
    name: str
    is_sharded: bool = False  # whether that is a DTensor, of which the local tensor is what changes


@dataclass(eq=False)
class FollowedWeights:
    """Parameters that are stored together, and by what their changes are seen."""

    view: "FollowedView"
    sources: Sequence[ParameterPlace]  # of them, and of what is beside them, such as biases
    group: Any  # what the view's `store` is given of them
    # The parameters, the count of each one's steps, and what address, version and steps were when it was stored.
    _seen: list[tuple[TensorReference, list[int], int, int, int]] = field(default_factory=list)

    def are_stored(self) -> bool:
        """Whether the modules hold the parameters that were stored, as they were."""
        if len(self._seen) != len(self.sources):
            return False
        for place, (reference, steps, address, version, count) in zip(self.sources, self._seen, strict=True):
            held, name, is_sharded = place
            one = held.get(name)  # of hundreds at each call: no call of ours that can be left out
            if one is None or steps[0] != count or not reference.is_to(one):
                return False
            if is_sharded:
                one = one._local_tensor
            if one.data_ptr() != address or (0 if one.is_inference() else one._version) != version:
                return False
        return True

    def note(self) -> None:
        """Takes the parameters for stored as they are."""
        self._seen = []
        for held, name, is_sharded in self.sources:
            one = held.get(name)
            if one is not None:
                local = one._local_tensor if is_sharded else one
                in_buffer = one.requires_grad and not is_sharded and one.nbytes < one.untyped_storage().nbytes()
                steps = _any_steps if in_buffer else _steps.setdefault(one, [0])
                version = 0 if local.is_inference() else local._version
                self._seen.append((TensorReference(one), steps, local.data_ptr(), version, steps[0]))

    def forget(self) -> None:
        """Takes the parameters for changed."""
        self._seen = []

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise OptionError(
            "copy.deepcopy of a view of te_inductor.rollout, or of a part of it, expected one of its model, as the copy's"
            " stored weights would follow no parameters; copied = copy.deepcopy(model), then te_inductor.rollout(copied), or"
            " te_inductor.quantize_(copied), whose weights stay"
        )


# Is given what was looked at and has changed, what else of the view has, and whether the program asks for it; returns
# what it has stored.
Store = Callable[[Sequence[FollowedWeights], Sequence[FollowedWeights], bool], Iterable[FollowedWeights]]


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # what is in a module that computes what this one does


class FollowedModules:
    """The modules of a model, as its view has copied them: the modules in each, its parameters' names, and which of
    peft's adapters are merged."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.parts = {module: self._parts_of(module) for module in modules}
        self.tied: list[tuple[ParameterPlace, ParameterPlace]] = []  # of one parameter, which is stored once
        self.is_suspect = False  # whether one of them has got a part

    def check(self) -> None:
        """
        Raises:
            StoredWeightError: a module has other parts, or layers that had one weight have two.
        """
        for module, before in self.parts.items():
            if (now := self._parts_of(module)) != before:
                name = next(name for name in (*before, *now) if before.get(name) != now.get(name))
                raise StoredWeightError(
                    f"{name} of a {type(module).__name__} is not what it was when a view of the model was made, expected the"
                    " same modules, parameters and merged adapters, as the view has copied them; call"
                    " te_inductor.rollout(model) again"
                )
        for places in self.tied:
            one, other = (place.held[place.name] for place in places)
            if one is not other and one.data_ptr() != other.data_ptr():
                raise StoredWeightError(
                    f"{places[0].name} {list(one.shape)} was one parameter with {places[1].name} of another layer when a"
                    " view of the model was made, expected it to be, as both are stored as one; call"
                    " te_inductor.rollout(model) again"
                )
        self.is_suspect = False

    @staticmethod
    def _parts_of(module: nn.Module) -> dict[str, Any]:
        parts: dict[str, Any] = {name: name for name, one in module._parameters.items() if one is not None}
        for name, one in module._modules.items():
            while one is not None and (inner := next(filter(None, map(one._modules.get, _WRAPPERS)), None)) is not None:
                one = inner
            parts[name] = one
        return parts | {"merged_adapters": tuple(getattr(module, "merged_adapters", ()))}


@dataclass(eq=False)
class FollowedView:
    """All that follows in one view."""

    store: Store
    modules: FollowedModules
    weights: list[FollowedWeights] = field(default_factory=list)
    _stores: bool = False  # whether it does: what writes a stored weight uses it

    def look(self, weights: Sequence[FollowedWeights], again: bool = False) -> None:
        """Stores what has changed, if some of these weights have, or these `again` in any case."""
        with _LOCK:
            if self._stores:
                return
            changed = [one for one in weights if again or not one.are_stored()]
            if changed or self.modules.is_suspect:
                self.modules.check()
            if not changed:
                return
            others = [one for one in self.weights if one not in changed and not one.are_stored()]
            for one in (*changed, *others):
                one.forget()  # also where `store` raises
            self._stores = True
            try:
                stored = self.store(changed, others, again)
            finally:
                self._stores = False
            for one in stored:
                one.note()


_views: WeakSet[FollowedView] = WeakSet()
_steps: TensorTable[list[int]] = TensorTable()  # the number of steps of optimizers, by the parameter
_any_steps = [0]  # of all optimizers


def add(stored: Iterable[Tensor], weights: FollowedWeights) -> None:
    """Has these stored weights follow."""
    for one in stored:
        setattr(one, _FOLLOWS, weights)
    _views.add(weights.view)
    tell_after_each(_count)
    when_built(_suspect)


def _suspect(module: nn.Module) -> None:
    for view in list(_views):
        view.modules.is_suspect |= module in view.modules.parts


def is_followed(value: Any) -> bool:
    return hasattr(value, _FOLLOWS)


def of(stored: Iterable[Any]) -> dict[FollowedView, list[FollowedWeights]]:
    """What those of some values follow that do, each once, by their views."""
    if not len(_views):
        return {}
    found: dict[FollowedView, list[FollowedWeights]] = {}
    for one in dict.fromkeys([getattr(one, _FOLLOWS, None) for one in stored]):
        if one is not None:
            found.setdefault(one.view, []).append(one)
    return found


def follow(stored: Iterable[Any]) -> None:
    """Has stored weights be those of their parameters as these are."""
    for view, weights in of(stored).items():
        view.look(weights)


def following(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """The compiled graph, which first looks at the stored weights among its inputs. Also where the first to call it are
    none that follow: the modules of a class share their graphs."""
    if not places:
        return compiled

    def run(*inputs: Any) -> Any:
        follow(inputs[place] for place in places)
        return compiled(*inputs)

    return run


def _count(optimizer: Optimizer) -> None:
    _any_steps[0] += 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            steps = _steps.get(parameter, None)
            if steps is not None:
                steps[0] += 1
