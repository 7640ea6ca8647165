"""Stored weights as the plain tensors of a published checkpoint, which any file format can hold, and the configuration
by which other programs find out what they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from te_inductor.api import written_recipes
from te_inductor.api.checkpoint_experts import PARTS_OF
from te_inductor.api.checkpoint_formats import METHODS, OWN
from te_inductor.api.checkpoint_formats.protocol import ROWS_OF_BLOCK, CheckpointFormat, Contents, QuantMethod
from te_inductor.api.quantization import adapters_of
from te_inductor.diagnostics import say
from te_inductor.errors import OptionError, StoredWeightError, wrong_type
from te_inductor.ops.stored_experts import StoredExperts
from te_inductor.ops.stored_weight import NVFP4Weight, StoredWeight
from te_inductor.presentation.paths import grouped, layer_path, shown
from te_inductor.recipes import Float8BlockScaling, Recipe
from te_inductor.recipes.weight_only import fused


@dataclass(frozen=True)
class StoredTensor:
    """A parameter that is stored, or is to be."""

    name: str
    recipe: Recipe
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def pieces(self) -> list[str]:
        """The names of its matrices in a checkpoint: itself, or a linear layer's for each part of each expert."""
        if len(self.shape) == 2:
            return [self.name]
        prefix, _, key = self.name.rpartition(".")
        return [
            f"{prefix}.{expert}.{part}.weight".lstrip(".")
            for expert in range(self.shape[0])
            for part in PARTS_OF.get(key, ())
        ]

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K of a matrix in a checkpoint."""
        n, k = self.shape[-2:]
        return n // max(1, len(self.pieces) // self.shape[0]) if len(self.shape) == 3 else n, k

    def refusal(self) -> str | None:
        """Why no format has it."""
        if len(self.shape) == 2:
            return None
        if self.transposed:
            return "found transposed experts, (E, K, N), expected (E, N, K)"
        if not self.pieces:
            return f"found this name of experts' parameters, expected {' or '.join(PARTS_OF)}"
        together = self.sizes[0] < self.shape[1]
        if together and isinstance(self.recipe, Float8BlockScaling) and self.sizes[0] % ROWS_OF_BLOCK:
            return f"found {self.sizes[0]} rows for each of gate and up, expected a multiple of {ROWS_OF_BLOCK}"
        return None


@dataclass(frozen=True)
class CheckpointWriter:
    """How stored weights of a model are written, by one program's formats."""

    program: QuantMethod
    configuration: dict[str, Any]
    stored: Mapping[str, StoredTensor]  # by name

    def tensors(self, name: str, weight: StoredWeight) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a checkpoint has for a stored weight, by their keys."""
        of = self.stored[name]
        n, k = of.sizes
        found = cast(CheckpointFormat, self.program.format_of(of.recipe, n, k))  # it has all weights
        experts = range(of.shape[0])
        matrices = [weight.matrix(one) for one in experts] if isinstance(weight, StoredExperts) else [weight]
        per = len(of.pieces) // len(matrices)
        for place, piece in enumerate(of.pieces):
            saved = matrices[place // per].saved()  # type: ignore[attr-defined]
            rows = found.rows(saved, n * per, place % per * n, n) if per > 1 else saved
            yield from found.tensors(piece, rows, n, k).items()


def writer_of(model: nn.Module, stored: Sequence[StoredTensor], program: str | None = None) -> CheckpointWriter:
    """The writer for these weights of a model: that of the first program that has formats for all of them.

    Raises:
        OptionError: there is no such program.
        StoredWeightError: no program has.
    """
    able = {one.name: one for one in METHODS if one.configuration}
    if program is not None and program not in able:
        raise OptionError(
            f"format {program!r}, expected {' or '.join(map(repr, able))}, or None for the first that fits"
        )
    reasons = [f"{one.name}: {why}" for one in stored if (why := one.refusal())]
    for name, one in able.items() if not reasons or not stored else ():
        assert one.configuration is not None
        contents = _contents(model, stored)
        found = one.configuration(contents) if program in (None, name) else None
        if isinstance(found, dict):
            recipes = {which.recipe: None for which in stored if which.recipe != _default(one, which)}
            own = {OWN: {"recipes": [written_recipes.to_json(recipe) for recipe in recipes]}}
            return CheckpointWriter(one, found | own, {which.name: which for which in stored})
        if found:
            reasons.append(f"of {name}, {found}")
    raise StoredWeightError(
        f"no format of checkpoints has these weights of the {type(model).__name__}: {'; '.join(reasons[:8])}; store them by"
        " another recipe, or leave them in high precision (policy=); torch.save(model.state_dict()) keeps them as they are"
    )


def _default(program: QuantMethod, of: StoredTensor) -> Recipe | None:
    found = program.format_of(of.recipe, *of.sizes)
    return found.recipe if isinstance(found, CheckpointFormat) else None


def _contents(model: nn.Module, stored: Sequence[StoredTensor]) -> Contents:
    layers = {piece.removesuffix(".weight"): (one.recipe, *one.sizes) for one in stored for piece in one.pieces}
    body = getattr(model, "base_model_prefix", "")  # of models of transformers
    body = body if body and hasattr(model, body) else ""
    return Contents(layers, _plain(model, {one.name for one in stored}), body)


def _plain(model: nn.Module, stored: set[str]) -> list[str]:
    """The modules that multiply by a weight in high precision: linear layers, routers, experts."""
    found, beside = [], adapters_of(model)
    for name, module in model.named_modules(remove_duplicate=False):
        if module in beside:
            continue
        path = layer_path(name)
        own = {key: one for key, one in module._parameters.items() if one is not None}
        products = {
            key
            for key, one in own.items()
            if (one.dim() == 3 and "expert" in f"{path} {type(module).__name__}".lower())
            or (one.dim() == 2 and key == "weight" and not isinstance(module, nn.Embedding | nn.EmbeddingBag))
        }
        if products and not any(f"{path}.{key}".strip(".") in stored for key in products):
            found.append(path)
    return found


def stored_tensors(model: nn.Module) -> dict[str, StoredTensor]:
    """The stored weights of a model, by name; one with several names by the first."""
    found, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, StoredWeight) and id(tensor) not in seen:
            seen.add(id(tensor))
            transposed = isinstance(tensor, StoredExperts) and tensor.transposed
            found[name] = StoredTensor(layer_path(name), tensor.recipe, tuple(tensor.shape), transposed)
    return found


def written(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model for a file, as `quantized_state_dict` returns them, and their quantization_config; empty
    where nothing is stored.

    Raises:
        StoredWeightError: as `quantized_state_dict`.
    """
    stored = stored_tensors(model)
    writer = writer_of(model, list(stored.values())) if stored else None
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, StoredWeight):
            found[layer_path(name)] = tensor.detach() if isinstance(tensor, Tensor) else tensor
        elif name in stored and writer:
            found.update(writer.tensors(stored[name].name, tensor))
    return found, writer.configuration if writer else {}


def say_what_differs(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Warn of stored weights that programs of their format multiply otherwise, or not at all."""
    matrices = [one for one in stored.values() if len(one.shape) == 2]
    names = {one.name: name for name, one in stored.items()}  # with what wrappers add to them
    for together in grouped(matrices, lambda one: fused(one.name)).values():
        weights = [model.get_parameter(names[one.name]) for one in together]
        scales = {float(one.tensor_scale) for one in weights if isinstance(one, NVFP4Weight)}
        if fused(together[0].name) and len(scales) > 1:
            say(
                f"te_inductor: {', '.join(one.name for one in together)} have {len(scales)} scales of the tensor, expected"
                " one: vLLM and SGLang multiply them as one matrix, with one scale, and their values would be wrong there."
                " transformers loads them as they are. te_inductor.quantize_ of a model in high precision stores such"
                " weights with one scale",
                "warn",
            )
    ragged = [
        one.name
        for one in stored.values()
        if isinstance(one.recipe, Float8BlockScaling) and one.sizes[1] % ROWS_OF_BLOCK
    ]
    if ragged:
        say(
            f"te_inductor: {shown(ragged)}: K is no multiple of {ROWS_OF_BLOCK}, expected one: vLLM and"
            ' compressed-tensors refuse to multiply by blocks of such weights; "rowwise" runs there, and transformers loads'
            " these with CompressedTensorsConfig(dequantize=True)",
            "warn",
        )


def quantized_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state_dict, in which each stored weight is the tensors that a published checkpoint has for it.

    Returns:
        plain tensors, for safetensors' `save_file`, or for ``model.save_pretrained(folder, state_dict=…)`` of
        transformers. `te_inductor.load_quantized` makes the same stored weights of them, bit for bit. A weight (N, K) is:

        - "current": ``weight`` e4m3, ``weight_scale`` (1,)
        - "rowwise": ``weight`` e4m3, ``weight_scale`` (N, 1)
        - "block": ``weight`` e4m3, and ``weight_scale_inv`` (N/128, K/128) if all stored weights are "block" with sizes
          that are multiples of 128; else ``weight_scale``
        - "nvfp4_weight_only": ``weight_packed`` uint8 (N, K/2), ``weight_scale`` e4m3 (N, K/16),
          ``weight_global_scale`` (1,)

        Experts in one parameter are written one by one: ``experts.0.gate_proj.weight``, ….

    A checkpoint does not say how activations are cast: where a weight's recipe is not what `load_quantized` takes for its
    format, give that one's `recipes` the recipe. A weight with several names is written under the first.

    Raises:
        OptionError: `model` is no module.
        StoredWeightError: a weight that no format has, as NVFP4 with K no multiple of 16, or transposed experts.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(wrong_type("quantized_state_dict's model", model, "an nn.Module"))
    return written(model)[0]
