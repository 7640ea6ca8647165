"""What each tensor of a model is loaded from, found by keys, dtypes and shapes; and every key that does not fit."""

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_inductor.api import checkpoint_formats as formats
from te_inductor.api import quantization
from te_inductor.api.checkpoint_experts import FUSINGS, PARTS_OF
from te_inductor.api.checkpoint_files import Checkpoint, listed
from te_inductor.api.checkpoint_formats.protocol import HIGH, CheckpointFormat, Shape
from te_inductor.errors import CheckpointError
from te_inductor.ops.stored_weight import StoredWeight, show_stored
from te_inductor.presentation.paths import plain, without_wrappers


@dataclass
class HeldTensor:
    """A parameter or buffer of the model, with everything that holds it and all names that it has."""

    tensor: Tensor
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def replace(self, tensor: Tensor) -> None:
        for module, key in self.holders:
            (module._parameters if key in module._parameters else module._buffers)[key] = tensor  # type: ignore[assignment]
            show_stored(module)


class Piece(NamedTuple):
    """A matrix of the checkpoint: the keys that it has by its name, and their format; None: the one tensor itself, or,
    with the reason, no format."""

    name: str
    rows: int
    keys: tuple[str, ...]
    format: CheckpointFormat | None
    wrong: str | None = None


class Source(NamedTuple):
    """What a tensor comes from: one piece, or `per` of them, one above the other, for each expert."""

    pieces: tuple[Piece, ...]
    per: int = 0  # 0: the one piece is the whole tensor


class LoadPlan(NamedTuple):
    steps: list[tuple[HeldTensor, Source]]
    calibrated: list[str]  # keys that hold scales of activations, which nothing uses


def plan(model: nn.Module, checkpoint: Checkpoint, dequantize: bool) -> LoadPlan:
    """What `model`, which stays as it is, is loaded from.

    Raises:
        CheckpointError: something does not fit; a line for each key.
    """
    held = _held(model)
    own = {name for one in held for name in one.names}
    steps, missing, used, problems = _steps(held, own, checkpoint, dequantize)
    problems += [partial(_missing, one.names, checkpoint) for one in missing]
    rest = [key for key in checkpoint.entries if key not in used and not _ignored(key, model)]
    calibrated = [key for key in rest if key.rpartition(".")[2] in formats.CALIBRATED]
    problems += [partial(_unexpected, key, own) for key in rest if key not in set(calibrated)]
    problems += _lost_buffers(model)
    _raise(model, checkpoint, problems)
    return LoadPlan(steps, calibrated)


def stored_steps(model: nn.Module, checkpoint: Checkpoint) -> list[tuple[HeldTensor, Source]]:
    """Returns what becomes stored weights in a plan. The rest is for another loader, which says itself what is missing
    or left.

    Raises:
        CheckpointError: a quantized weight does not fit; a line for each key.
    """
    held = _held(model)
    own = {name for one in held for name in one.names}
    steps, _, _, problems = _steps(held, own, checkpoint, dequantize=False)
    _raise(model, checkpoint, problems)
    return [(one, source) for one, source in steps if source.pieces[0].format is not None]


_Problems = list[str | Callable[[], str]]


def _steps(
    held: list[HeldTensor], own: Set[str], checkpoint: Checkpoint, dequantize: bool
) -> tuple[list[tuple[HeldTensor, Source]], list[HeldTensor], set[str], _Problems]:
    """Steps, what nothing was found for, the keys that are used, and what is wrong with them and the configuration."""
    problems: _Problems = [*formats.unsupported(checkpoint.configuration)]
    used: set[str] = set()
    steps, missing = [], []
    for one in held:
        found = {name: _matches(name, one.tensor.shape, one.tensor.dtype, own, checkpoint) for name in one.names}
        matches = [match for several in found.values() for match in several]
        per = 0
        if not matches and one.tensor.dim() == 3:
            matches, per = _experts(one, own, checkpoint)
        used.update(key for match in matches for key in match.keys)
        wrong = [line for match in matches for line in _refused(match, one, checkpoint, dequantize)]
        if not matches:
            missing.append(one)
        elif wrong:
            problems += wrong
        elif per:
            problems += [] if dequantize else _not_one_matrix(matches, per, checkpoint)
            steps.append((one, Source(tuple(matches), per)))
        else:
            problems += _disagreements(matches, checkpoint)
            steps.append((one, Source((matches[0],))))
    return steps, missing, used, problems


def _raise(model: nn.Module, checkpoint: Checkpoint, problems: _Problems) -> None:
    if problems:
        raise CheckpointError(listed(f"{checkpoint.where} does not fit the {type(model).__name__}", problems))


def _held(model: nn.Module) -> list[HeldTensor]:
    """What the model's state_dict would have."""
    found: dict[int, HeldTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in quantization.state_of(module).items():
            held = found.setdefault(id(tensor), HeldTensor(tensor))
            whole = f"{path}.{key}".strip(".")  # a name that only its adapters and wrappers make another is one more
            held.names += [
                name for name in dict.fromkeys((without_wrappers(whole), plain(whole))) if name not in held.names
            ]
            if not any(one is module and name == key for one, name in held.holders):
                held.holders.append((module, key))
    return list(found.values())


# ---- one name


SUFFIXES = tuple(dict.fromkeys(part.suffix for one in formats.FORMATS for part in one.parts))


def _matches(name: str, shape: Shape, dtype: torch.dtype, own: Set[str], checkpoint: Checkpoint) -> list[Piece]:
    """One, if the checkpoint has the name at all."""
    entries = checkpoint.entries
    keys = [name + suffix for suffix in SUFFIXES]
    present = tuple(key for key in keys if key in entries and (key == name or key not in own))
    if not present:
        return []
    rows, entry = shape[0] if shape else 1, entries.get(name)
    alike = entry and (entry.dtype == dtype or (entry.dtype in HIGH and dtype.is_floating_point))
    if alike and present == (name,):
        differs = tuple(shape) != entries[name].shape
        wrong = f"{name}: found {entries[name]}, expected shape {list(shape)}" if differs else None
        return [Piece(name, rows, present, None, wrong)]
    nearest: list[tuple[CheckpointFormat, list[str]]] = []
    if len(shape) == 2:
        misfits = [(one, one.misfits(name, entries, *shape)) for one in formats.FORMATS]
        least = min(len(lines) for _, lines in misfits)
        nearest = [(one, lines) for one, lines in misfits if len(lines) == least]
        if not least:
            fitting = [one for one, _ in nearest]
            found = formats.told_apart(fitting, checkpoint.configuration, name.removesuffix(".weight"))
            return [Piece(name, rows, found.keys(name), found)]
    return [Piece(name, rows, present, None, _no_format(name, shape, present, nearest, checkpoint))]


def _experts(held: HeldTensor, own: Set[str], checkpoint: Checkpoint) -> tuple[list[Piece], int]:
    """The matrices of a parameter (E, N, K) of experts that the checkpoint has one by one, and how many an expert has;
    none, if it has none of them."""
    module, key = held.holders[0]
    prefix = held.names[0].removesuffix(key)
    pieces = PARTS_OF.get(key, ())
    count, n, k = held.tensor.shape
    matches = []
    for name in [f"{prefix}{expert}.{piece}.weight" for expert in range(count) for piece in pieces]:
        found = _matches(name, torch.Size((n // len(pieces), k)), held.tensor.dtype, own, checkpoint)
        matches += found or [Piece(name, 0, (), None, f"{name}: found nothing, expected a part of {held.names[0]}")]
    if not any(match.keys for match in matches):
        return [], 0
    if quantization.MultipliedWeight(module, key, ()).transposed:
        matches.append(Piece(key, 0, (), None, f"{held.names[0]}: it is transposed, (E, K, N), which is not loaded"))
    return matches, len(pieces)


def _not_one_matrix(matches: Sequence[Piece], per: int, checkpoint: Checkpoint) -> Iterator[str]:
    """Why experts cannot be stored as one parameter, whose matrices have several parts each."""
    first = matches[0]
    for match in matches:
        if match.format is not first.format:
            yield f"{match.name}: in another format than {first.name}, expected one for all; pass dequantize=True"
            return
    if first.format is None:
        return
    fusing = FUSINGS[type(first.format.recipe)]
    for start in range(0, len(matches) if per > 1 else 0, per):
        expert = matches[start : start + per]
        wrong = fusing.apart([match.rows for match in expert], [match.keys for match in expert], checkpoint)
        if wrong:
            yield f"{wrong}; pass dequantize=True"


def _no_format(
    name: str,
    shape: Shape,
    present: Sequence[str],
    nearest: Sequence[tuple[CheckpointFormat, Sequence[str]]],
    checkpoint: Checkpoint,
) -> str:
    found = ", ".join(f"{key.rpartition('.')[2]} {checkpoint.entries[key]}" for key in present)
    if not nearest:
        return f"{name}: found {found}, expected one tensor of shape {list(shape)} in high precision"
    options = "; or, of ".join(f"{one.name}, {' and '.join(lines)}" for one, lines in nearest)
    return f"{name}: found {found} for shape {list(shape)}, expected, of {options}"


def _refused(match: Piece, held: HeldTensor, checkpoint: Checkpoint, dequantize: bool) -> Iterator[str]:
    """Why a name cannot be loaded from what it has matched."""
    if match.wrong:
        yield match.wrong
        return
    tensor = held.tensor
    if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, StoredWeight):
        yield f"{match.name}: it is a {type(tensor).__name__}, expected a plain tensor; load before the model is sharded"
    if match.format is None:
        return
    for part, key in zip(match.format.parts, match.keys, strict=True):
        wrong = part.check(checkpoint.read(key)) if part.check else None
        if wrong:
            yield f"{key}: {wrong}"
    if tensor.dtype not in quantization.DTYPES:
        yield (
            f"{match.name}: the model has it as {tensor.dtype}, expected float32, bfloat16 or float16; build the model"
            " without its quantization_config"
        )
    others = [
        type(module).__name__ for module, key in held.holders if not isinstance(module, nn.Linear) or key == "bias"
    ]
    if others and not dequantize and tensor.dim() == 2:
        yield (
            f"{match.name}: it is that of a module of class {others[0]}, expected nn.Linear alone; pass dequantize=True,"
            " or untie it (config.tie_word_embeddings=False)"
        )


def _disagreements(pieces: Sequence[Piece], checkpoint: Checkpoint) -> Iterator[str]:
    """Says where the pieces of names of one tensor disagree."""
    for other in pieces[1:]:
        first = pieces[0]
        same = first.format is other.format and all(
            torch.equal(*(checkpoint.read(key).reshape(-1).view(torch.uint8) for key in pair))
            for pair in zip(first.keys, other.keys, strict=True)
        )
        if not same:
            yield (
                f"{other.keys[0]}: differs from {first.keys[0]}, expected the same, as they are one tensor of the model;"
                " build a model that does not tie them (config.tie_word_embeddings=False)"
            )


# ---- what is left

_EXPERT = re.compile(r"^(.*\.|)experts\.\d+\.")


def _missing(names: Sequence[str], checkpoint: Checkpoint) -> str:
    others = "".join(f", nor {name}, which is the same tensor" for name in names[1:])
    return f"{names[0]}: found nothing{others}; {_nearest(names[0], checkpoint.entries)}"


def _unexpected(key: str, own: Set[str]) -> str:
    reason = formats.FOREIGN.get(key.rpartition(".")[2])
    if reason:
        return f"{key}: {reason}"
    expert = _EXPERT.match(key)
    if expert:
        fused = [name for name in sorted(own) if name.startswith(f"{expert[1]}experts.") and not _EXPERT.match(name)]
        if fused:
            parts = PARTS_OF.get(fused[0].rpartition(".")[2], ("otherwise",))
            return (
                f"{key}: the model has its experts in one parameter, {fused[0]}, whose parts a checkpoint calls"
                f" {', '.join(parts)}; use a class that has linear layers"
            )
    return f"{key}: the model has no such name; {_nearest(key, own)}"


def _nearest(name: str, names: Collection[str]) -> str:
    """A remedy: the name that ends alike, as where one side has a prefix more, or one with few other letters."""
    tail = name
    while "." in tail:
        alike = [one for one in names if f".{one}".endswith(f".{tail}")]
        if alike:
            return f"is it {alike[0]}? Names have to be the same"
        tail = tail.partition(".")[2]
    near = difflib.get_close_matches(name, names, n=1)
    return f"is it {near[0]}? Names have to be the same" if near else "build the model from the checkpoint's own config"


def _ignored(key: str, model: nn.Module) -> bool:
    """Whether models of transformers read over it: what their class says, and buffers of old rotary embeddings."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, key) for pattern in (*patterns, r"rotary_emb\.inv_freq$"))


# ---- buffers that no checkpoint has, of a model on the meta device


def meta_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The meta buffers that are not persistent, by name."""
    return {
        without_wrappers(f"{path}.{key}").strip("."): (module, key)
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if key in module._non_persistent_buffers_set and buffer is not None and buffer.is_meta
    }


def _lost_buffers(model: nn.Module) -> list[str]:
    """Models of transformers can compute theirs anew."""
    if hasattr(model, "_init_weights"):
        return []
    return [
        f"{name}: a buffer on the meta device that no checkpoint has, expected its values; build the module that has it"
        " on a device"
        for name in meta_buffers(model)
    ]
