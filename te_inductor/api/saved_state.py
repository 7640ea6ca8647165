"""`te_inductor.state_dict` and `load_state_dict`: the state of delayed scaling, by module path.

One quantizer has two entries, and a third where a guard heals::

    layers.0.mlp.gate_proj.input.scale          ()                   the factor before the cast
    layers.0.mlp.gate_proj.input.amax_history   (amax_history_len,)  slot 0: recorded since the last update; newest last
    layers.0.mlp.gate_proj.input.guard          (3,)                 steps kept out, steps by own amaxes, 1 if moved

and stands under the name of the parameter whose linear layer it serves, without a last `weight`, in the slots `input`,
`weight` and `grad_output`. Sites that read one tensor share its quantizer, and layers that run as one GEMM share all of
theirs: q, k and v have equal entries. A tied weight has one `weight` slot, under its first name, and the other slots
under the module that uses it. What is taken of a parameter, as an expert's slice, stands in brackets:
`experts.w1[select_0_3].input`; so does a module that uses a parameter of another one: `embedding[in head].input`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from te_inductor import compat
from te_inductor.errors import StateError, wrong_type
from te_inductor.presentation.paths import first_of, without_wrappers
from te_inductor.runtime.eager.delayed import FP32_MAX, FP32_TINY
from te_inductor.runtime.state import store
from te_inductor.runtime.state.misfits import ACTS, acts_of, restart_acts
from te_inductor.runtime.state.state_sites import (
    ROOT,
    SLOTS,
    Place,
    StateSite,
    base_of,
    join,
    name_of,
    parse,
    place_of,
    same_site,
    site_of,
)
from te_inductor.runtime.state.store import QuantizerState, check_length

FIELDS = ("scale", "amax_history")
T = TypeVar("T")


class Keys(NamedTuple):
    """What `load_state_dict` found wrong."""

    missing: list[str]
    unexpected: list[str]


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of every delayed-scaling quantizer of a model, as copies; `model.state_dict()` knows nothing of it.

    `model` is what `torch.compile` returned, the model inside it, or a parent of either; keys are relative to it. State
    that was loaded and waits for the first call is part of it. A model compiled with several DelayedScaling recipes has
    state for each; that of the recipe compiled last is returned.

    Raises:
        StateError: `model` is no module, or which of a tied parameter's modules some state belongs to cannot be told
            from inside it.
    """
    with store.LOCK:
        return _state_dict(model)


def _state_dict(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    parameters = parameters_of(model)
    acts = acts_of([found for parameter, _ in parameters for found in store.states_of(parameter).values()])
    for parameter, names in parameters:
        entries = places_of(store.loaded_of(parameter), names)
        held = places_of(store.states_of(parameter), names)
        entries |= {place: found.save() | acts.get(found, {}) for place, found in held.items()}
        for place in sorted(entries, key=order_of):
            for field, tensor in entries[place].items():
                state[f"{name_of(place, names)}.{field}"] = tensor.clone()
    return state


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> Keys:
    """Load what `state_dict` returned, before the first call of the compiled model or after it.

    State is changed in place, so that compiled graphs and CUDA graphs see it. What belongs to a parameter of the model,
    but to a quantizer that no call has made yet, waits for the call that makes it. Nothing is changed where this
    raises.

    Returns:
        Missing and unexpected keys; with `strict` both are empty.

    Raises:
        StateError: an entry has the wrong shape or value; with `strict`: an entry that `state_dict(model)` has is missing
            in `state`, or a key of `state` names no parameter of the model. A history whose length is not the recipe's is
            found at the first call where the quantizer is still to be made.
    """
    with store.LOCK:
        return _load_state_dict(model, state, strict)


def _load_state_dict(model: nn.Module, state: Mapping[str, Tensor], strict: bool) -> Keys:
    owners = {
        base_of(name): (p, names, i) for p, names in parameters_of(model, bool(state)) for i, name in enumerate(names)
    }
    found: dict[tuple[str, str, str], dict[str, Tensor]] = {}
    unexpected = []
    for key, value in _entries(state):
        name, _, field = key.rpartition(".")
        parsed = parse(name, owners) if field in (*FIELDS, ACTS) else None
        if parsed is None:
            unexpected.append(key)
        else:
            found.setdefault(parsed, {})[field] = _checked(key, field, value)
    halves = [f"{join(*parsed)}.{field}" for parsed, saved in found.items() for field in FIELDS if field not in saved]
    held = (key for key in _state_dict(model) if not key.endswith(f".{ACTS}"))
    missing = list(dict.fromkeys([*(key for key in held if key not in state), *halves]))
    if strict and (missing or unexpected):
        raise StateError(_complaint(missing, unexpected))
    targets = [(_target(*owners[base], use, slot, saved), saved) for (base, use, slot), saved in found.items()]
    loaded = set()
    for target, saved in targets:
        if isinstance(target, QuantizerState) and target in loaded:
            target.join(saved)  # several quantizers share it, which need not have been so in the model that was saved
        elif isinstance(target, QuantizerState):
            target.load(saved)
            loaded.add(target)
            restart_acts(target)
        else:
            store.keep(*target, saved)
    return Keys(missing, unexpected)


def _target(
    parameter: Tensor, names: tuple[str, ...], alias: int, use: str, slot: str, saved: dict[str, Tensor]
) -> QuantizerState | tuple[Tensor, StateSite]:
    """Finds where an entry goes: the state that there is, or the site for which it waits."""
    place = Place(alias, use, slot)
    site, states, waiting = site_of(place, names), store.states_of(parameter), store.loaded_of(parameter)
    held = same_site(states, site)
    if held:
        check_length(name_of(place, names), saved, len(states[held[0]].history))
        return states[held[0]]
    return parameter, next(iter(same_site(waiting, site)), site)


def places_of(sites: Mapping[StateSite, T], names: Sequence[str]) -> dict[Place, T]:
    """What belongs to a parameter's sites, as a user sees them who knows it by these names."""
    places: dict[Place, StateSite] = {}
    for site in sites:
        place = place_of(site, names)
        other = places.setdefault(place, site)
        if not same_site([other], site):
            first, second = sorted(one.module or ROOT for one in (other, site))
            raise StateError(
                f"{names[0]} serves {first} and {second}, whose state cannot be told apart"
                " from inside the module that was passed; pass one that holds both"
            )
        places[place] = site
    return {place: sites[site] for place, site in places.items()}


def order_of(place: Place) -> tuple[int, str, int]:
    """The order of a parameter's entries."""
    return place.alias, place.use, SLOTS.index(place.slot)


def parameters_of(model: nn.Module, loading: bool = False) -> list[tuple[Tensor, tuple[str, ...]]]:
    """The parameters of a model as graphs see them, each with all its names.

    Raises:
        StateError: `model` is no module, or what a graph sees of a parameter cannot be found.
    """
    if not isinstance(model, nn.Module):
        raise StateError(wrong_type("model", model, "the module that was compiled, or one that holds it"))
    named = [(without_wrappers(name), p) for name, p in model.named_parameters(remove_duplicate=False)]
    store.take_from_shards()
    wholes = {id(p): one.whole for one in compat.gathered() for p in (*one.shards, one.whole)}
    _check_sharding(model, named, wholes, loading)
    return store.parameters((name, p if wholes.get(id(p)) is None else wholes[id(p)]) for name, p in named)  # type: ignore[misc]


def _check_sharding(
    model: nn.Module, named: Sequence[tuple[str, Tensor]], wholes: Mapping[int, Tensor | None], loading: bool
) -> None:
    """Checks that what a graph sees of each parameter can be found.

    Raises:
        StateError: it cannot.
    """
    modules = list(model.modules())
    lost = [name for name, p in named if compat.mesh_of_dtensor(p) is not None and id(p) not in wholes]
    if lost and any(map(compat.is_sharded_module, modules)):
        raise StateError(
            f"FSDP shards {first_of(lost, 4)}, and what it gathers of them, with which the state is kept, cannot be found;"
            " expected parameters of modules that torch.distributed.fsdp.fully_shard was called with"
        )
    if (loading or store.any_state()) and any(map(compat.is_flattened_module, modules)):
        raise StateError(
            "the model is sharded by FullyShardedDataParallel, whose layers hold no parameters for state to be kept"
            " with; expected torch.distributed.fsdp.fully_shard"
        )


def _entries(state: Mapping[str, Tensor]) -> Iterable[tuple[str, object]]:
    if not isinstance(state, Mapping):
        raise StateError(wrong_type("state", state, "what te_inductor.state_dict returned"))
    return ((str(key), value) for key, value in state.items())


def _checked(key: str, field: str, value: object) -> Tensor:
    """A copy of an entry, in fp32."""
    if not isinstance(value, Tensor) or value.is_complex():
        raise StateError(wrong_type(key, value, "a tensor of real numbers"))
    copy = value.detach().to(torch.float32, copy=True)
    if field == "scale" and not (copy.numel() == 1 and FP32_TINY <= copy.item() <= FP32_MAX):
        raise StateError(f"{key} is {value.tolist()!r:.80}, expected one positive number that fp32 can invert")
    if field == "amax_history" and (copy.dim() != 1 or not len(copy)):
        raise StateError(f"{key} has shape {tuple(value.shape)}, expected (amax_history_len,)")
    if field == ACTS and (copy.shape != (3,) or bool((copy < 0).any())):
        raise StateError(
            f"{key} is {value.tolist()!r:.80}, expected two counts of steps, and 1 where layers were moved"
        )
    if field == "amax_history" and bool((copy < 0).any()):
        raise StateError(f"{key} holds {copy.min().item():.6g}, expected magnitudes")
    return copy.reshape(()) if field == "scale" else copy


def _complaint(missing: list[str], unexpected: list[str]) -> str:
    lines = []
    if missing:
        lines.append(f"state lacks {first_of(missing, 4)}: expected every entry that state_dict(model) has")
    if unexpected:
        lines.append(
            f"state has {first_of(unexpected, 4)}: expected <module path>.<{'|'.join(SLOTS)}>.<{'|'.join(FIELDS)}> of a"
            " parameter of the model"
        )
    lines.append("load it into the model that it was saved from, or pass strict=False to load what fits")
    return "; ".join(lines)
