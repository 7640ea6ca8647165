"""The place where delayed scaling keeps its state: with the parameter behind each weight, so that recompiles find it
again and two models never share it. What was loaded before a quantizer exists waits there too. A parameter that takes
another's place starts with copies of both."""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from te_inductor import compat, targets
from te_inductor.distributed.decisions import is_due
from te_inductor.errors import StateError
from te_inductor.presentation.paths import grouped
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.hooks import when_replaced
from te_inductor.runtime.state.state_sites import StateSite, same_site
from te_inductor.tensor_tables import TensorTable


@dataclass(frozen=True)
class Key:
    """A key of one of a parameter's quantizers."""

    site: StateSite
    recipe: DelayedScaling


@dataclass(eq=False)
class QuantizerState:
    """The state of one quantizer; `runtime/eager/delayed.py` says what its numbers mean."""

    tensor: Tensor  # (amax_history_len + 1,) fp32
    # What the host knows; `note_history` asks the device.
    has_history: bool = False  # whether the scale follows from some amax, or was loaded
    recordings: int = 0  # calls that may have recorded an amax; their backwards may never have come
    asked: int = 0  # how many of those there were when the device was last asked
    loads: int = 0  # how often it was loaded
    earlier: tuple[int, int] = (0, 0)  # what a guard had done when it was saved: `misfits.acts_of`
    moved: bool = False  # whether a guard has moved the layers: `recipe_behind`
    unsuited: bool = False  # whether the last step that a guard knows of ended with a scale that would not have suited

    def __post_init__(self) -> None:
        # Views, which no call has to make.
        self.history, self.scale, self.amax = self.tensor[:-1], self.tensor[-1], self.tensor[0]

    @property
    def lacks_history(self) -> bool:
        """Whether no step was ever recorded, nor anything loaded."""
        return not self.is_fake and _lacks_history(self.save())

    @property
    def is_due(self) -> bool:
        """Whether to ask the device again."""
        return not self.has_history and is_due(self.recordings, self.asked)

    @property
    def is_fake(self) -> bool:
        return isinstance(self.tensor, FakeTensor)

    def save(self) -> dict[str, Tensor]:
        """Copies, as TransformerEngine has them."""
        saved = {"scale": self.scale.detach().clone(), "amax_history": self.history.detach().clone()}
        if any(self.earlier) or self.moved:
            saved["guard"] = torch.tensor([*self.earlier, self.moved], dtype=torch.float32, device="cpu")
        return saved

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Loads in place: compiled graphs and CUDA graphs hold these tensors."""
        global _moves, _any_moved
        _moves += 1  # calls look again
        self.has_history, self.recordings, self.asked = not _lacks_history(saved), 0, 0
        self.loads += 1
        if "guard" in saved:
            kept_out, own, moved = map(int, saved["guard"].tolist())
            self.earlier, self.moved = (kept_out, own), bool(moved)
            _any_moved = _any_moved or self.moved
        if "scale" in saved:
            self.scale.copy_(saved["scale"])
        if "amax_history" in saved:
            history = saved["amax_history"].to(self.history.device)
            # An inf or NaN that another library let in would freeze the scale for as long as it stays.
            self.history.copy_(torch.where(torch.isfinite(history), history, 0.0))
            self.history[0] = history[0]

    def copy(self) -> "QuantizerState":
        with torch.inference_mode(False), torch.no_grad():
            return QuantizerState(self.tensor.clone(), self.has_history, moved=self.moved)

    def join(self, saved: Mapping[str, Tensor]) -> None:
        """Makes it as if this quantizer had also seen what another one saw, whose state this is. It counts as loaded
        whatever either has seen, which other ranks need not have."""
        loads = self.loads + 1
        if self.lacks_history:
            self.load(saved)
        elif not _lacks_history(saved):
            own = self.save()
            joins = {"scale": torch.minimum, "amax_history": torch.fmax, "guard": torch.maximum}
            pairs = {name: (own.get(name, value), value) for name, value in saved.items()}
            self.load({name: joins[name](one, other.to(one.device)) for name, (one, other) in pairs.items()})
        self.loads = loads


def _lacks_history(saved: Mapping[str, Tensor]) -> bool:
    empty = {"scale": 1, "amax_history": 0}
    return all(bool((saved[name] == value).all()) for name, value in empty.items() if name in saved)


@torch.no_grad()
def note_history(states: Sequence[QuantizerState]) -> None:
    """Ask the devices which of these have a scale that some amax, or somebody's state, has given them. One copy to the
    host for each device, which waits for it."""
    for group in grouped(states, lambda state: state.scale.device).values():
        scales = torch.stack([state.scale for state in group])
        earlier = torch.stack([(state.history[1:] > 0).any() for state in group])
        for state, found in zip(group, ((scales != 1) | earlier).tolist(), strict=True):
            state.asked, state.has_history = state.recordings, found


T = TypeVar("T")

_states: TensorTable[dict[Key, QuantizerState]] = TensorTable()
_loaded: TensorTable[dict[StateSite, dict[str, Tensor]]] = TensorTable()
_of_shards: TensorTable[dict[Key, QuantizerState]] = TensorTable()  # until the parameter is gathered first
_moves = 0
BLOCK = 128  # of recipe "block", in either direction
_any_moved = False  # whether some layer of this process may have been

# Held while state is made, joined, loaded or handed on, so that two threads never make two states of one quantizer.
# Reentrant: loading a parameter may hand on state.
LOCK = threading.RLock()


def shared_state(readers: Sequence[tuple[Tensor, Key]], of_graph: Mapping[int, Collection[Key]]) -> QuantizerState:
    """The one state of quantizers that share it, each with its parameter, on the first one's device. Made where there
    is none yet; joined where each had its own, as in another graph, or where theirs was loaded. `of_graph` are all
    quantizers of the graph by their parameter's id: two of them are not one, however alike their paths.

    Raises:
        StateError: what was loaded does not fit.
    """
    global _moves
    when_replaced(_inherit)
    parameter, recipe = readers[0][0], readers[0][1].recipe
    known: list[QuantizerState] = []
    copies: list[dict[str, Tensor]] = []
    for p, key in readers:
        others = [other.site for other in of_graph[id(p)] if other.recipe == recipe and other != key]
        states = {other.site: state for other, state in _states.get(p, {}).items() if other.recipe == recipe}
        held, alone = _of_site(states, key.site, others)
        if alone:
            known += held.values()
        else:  # it may be any of them: a scale that suits them all is no wrong one
            copies += [state.save() for state in held.values()]
        waiting, alone = _of_site(loaded_of(p), key.site, others)
        for site, saved in waiting.items():
            check_length(".".join(filter(None, (site.module, site.part, site.slot))), saved, recipe.amax_history_len)
        if alone or key.site not in states:
            copies += waiting.values()
        for site in waiting if alone else ():
            del _loaded[p][site]
    here = [state for state in known if state.amax.device == parameter.device]
    state = here[0] if here else _empty(parameter, recipe)
    for other in dict.fromkeys(known):
        if other is not state:
            _moves += 1
            state.join(other.save())
    for saved in copies:
        state.join(saved)
    for p, key in readers:
        own = _states.setdefault(p, {})
        own.pop(key, None)
        own[key] = state  # last, as `states_of` wants it
    return state


def has_history(parameter: Tensor, recipe: DelayedScaling) -> bool:
    """Whether all quantizers that a parameter has by a recipe are known to have history, or what waits to be loaded
    has."""
    waiting = _loaded.get(parameter, {})
    if waiting:
        return not any(map(_lacks_history, waiting.values()))
    states = [state for key, state in _states.get(parameter, {}).items() if key.recipe == recipe]
    return bool(states) and all(state.has_history for state in states)


def _of_site(
    found: Mapping[StateSite, T], site: StateSite, others: Sequence[StateSite]
) -> tuple[dict[StateSite, T], bool]:
    """What a parameter has under this very site, or under what may be the same one seen from another root; whether it
    is this one's for sure. `others` are those of the same graph: none of them is it."""
    likely = same_site((other for other in found if other not in others), site)
    states = {id(found[other]) for other in likely}
    alone = len(states) == 1 and all(same_site([site, *others], other) == [site] for other in likely)
    return {other: found[other] for other in likely}, alone


def move(states: Collection[QuantizerState]) -> None:
    """Marks quantizers whose layers run by another recipe from their next compile on."""
    global _any_moved
    _any_moved = True
    for state in states:
        state.moved = True


def any_moved() -> bool:
    """Whether any layer of this process may have been moved."""
    return _any_moved


def is_moved(parameter: Tensor) -> bool:
    """Whether a guard has moved the layers of a parameter, here or in the run whose state waits to be loaded."""
    if not _any_moved:
        return False
    waiting = (saved["guard"][2] for saved in loaded_of(parameter).values() if "guard" in saved)
    return any(state.moved for state in _states.get(parameter, {}).values()) or any(waiting)


def recipe_behind(parameter: Tensor) -> str:
    """The recipe to which a guard moves the layers of a parameter: Note [Layers that a guard moves] in misfits.py."""
    can, ability = targets.of(parameter.device).can, targets.Ability
    divides = all(size % BLOCK == 0 for size in parameter.shape[-2:])
    return "block" if divides and (ability.BLOCK_SCALES in can or ability.FP8 not in can) else "rowwise"


def moves() -> int:
    """Changes whenever a quantizer gets other tensors than it had."""
    return _moves


def _empty(parameter: Tensor, recipe: DelayedScaling) -> QuantizerState:
    # Made outside inference mode: a training step may be the next to write it.
    with torch.inference_mode(False), torch.no_grad():
        plain = compat.local_of(parameter.detach())
        state = plain.new_zeros(recipe.amax_history_len + 1, dtype=torch.float32)
        state[-1] = 1.0
        return QuantizerState(state)


def check_length(name: str, saved: Mapping[str, Tensor], expected: int) -> None:
    found = len(saved["amax_history"]) if "amax_history" in saved else expected
    if found != expected:
        raise StateError(
            f"{name}.amax_history has {found} entries, expected {expected}, the recipe's amax_history_len;"
            f" compile with DelayedScaling(amax_history_len={found})"
        )


def states_of(parameter: Tensor) -> dict[StateSite, QuantizerState]:
    """The state of every quantizer that some compile has made for a parameter. Of several recipes', the one whose graph
    was new last."""
    return {key.site: state for key, state in _states.get(parameter, {}).items()}


def quantizers_of(parameter: Tensor) -> dict[Key, QuantizerState]:
    """The state of every quantizer that some compile has made for a parameter, the one whose graph was new last behind
    the others."""
    return dict(_states.get(parameter, {}))


def any_state() -> bool:
    """Whether any parameter of this process has state, or state that waits."""
    return len(_states) > 0 or len(_loaded) > 0


def loaded_of(parameter: Tensor) -> dict[StateSite, dict[str, Tensor]]:
    """What waits for quantizers that no call has made yet."""
    return _loaded.get(parameter, {})


def keep(parameter: Tensor, site: StateSite, saved: Mapping[str, Tensor]) -> None:
    """Let loaded values wait for the quantizer to be made."""
    with LOCK:
        global _any_moved
        when_replaced(_inherit)
        _loaded.setdefault(parameter, {}).setdefault(site, {}).update(saved)
        _any_moved = _any_moved or "guard" in saved


def take_from_shards() -> None:
    """State belongs to parameters as graphs see them. Under FSDP2 these are gathered at the first forward: what was
    loaded before waits with a shard until then, as does the state of a weight that is cast before it is gathered."""
    if not (_loaded or _of_shards):
        return
    for shards, whole in compat.gathered():
        if whole is None:
            continue
        for shard in shards:
            for site, saved in _loaded.pop(shard, {}).items():
                _loaded.setdefault(whole, {}).setdefault(site, {}).update(saved)
            for key, state in _of_shards.pop(shard, {}).items():
                _states.setdefault(whole, {})[key] = state


def keep_with_shard(shard: Tensor, key: Key, state: QuantizerState) -> None:
    """Give a quantizer of a parameter that FSDP2 shards its state, which starts with what was loaded for it.

    Raises:
        StateError: what was loaded does not fit.
    """
    with LOCK:
        when_replaced(_inherit)
        saved = _loaded.get(shard, {}).pop(key.site, None)
        if saved is not None:
            check_length(key.site.slot, saved, key.recipe.amax_history_len)
            state.load(saved)
        _of_shards.setdefault(shard, {})[key] = state


def _inherit(old: Tensor, new: Tensor) -> None:
    """What `new` has of its own stays."""
    with LOCK:
        if old in _states:
            own = _states.setdefault(new, {})
            own.update({key: state.copy() for key, state in _states[old].items() if key not in own})
        if old in _loaded and new not in _loaded:
            _loaded[new] = {site: dict(saved) for site, saved in _loaded[old].items()}


def parameters(named: Iterator[tuple[str, Tensor]]) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Each parameter with all its names, in order."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, parameter in named:
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return [(parameter, tuple(names)) for parameter, names in found.values()]
