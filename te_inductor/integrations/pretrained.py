"""transformers' `from_pretrained` and `save_pretrained` of stored weights: the quantization method "te_inductor".

Importing this module registers it. A folder that was saved so is one of compressed-tensors or of transformers' FP8 to any
process that has not; one that has makes the same stored weights of it again, which an entry of its configuration says.

Source: transformers 5.23 (5.17 is alike), quantizers/auto.py and base.py, modeling_utils.py.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_inductor import recipes as all_recipes
from te_inductor.api import written_recipes
from te_inductor.api.checkpoint_files import opened
from te_inductor.api.checkpoint_formats import METHODS
from te_inductor.api.checkpoint_formats import OWN as METHOD
from te_inductor.api.checkpoint_plan import HeldTensor, Source, stored_steps
from te_inductor.api.checkpoints import load_steps
from te_inductor.api.quantization import quantize_
from te_inductor.api.written_checkpoints import StoredTensor, say_what_differs, stored_tensors, writer_of, written
from te_inductor.errors import CheckpointError, OptionError, RecipeError, StoredWeightError, wrong_type
from te_inductor.integrations.versions import parts_of
from te_inductor.recipes import NVFP4WeightOnly

with parts_of("transformers"):
    from transformers import PreTrainedModel
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin


@register_quantization_config(METHOD)
class StoredWeightsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What `from_pretrained(…, quantization_config=…)` takes, and what `config.json` says of a folder that was saved.

    Args:
        recipe: as `te_inductor.quantize_` takes it, a name: how a model in high precision is stored once it is loaded.
        policy: likewise, of globs and names.
        recipes: those of a folder's stored weights, as `te_inductor.load_quantized` takes them, where they are not what
            the folder's format is loaded as; written by `save_pretrained`.

    Raises:
        RecipeError: one of the names is no recipe's.
        OptionError: something else than names.
    """

    def __init__(
        self,
        recipe: str = "nvfp4_weight_only",
        policy: Mapping[str, str] | None = None,
        recipes: Sequence[Any] = (),
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = quant_method
        self.recipe, self.policy, self.recipes = recipe, dict(policy or {}), list(recipes)
        self._written: dict[str, Any] = {}  # the configuration of a folder
        for one in self.recipes:
            written_recipes.from_json(one)
        for name in (recipe, *self.policy.values()):
            if not isinstance(name, str):
                raise OptionError(
                    wrong_type("a recipe of StoredWeightsConfig", name, "a name, which config.json can hold")
                )
            all_recipes.resolve(name, "recipe of StoredWeightsConfig")
        for glob in self.policy:
            if not isinstance(glob, str):
                raise OptionError(wrong_type("an entry of StoredWeightsConfig's policy", glob, "a glob"))

    @classmethod
    def of_folder(cls, written: Mapping[str, Any]) -> "StoredWeightsConfig":
        """Returns the configuration object of a folder whose configuration is another program's, with our entry."""
        made = cls(recipes=written[METHOD].get("recipes", ()))
        made._written = dict(written)
        return made

    def to_dict(self) -> dict[str, Any]:
        """What `config.json` says: the configuration of a folder that was saved, or how to store weights."""
        fields = {key: value for key, value in super().to_dict().items() if key != "_written"}
        return dict(self._written) or fields


class _Either:
    """Stands for another program's configuration class in transformers' table: a folder with our entry is ours."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def from_dict(self, written: Mapping[str, Any], **given: Any) -> Any:
        if isinstance(written.get(METHOD), Mapping):
            return StoredWeightsConfig.of_folder(written)
        return self.theirs.from_dict(written, **given)


for _program in METHODS:
    if _program.configuration and _program.name in AUTO_QUANTIZATION_CONFIG_MAPPING:
        AUTO_QUANTIZATION_CONFIG_MAPPING[_program.name] = _Either(AUTO_QUANTIZATION_CONFIG_MAPPING[_program.name])


@register_quantizer(METHOD)
class StoredWeightsQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls while it loads and saves.

    A folder's stored weights are not the loader's: their parameters leave the model until everything else is loaded, so
    that nothing is spent on them in high precision. A model in high precision is loaded as ever, and stored then."""

    quantization_config: StoredWeightsConfig

    def __init__(self, quantization_config: StoredWeightsConfig, **given: Any) -> None:
        super().__init__(quantization_config, **given)
        self._stored: list[tuple[HeldTensor, Source]] = []
        self._folder: Path | None = None

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **given: Any
    ) -> None:
        if not self.pre_quantized:
            return
        if not checkpoint_files:
            raise CheckpointError(
                "from_pretrained has no files of a model with stored weights, expected its folder;"
                " te_inductor.load_quantized takes a state_dict"
            )
        self._folder = Path(checkpoint_files[0]).parent
        with opened(self._folder) as checkpoint:
            self._stored = stored_steps(model, checkpoint)
        keys = [re.escape(key) for _, source in self._stored for piece in source.pieces for key in piece.keys]
        keys += [re.escape(name) for held, _ in self._stored for name in held.names]  # of experts that it puts together
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *keys}
        for held, _ in self._stored:
            for module, name in held.holders:
                module._parameters[name] = None
                module.__dict__[name] = _initialized()

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **given: Any) -> None:
        config = self.quantization_config
        if self._folder is None:
            quantize_(model, config.recipe, config.policy)
        else:
            for held, _ in self._stored:
                for module, name in held.holders:
                    del module.__dict__[name]
            with opened(self._folder) as checkpoint:
                recipes = [written_recipes.from_json(one) for one in config.recipes]
                load_steps(checkpoint, self._stored, recipes=recipes, device=_device(model))
        self._stored = []

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `save_pretrained` writes."""
        stored = stored_tensors(model)
        _refuse_nvfp4_experts(stored)
        say_what_differs(model, stored)
        state, self.quantization_config._written = written(model)
        model.config.quantization_config = self.quantization_config
        if not self.quantization_config._written:  # nothing is stored
            del model.config.quantization_config
        return state, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Says that adapters may be trained beside the weights, which are frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _refuse_nvfp4_experts(stored: Mapping[str, StoredTensor]) -> None:
    """transformers 5.23 reads experts of compressed-tensors' NVFP4 without their scale of the tensor, and says nothing:
    integrations/compressed_tensors.py, CompressedTensorsDequantize."""
    wrong = [one.name for one in stored.values() if len(one.shape) == 3 and isinstance(one.recipe, NVFP4WeightOnly)]
    if wrong:
        raise StoredWeightError(
            f"{wrong[0]} is stored as nvfp4_weight_only, expected experts in FP8, as transformers would read other values"
            ' of it in a process without te_inductor; store experts as "rowwise" or "block" (policy), or write'
            " te_inductor.quantized_state_dict(model) for an engine or for load_quantized, or torch.save(model.state_dict())"
        )


def _initialized() -> Tensor:
    """What stands in a module in place of a weight while the model computes the values of what no file has."""
    empty = torch.empty(0, dtype=torch.float32, device="cpu")
    empty._is_hf_initialized = True  # type: ignore[attr-defined]
    return empty


def make_savable(model: PreTrainedModel) -> PreTrainedModel:
    """Have `save_pretrained` write the stored weights of a model that `quantize_` or `load_quantized` has made, and
    `config.json` say so; returns the model.

    Raises:
        OptionError: `model` is none of transformers' models.
        RecipeError: none of its weights is stored, or one by a recipe that config.json cannot hold.
        StoredWeightError: a weight that no format of checkpoints has.
    """
    if not isinstance(model, PreTrainedModel):
        raise OptionError(wrong_type("make_savable's model", model, "a PreTrainedModel of transformers"))
    if not (stored := stored_tensors(model)):
        raise RecipeError(
            f"{type(model).__name__} has no stored weights, expected some; te_inductor.quantize_ stores them"
        )
    _refuse_nvfp4_experts(stored)
    config = StoredWeightsConfig.of_folder(writer_of(model, list(stored.values())).configuration)
    model.hf_quantizer, model.config.quantization_config = StoredWeightsQuantizer(config), config
    model.is_quantized, model.quantization_method = True, METHOD
    return model


def _device(model: PreTrainedModel) -> torch.device:
    """The device where the loader has put the rest."""
    return next((one.device for one in model.parameters() if not one.is_meta), torch.device("cpu"))
