"""transformers' `from_pretrained` and `save_pretrained` of stored weights: the quantization method "te_inductor".

Importing this module registers it. A folder that was saved so is read by any process that has imported it.

Source: transformers 5.23 (5.17 is alike), quantizers/auto.py and base.py, modeling_utils.py.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_inductor import recipes as all_recipes
from te_inductor.api.checkpoint_files import opened
from te_inductor.api.checkpoint_formats import OWN as METHOD
from te_inductor.api.checkpoint_plan import HeldTensor, Source, stored_steps
from te_inductor.api.checkpoints import load_steps
from te_inductor.api.quantization import quantize_
from te_inductor.api.written_checkpoints import quantized_state_dict
from te_inductor.errors import CheckpointError, OptionError, RecipeError, wrong_type
from te_inductor.integrations.versions import parts_of
from te_inductor.ops.stored_weight import StoredWeight

with parts_of("transformers"):
    from transformers import PreTrainedModel
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin


@register_quantization_config(METHOD)
class StoredWeightsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What `from_pretrained(…, quantization_config=…)` takes, and what `config.json` says of a folder that was saved.

    Args:
        recipe: as `te_inductor.quantize_` takes it, a name: how a model in high precision is stored once it is loaded.
        policy: likewise, of globs and names.
        recipes: names of the recipes of a folder's stored weights, as `te_inductor.load_quantized` takes them; written
            by `save_pretrained`.

    Raises:
        RecipeError: one of the names is no recipe's.
        OptionError: something else than names.
    """

    def __init__(
        self,
        recipe: str = "nvfp4_weight_only",
        policy: Mapping[str, str] | None = None,
        recipes: Sequence[str] = (),
        quant_method: str = METHOD,
    ) -> None:
        self.quant_method = quant_method
        self.recipe, self.policy, self.recipes = recipe, dict(policy or {}), list(recipes)
        for name in (recipe, *self.policy.values(), *self.recipes):
            if not isinstance(name, str):
                raise OptionError(
                    wrong_type("a recipe of StoredWeightsConfig", name, "a name, which config.json can hold")
                )
            all_recipes.resolve(name, "recipe of StoredWeightsConfig")
        for glob in self.policy:
            if not isinstance(glob, str):
                raise OptionError(wrong_type("an entry of StoredWeightsConfig's policy", glob, "a glob"))


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
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *keys}
        for held, _ in self._stored:
            for module, name in held.holders:
                module._parameters[name] = None

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **given: Any) -> None:
        config = self.quantization_config
        if self._folder is None:
            quantize_(model, config.recipe, config.policy)
        else:
            with opened(self._folder) as checkpoint:
                load_steps(checkpoint, self._stored, recipes=config.recipes, device=_device(model))
        self._stored = []
        config.recipes = _names(model)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `save_pretrained` writes."""
        self.quantization_config.recipes = _names(model)
        model.config.quantization_config = self.quantization_config
        return quantized_state_dict(model), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Says that adapters may be trained beside the weights, which are frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def make_savable(model: PreTrainedModel) -> PreTrainedModel:
    """Have `save_pretrained` write the stored weights of a model that `quantize_` or `load_quantized` has made, and
    `config.json` say so; returns the model.

    Raises:
        OptionError: `model` is none of transformers' models.
        RecipeError: none of its weights is stored, or one by a recipe with other options than the defaults.
    """
    if not isinstance(model, PreTrainedModel):
        raise OptionError(wrong_type("make_savable's model", model, "a PreTrainedModel of transformers"))
    if not (names := _names(model)):
        raise RecipeError(
            f"{type(model).__name__} has no stored weights, expected some; te_inductor.quantize_ stores them"
        )
    config = StoredWeightsConfig(names[0], recipes=names)
    model.hf_quantizer, model.config.quantization_config = StoredWeightsQuantizer(config), config
    model.is_quantized, model.quantization_method = True, METHOD
    return model


def _names(model: torch.nn.Module) -> list[str]:
    """The names of the recipes of all stored weights."""
    used = {parameter.recipe for parameter in model.parameters() if isinstance(parameter, StoredWeight)}
    for recipe in used:
        if recipe != all_recipes.resolve(recipe.name, "recipe of a stored weight"):
            raise RecipeError(
                f"weights are stored by {recipe!r}, expected {recipe.name!r} with its defaults, as config.json holds a name;"
                " save te_inductor.quantized_state_dict(model), and give load_quantized the recipe"
            )
    return sorted(recipe.name for recipe in used)


def _device(model: PreTrainedModel) -> torch.device:
    """The device where the loader has put the rest."""
    return next((one.device for one in model.parameters() if not one.is_meta), torch.device("cpu"))
