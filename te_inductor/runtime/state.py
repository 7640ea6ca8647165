"""Where delayed scaling keeps its state: with the parameter behind each weight, so that recompiles find it again and two
models never share it. What was loaded before a quantizer exists waits there too. A parameter that takes another's place
starts with copies of both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_inductor.errors import StateError
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.replaced import when_replaced

SLOTS = ("input", "weight", "grad_output")
ROOT = "(root)"  # the compiled region's root module, where it uses a parameter of another module


@dataclass(frozen=True)
class Key:
    """Which quantizer of a parameter's: a parameter may serve several sites, as an expert's slice or a tied weight."""

    module: str  # whose forward uses it, as the compiled region sees it; "" is the parameter's own module, whichever
    part: str  # what is taken of the parameter; "" is all of it
    slot: str  # one of SLOTS
    recipe: DelayedScaling


@dataclass(frozen=True)
class Place:
    """The same as the user sees it, whose model may be a parent or a child of the compiled region."""

    alias: int  # which of the parameter's names
    use: str  # the module that uses it, where that is none of those that hold it, and the part; "" as a rule
    slot: str


@dataclass(frozen=True, eq=False)
class ScalingState:
    """Of one quantizer; `runtime/delayed.py` says what each tensor means. All fp32."""

    amax: Tensor  # ()
    scale: Tensor  # ()
    history: Tensor  # (amax_history_len,)

    def tensors(self) -> dict[str, Tensor]:
        return {"amax": self.amax, "scale": self.scale, "history": self.history}

    @property
    def unseen(self) -> bool:
        """Whether no step was ever recorded, nor anything loaded."""
        return not isinstance(self.scale, FakeTensor) and _is_unseen(self.save())

    def save(self) -> dict[str, Tensor]:
        """Copies, the history as TransformerEngine has it: the amax recorded since the last update in slot 0."""
        history = self.history.detach().clone()
        history[0] = self.amax
        return {"scale": self.scale.detach().clone(), "amax_history": history}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """In place: compiled graphs and CUDA graphs hold these tensors."""
        if "scale" in saved:
            self.scale.copy_(saved["scale"])
        if "amax_history" in saved:
            history = saved["amax_history"].to(self.history.device)
            self.amax.copy_(history[0])
            # An inf or NaN that another library let in would freeze the scale for as long as it stays.
            self.history.copy_(torch.where(torch.isfinite(history), history, 0.0))
            self.history[0] = 0.0

    def copy(self) -> "ScalingState":
        with torch.inference_mode(False), torch.no_grad():
            return ScalingState(**{name: tensor.clone() for name, tensor in self.tensors().items()})

    def join(self, saved: Mapping[str, Tensor]) -> None:
        """As if this quantizer had also seen what another one saw, whose state this is."""
        if self.unseen:
            self.load(saved)
        elif not _is_unseen(saved):
            own = self.save()
            joins = {"scale": torch.minimum, "amax_history": torch.fmax}
            self.load({name: joins[name](own[name], value.to(own[name].device)) for name, value in saved.items()})


def _is_unseen(saved: Mapping[str, Tensor]) -> bool:
    return all(bool((value == 1 if name == "scale" else value == 0).all()) for name, value in saved.items())


@dataclass
class _Loaded:
    """What was loaded for quantizers that no call has made yet."""

    names: tuple[str, ...]  # the parameter's, in the model that it was loaded into
    entries: dict[Place, dict[str, Tensor]]


_states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_loaded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_moves = 0


def shared_state(readers: Sequence[tuple[Tensor, Key]]) -> ScalingState:
    """The one state of quantizers that share it, each with its parameter, on the first one's device. Made where there is
    none yet; joined where each had its own, as in another graph, or where theirs was loaded.

    Raises:
        StateError: what was loaded does not fit.
    """
    global _moves
    when_replaced(_inherit)
    parameter, recipe = readers[0][0], readers[0][1].recipe
    held = [_held(p, key) for p, key in readers]
    known = list(dict.fromkeys(state for state in held if state is not None))
    here = [state for state in known if state.amax.device == parameter.device]
    state = here[0] if here else _empty(parameter, recipe)
    for other in known:
        if other is not state:
            _moves += 1
            state.join(other.save())
    for p, key in readers:
        saved = _waiting(p, key)
        if saved is not None:
            state.join(saved)
        states = _states.setdefault(p, {})
        states.pop(key, None)
        states[key] = state  # last, as `states_of` wants it
    return state


def _held(parameter: Tensor, key: Key) -> ScalingState | None:
    """Under this very key, or under that of another region: of a parent, or of the module alone."""
    states = _states.get(parameter, {})
    if key in states:
        return states[key]  # type: ignore[no-any-return]
    near = (
        state
        for other, state in states.items()
        if replace(other, module=key.module) == key and _same_module(other.module, key.module)
    )
    return next(near, None)


def _same_module(a: str, b: str) -> bool:
    """Whether two paths may be one module's, seen from two places: one ends with the other."""
    longer, shorter = sorted((a, b), key=len, reverse=True)
    return ROOT not in (a, b) and f".{longer}".endswith(f".{shorter}" if shorter else "")


def moves() -> int:
    """Changes whenever a quantizer gets other tensors than it had."""
    return _moves


def _waiting(parameter: Tensor, key: Key) -> dict[str, Tensor] | None:
    """What was loaded for a quantizer, which no longer waits."""
    loaded = _loaded.get(parameter)
    if loaded is None:
        return None
    place = place_of(key, loaded.names)
    if place in loaded.entries:
        check_length(name_of(place, loaded.names), loaded.entries[place], key.recipe.amax_history_len)
    return loaded.entries.pop(place, None)  # type: ignore[no-any-return]


def _empty(parameter: Tensor, recipe: DelayedScaling) -> ScalingState:
    # Made outside inference mode: a training step may be the next to write it.
    with torch.inference_mode(False), torch.no_grad():
        plain = parameter.detach()
        return ScalingState(
            amax=plain.new_zeros((), dtype=torch.float32),
            scale=plain.new_ones((), dtype=torch.float32),
            history=plain.new_zeros(recipe.amax_history_len, dtype=torch.float32),
        )


def check_length(name: str, saved: Mapping[str, Tensor], expected: int) -> None:
    found = len(saved["amax_history"]) if "amax_history" in saved else expected
    if found != expected:
        raise StateError(
            f"{name}.amax_history has {found} entries, expected {expected}, the recipe's amax_history_len;"
            f" compile with DelayedScaling(amax_history_len={found})"
        )


def states_of(parameter: Tensor, names: Sequence[str]) -> dict[Place, ScalingState]:
    """The state of every quantizer that some compile has made for a parameter, whose names in the user's model these are.
    Of several recipes', the one whose graph was new last."""
    return {place_of(key, names): state for key, state in _states.get(parameter, {}).items()}


def loaded_of(parameter: Tensor) -> dict[Place, dict[str, Tensor]]:
    """What waits for quantizers that no call has made yet."""
    loaded = _loaded.get(parameter)
    return {} if loaded is None else loaded.entries


def keep(parameter: Tensor, names: Sequence[str], place: Place, saved: Mapping[str, Tensor]) -> None:
    """Let loaded values wait for the quantizer to be made."""
    when_replaced(_inherit)
    loaded = _loaded.setdefault(parameter, _Loaded(tuple(names), {}))
    loaded.names = tuple(names)
    loaded.entries.setdefault(place, {}).update(saved)


def _inherit(old: Tensor, new: Tensor) -> None:
    """What `new` has of its own stays."""
    if old in _states:
        own = _states.setdefault(new, {})
        own.update({key: state.copy() for key, state in _states[old].items() if key not in own})
    if old in _loaded and new not in _loaded:
        names, entries = _loaded[old].names, _loaded[old].entries
        _loaded[new] = _Loaded(names, {place: dict(saved) for place, saved in entries.items()})


# Names, as `te_inductor.state_dict` shows them: `layers.0.gate_proj.input` of the parameter layers.0.gate_proj.weight,
# `experts.w1[select_0_3].input` of a slice of experts.w1, `embed[in head].input` where head uses embed.weight.


def place_of(key: Key, names: Sequence[str]) -> Place:
    """Where a quantizer is for a user who knows its parameter by these names."""
    used = key.module.split(".") if key.module else []
    holders = [name.split(".")[:-1] for name in names]
    # The region's root may lie above or below the user's, so two paths are the same module if one ends with the other.
    common = [min(len(used), len(holder)) for holder in holders]
    fits = [i for i, n in enumerate(common) if holders[i][len(holders[i]) - n :] == used[len(used) - n :]]
    if not used:
        return Place(0, key.part, key.slot)
    if not fits:
        return Place(0, ", ".join(filter(None, (f"in {key.module}", key.part))), key.slot)
    return Place(min(fits, key=lambda i: abs(len(holders[i]) - len(used))), key.part, key.slot)


def base_of(name: str) -> str:
    """What the names of a parameter's quantizers begin with: its own name, without the last `weight`."""
    module, _, leaf = name.rpartition(".")
    return module if leaf == "weight" else name


def name_of(place: Place, names: Sequence[str]) -> str:
    return join(base_of(names[min(place.alias, len(names) - 1)]), place.use, place.slot)


def join(base: str, use: str, slot: str) -> str:
    return ".".join(filter(None, (base + (f"[{use}]" if use else ""), slot)))


def parse(name: str) -> tuple[str, str, str] | None:
    """`join` backwards: base, use and slot; None where it is no quantizer's name."""
    head, _, slot = name.rpartition(".")
    base, bracket, use = head.partition("[")
    if slot not in SLOTS or (bracket and not use.endswith("]")):
        return None
    return base, use.removesuffix("]"), slot


def parameters(named: Iterator[tuple[str, Tensor]]) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Each parameter with all its names, in order."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, parameter in named:
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return [(parameter, tuple(names)) for parameter, names in found.values()]
