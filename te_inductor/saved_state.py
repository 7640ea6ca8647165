"""`te_inductor.state_dict` and `load_state_dict`: the state of delayed scaling, by module path.

One quantizer has two entries::

    layers.0.mlp.gate_proj.input.scale          ()                   the factor before the cast
    layers.0.mlp.gate_proj.input.amax_history   (amax_history_len,)  slot 0: recorded since the last update; newest last

and stands under the name of the parameter whose linear layer it serves, without a last `weight`, in the slots `input`,
`weight` and `grad_output`. Sites that read one tensor share its quantizer, and layers that run as one GEMM share all of
theirs: q, k and v have equal entries. A tied weight has one `weight` slot, under its first name, and the other slots under
the module that uses it. What is taken of a parameter, as an expert's slice, stands in brackets:
`experts.w1[select_0_3].input`; so does a module that uses a parameter of another one: `embedding[in head].input`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from te_inductor.errors import StateError, wrong_type
from te_inductor.patterns.module_path import without_wrappers
from te_inductor.runtime import state as store
from te_inductor.runtime.state import SLOTS, Place

FIELDS = ("scale", "amax_history")


class Keys(NamedTuple):
    """What `load_state_dict` found wrong."""

    missing: list[str]
    unexpected: list[str]


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of every delayed-scaling quantizer of a model, as copies; `model.state_dict()` knows nothing of it.

    `model` is what `torch.compile` returned, the model inside it, or a parent of either; keys are relative to it. State that
    was loaded and waits for the first call is part of it. A model compiled with several DelayedScaling recipes has state for
    each; that of the recipe compiled last is returned.

    Raises:
        StateError: `model` is no module.
    """
    state: dict[str, Tensor] = {}
    for parameter, names in _parameters(model):
        entries = {place: dict(saved) for place, saved in store.loaded_of(parameter).items()}
        entries |= {place: found.save() for place, found in store.states_of(parameter, names).items()}
        for place in sorted(entries, key=lambda place: (place.alias, place.use, SLOTS.index(place.slot))):
            for field, tensor in entries[place].items():
                state[f"{store.name_of(place, names)}.{field}"] = tensor.clone()
    return state


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> Keys:
    """Load what `state_dict` returned, before the first call of the compiled model or after it.

    State is changed in place, so that compiled graphs and CUDA graphs see it. What belongs to a parameter of the model, but
    to a quantizer that no call has made yet, waits for the call that makes it. Nothing is changed where this raises.

    Returns:
        Missing and unexpected keys; with `strict` both are empty.

    Raises:
        StateError: an entry has the wrong shape or value; with `strict`: an entry that `state_dict(model)` has is missing
            in `state`, or a key of `state` names no parameter of the model. A history whose length is not the recipe's is
            found at the first call where the quantizer is still to be made.
    """
    owners = {store.base_of(name): (p, names, i) for p, names in _parameters(model) for i, name in enumerate(names)}
    found: dict[tuple[str, str, str], dict[str, Tensor]] = {}
    unexpected = []
    for key, value in state.items():
        name, _, field = str(key).rpartition(".")
        parsed = store.parse(name) if field in FIELDS else None
        if parsed is None or parsed[0] not in owners:
            unexpected.append(str(key))
        else:
            found.setdefault(parsed, {})[field] = _checked(str(key), field, value)
    halves = [
        f"{store.join(*parsed)}.{field}" for parsed, saved in found.items() for field in FIELDS if field not in saved
    ]
    missing = list(dict.fromkeys([*(key for key in state_dict(model) if key not in state), *halves]))
    if strict and (missing or unexpected):
        raise StateError(_complaint(missing, unexpected))
    targets = []
    for (base, use, slot), saved in found.items():
        parameter, names, alias = owners[base]
        place = Place(alias, use, slot)
        target = store.states_of(parameter, names).get(place)
        if target is not None:
            store.check_length(store.join(base, use, slot), saved, len(target.history))
        targets.append((parameter, names, place, target, saved))
    loaded = set()
    for parameter, names, place, target, saved in targets:
        if target is None:
            store.keep(parameter, names, place, saved)
        elif target in loaded:  # shared by several quantizers, which need not have been so in the model that was saved
            target.join(saved)
        else:
            target.load(saved)
            loaded.add(target)
    return Keys(missing, unexpected)


def _parameters(model: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    if not isinstance(model, nn.Module):
        raise StateError(wrong_type("model", model, "the module that was compiled, or one that holds it"))
    named = model.named_parameters(remove_duplicate=False)
    return store.parameters((without_wrappers(name), parameter) for name, parameter in named)


def _checked(key: str, field: str, value: object) -> Tensor:
    """A copy of an entry, in fp32."""
    if not isinstance(value, Tensor):
        raise StateError(wrong_type(key, value, "a tensor"))
    if field == "scale" and not (value.numel() == 1 and 0 < value.item() < torch.inf):
        raise StateError(f"{key} is {value.tolist()!r:.80}, expected one positive finite number")
    if field == "amax_history" and (value.dim() != 1 or not len(value)):
        raise StateError(f"{key} has shape {tuple(value.shape)}, expected (amax_history_len,)")
    copy = value.detach().to(torch.float32, copy=True)
    return copy.reshape(()) if field == "scale" else copy


def _complaint(missing: list[str], unexpected: list[str]) -> str:
    lines = []
    if missing:
        lines.append(f"state lacks {_some(missing)}: expected every entry that state_dict(model) has")
    if unexpected:
        lines.append(
            f"state has {_some(unexpected)}: expected <module path>.<{'|'.join(SLOTS)}>.<{'|'.join(FIELDS)}> of a parameter"
            " of the model"
        )
    lines.append("load it into the model that it was saved from, or pass strict=False to load what fits")
    return "; ".join(lines)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
