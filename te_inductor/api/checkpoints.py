"""`load_quantized`: published low-precision checkpoints into stored weights, bit for bit, or into parameters to train.

First every name of the model is matched with the checkpoint's keys, by dtypes and shapes alone; what does not fit is one
error, before anything has changed. Then one tensor after the other is read, stored and let go of, so that memory never
holds more than what is stored and one layer.

# Note [Formats of checkpoints]
Of a weight (N, K):

- ``weight`` e4m3, ``weight_scale_inv`` (N/128, K/128) or one: transformers' fine-grained FP8; "block" or "current"
- ``weight`` e4m3, ``weight_scale`` (), (N, 1) or (N/128, K/128): compressed-tensors' and ModelOpt's FP8; "current",
  "rowwise" or "block"
- ``weight_packed`` uint8 (N, K/2), ``weight_scale`` e4m3 (N, K/16), ``weight_global_scale`` fp32: compressed-tensors'
  nvfp4-pack-quantized; "nvfp4_weight_only"
- ``weight`` uint8 (N, K/2), ``weight_scale`` e4m3 (N, K/16), ``weight_scale_2`` fp32: ModelOpt's NVFP4;
  "nvfp4_weight_only"

Experts that a checkpoint has one by one (``experts.0.gate_proj.weight``) become a model's parameters (E, N, K),
``gate_up_proj`` and ``down_proj``, if one stored matrix can have the scales of gate and of up; one scale a tensor becomes
one a row there. "rowwise" and "block" are used without powers of two, as scales were published."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from te_inductor import config
from te_inductor import recipes as all_recipes
from te_inductor.api import checkpoint_formats as formats
from te_inductor.api import written_recipes
from te_inductor.api.checkpoint_experts import FUSINGS, Filling
from te_inductor.api.checkpoint_files import Checkpoint, opened
from te_inductor.api.checkpoint_formats import nvfp4
from te_inductor.api.checkpoint_formats.protocol import ROWS_OF_BLOCK, other_values
from te_inductor.api.checkpoint_plan import HeldTensor, Piece, Source, meta_buffers, plan
from te_inductor.config import Fallback
from te_inductor.diagnostics import say
from te_inductor.errors import CheckpointError, OptionError, RecipeError, wrong_type
from te_inductor.ops.stored_weight import StoredWeight, as_parameter, kind_of
from te_inductor.presentation.progress import progress
from te_inductor.recipes import Recipe

ModelT = TypeVar("ModelT", bound=nn.Module)
_UNFILLED = 255  # every byte of a buffer that nothing has written: NaN, or no index


def load_quantized(
    model: ModelT,
    path_or_state_dict: "str | os.PathLike[str] | Mapping[str, Any]",
    *,
    dequantize: bool = False,
    recipes: Sequence[str | Recipe] = (),
    device: "torch.device | str | None" = None,
    fallback: Fallback = "warn",
) -> ModelT:
    """Load a published low-precision checkpoint, in place, its weights bit for bit as stored weights; returns the model.

    Args:
        model: keys of the checkpoint are the names of its own `state_dict`. It may be on the meta device, in part or
            as a whole: then no memory is spent on what is replaced.
        path_or_state_dict: a folder of safetensors files, sharded or not, with or without a config.json; one such file;
            or a state_dict, whose tensors are copied.
        dequantize: load plain parameters of the model's dtype instead, to train them.
        recipes: instances or names that say how stored weights are multiplied, in place of those below and of those that
            the configuration of a folder that this package wrote has.
        device: where to put what is on the meta device; None: on the CPU. Everything else stays where it is.
        fallback: "warn", "error" or "silent", where the checkpoint has scales of activations, which are not used.

    Which format (Note [Formats of checkpoints]) a weight is in is found by keys, dtypes and shapes, of each by itself. What
    was not quantized is copied as `load_state_dict` would, in the model's dtype. A tensor that has several names in the
    model (tied weights) may have any of them in the checkpoint.

    An error leaves the model as it was.

    Raises:
        CheckpointError: it cannot be read, is in another format, or does not fit the model; the text has a line a key.
        OptionError: `model` is no module, or an option is wrong.
        RecipeError: an entry of `recipes` is no recipe, or its weights are not stored as checkpoints have them.
        FallbackError: with ``fallback="error"``.

    Sources: Note [NVFP4 in checkpoints], and the records beside it.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("load_quantized's model", model, "an nn.Module"))
    if not isinstance(dequantize, bool):
        raise OptionError(wrong_type("load_quantized's dequantize", dequantize, "a bool"))
    options, to = config.parse({"fallback": fallback}), torch.device(device or "cpu")
    _recipes(recipes)
    with opened(path_or_state_dict) as checkpoint, torch.no_grad():
        chosen = _recipes([*_written(checkpoint), *recipes])
        steps, calibrated = plan(model, checkpoint, dequantize)
        _say_unused(calibrated, checkpoint, options.fallback)
        _fill_buffers(model, to)
        _load(checkpoint, steps, chosen, dequantize, to)
    return model


def _say_unused(calibrated: Sequence[str], checkpoint: Checkpoint, fallback: str) -> None:
    """Say which scales of activations the checkpoint has for nothing."""
    if calibrated:
        more = f" and {len(calibrated) - 1} more scales" if calibrated[1:] else ""
        text = f"te_inductor: {calibrated[0]}{more} of {checkpoint.where} are not used: activations are scaled as the"
        say(f"{text} recipe of their layer says", fallback)


def load_steps(
    checkpoint: Checkpoint,
    steps: Sequence[tuple[HeldTensor, Source]],
    *,
    recipes: Sequence[object],
    device: torch.device,
) -> None:
    """Some steps of a `plan`, as `load_quantized` does all."""
    with torch.no_grad():
        _load(checkpoint, steps, _recipes(recipes), False, device)


def _load(
    checkpoint: Checkpoint,
    steps: Sequence[tuple[HeldTensor, Source]],
    recipes: Mapping[type[Recipe], Recipe],
    dequantize: bool,
    to: torch.device,
) -> None:
    loading = _Loading(checkpoint, recipes, dequantize, to)
    with progress(len(steps), "load_quantized") as advance:
        for held, source in steps:
            loading.load(held, source)
            advance()


def _written(checkpoint: Checkpoint) -> list[Recipe]:
    """Recipes that this package has written into a configuration; older versions wrote names beside a method of our own."""
    configuration = checkpoint.configuration
    own = configuration if configuration.get("quant_method") == formats.OWN else configuration.get(formats.OWN)
    return [written_recipes.from_json(one) for one in (own or {}).get("recipes") or ()]


def _recipes(given: object) -> dict[type[Recipe], Recipe]:
    """The recipe of each form of stored weights, by class."""
    chosen: dict[type[Recipe], Recipe] = {type(one): one for one in formats.RECIPES}
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise OptionError(wrong_type("load_quantized's recipes", given, "a sequence of recipes or names"))
    for spec in given:
        recipe = all_recipes.resolve(spec, "an entry of load_quantized's recipes")
        default = chosen.get(type(recipe))  # type: ignore[arg-type]
        if recipe is None or default is None:
            names = ", ".join(one.name for one in chosen)
            raise RecipeError(f"an entry of load_quantized's recipes is {spec!r}, expected one of {names}")
        if (wrong := other_values(recipe, default)) is not None:
            raise RecipeError(
                f"an entry of load_quantized's recipes is {recipe}, expected one that checkpoints have: {wrong}"
            )
        chosen[type(recipe)] = recipe
    return chosen


@dataclass(frozen=True)
class _Loading:
    """How pieces of a checkpoint become tensors of the model. What is read lives as long as its piece is at work."""

    checkpoint: Checkpoint
    recipes: Mapping[type[Recipe], Recipe]
    dequantize: bool
    to: torch.device

    def load(self, held: HeldTensor, source: Source) -> None:
        old = held.tensor
        if source.per:
            self._experts(held, source)
        elif source.pieces[0].format is None:
            _put(held, self._read(source.pieces[0], old))
        elif self.dequantize:
            _put(held, self._dequantized(source.pieces[0], old, old.shape))
        else:
            parts, recipe = self._stored(source.pieces[0], old)
            made = kind_of(recipe).of(parts, old.shape, old.dtype, recipe)
            held.replace(as_parameter(made))

    def _device(self, like: Tensor) -> torch.device:
        return self.to if like.is_meta else like.device

    def _read(self, piece: Piece, like: Tensor) -> Tensor:
        return self.checkpoint.read(piece.keys[0]).to(self._device(like), like.dtype, copy=True)

    def _stored(self, piece: Piece, like: Tensor) -> tuple[tuple[Tensor, ...], Recipe]:
        """Parts of a stored weight, in memory of their own."""
        of = piece.format
        assert of is not None
        recipe = self.recipes[type(of.recipe)]
        form = torch.contiguous_format  # whatever strides a state_dict has
        read = (self.checkpoint.read(key) for key in piece.keys)
        parts = tuple(part.to(self._device(like), copy=True, memory_format=form) for part in read)
        return of.stored(parts, recipe), recipe

    def _dequantized(self, piece: Piece, like: Tensor, shape: torch.Size) -> Tensor:
        """What the stored weight would return, some rows at a time: on a CPU a value takes many bytes on the way."""
        of = piece.format
        assert of is not None
        (n, k), device, recipe = shape, self._device(like), self.recipes[type(of.recipe)]
        parts = tuple(self.checkpoint.read(key).to(device) for key in piece.keys)
        plain = torch.empty(shape, dtype=like.dtype, device=device)
        step = max(1, nvfp4.CHUNK // (ROWS_OF_BLOCK * k)) * ROWS_OF_BLOCK
        for first in range(0, n, step):
            rows = plain[first : first + step]
            some = of.stored(of.rows(parts, n, first, step), recipe)
            rows.copy_(kind_of(recipe)(some, rows.shape, like.dtype, recipe).dequantize())  # type: ignore[call-arg]
        return plain

    def _experts(self, held: HeldTensor, source: Source) -> None:
        old, per = held.tensor, source.per
        experts = [source.pieces[start : start + per] for start in range(0, len(source.pieces), per)]
        first = source.pieces[0].format
        if self.dequantize or first is None:
            shape = torch.Size((old.shape[1] // per, old.shape[2]))
            plain = _place(old, self._device(old))
            for expert, pieces in enumerate(experts):
                for rows, piece in zip(plain[expert].split(shape[0]), pieces, strict=True):
                    rows.copy_(self._read(piece, old) if piece.format is None else self._dequantized(piece, old, shape))
            return _put(held, plain)
        fusing = FUSINGS[type(first.recipe)]
        recipe = self.recipes[type(fusing.recipe if per > 1 else first.recipe)]
        filling = Filling(old.shape, old.dtype, recipe)
        for expert, pieces in enumerate(experts):
            matrices = [self._stored(piece, old)[0] for piece in pieces]
            filling.put(expert, fusing.join(matrices) if per > 1 else matrices[0])
        held.replace(as_parameter(filling.made()))


def _is_place(old: Tensor) -> bool:
    """Whether plain values can be written into it."""
    return not old.is_meta and not isinstance(old, StoredWeight)


def _place(old: Tensor, device: torch.device) -> Tensor:
    return old.detach() if _is_place(old) else torch.empty(old.shape, dtype=old.dtype, device=device)


def _put(held: HeldTensor, tensor: Tensor) -> None:
    """A plain tensor of its dtype, into memory that is there, or as it is."""
    old = held.tensor
    if _is_place(old):
        if old.data_ptr() != tensor.data_ptr():
            old.copy_(tensor)
        return
    is_parameter = isinstance(old, nn.Parameter)
    held.replace(nn.Parameter(tensor, requires_grad=old.requires_grad) if is_parameter else tensor)


def _fill_buffers(model: nn.Module, to: torch.device) -> None:
    """Buffers of a model of transformers that no checkpoint has and that are on the meta device: computed as the model
    computes them, which comes first, because that may draw parameters of the same module anew.

    Raises:
        CheckpointError: one that the model does not compute.
    """
    found = meta_buffers(model)
    before = {name: module._buffers[key] for name, (module, key) in found.items()}
    for module, key in found.values():
        module._buffers[key] = torch.empty_like(module._buffers[key], device=to)  # type: ignore[arg-type]
        _bytes(module, key).fill_(_UNFILLED)
    for module in dict.fromkeys(module for module, _ in found.values()):
        model._init_weights(module)  # type: ignore[operator]
    left = [name for name, (module, key) in found.items() if bool((_bytes(module, key) == _UNFILLED).all())]
    if left:
        for name, (module, key) in found.items():
            module._buffers[key] = before[name]
        raise CheckpointError(
            f"buffers {', '.join(left)} are on the meta device, no checkpoint has them, and {type(model).__name__} does not"
            " compute them, expected their values; build the modules that have them on a device"
        )


def _bytes(module: nn.Module, key: str) -> Tensor:
    return module._buffers[key].view(-1).view(torch.uint8)  # type: ignore[union-attr]
