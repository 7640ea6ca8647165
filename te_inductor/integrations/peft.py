"""peft's adapters: merged into stored weights, and on parameters (`LoraConfig(target_parameters=…)`), as those of experts,
in compiled code.

peft registers a parametrization in each forward and removes it behind. Dynamo's graphs break there, and what it has
compiled is for the old parametrization alone: each call compiles anew, until Dynamo gives the code up. `register` has
compiled code compute the same weights in the graph.

Source: peft 0.21, tuners/lora/layer.py (`ParamWrapper`, `_LoraFactorsProxy`), tuners/tuners_utils.py."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_inductor import compat
from te_inductor.api.quantization import MultipliedWeight, multiplied_as_one
from te_inductor.errors import OptionError, StoredWeightError, wrong_type
from te_inductor.integrations.versions import parts_of
from te_inductor.ops.stored_weight import StoredWeight, as_parameter, kind_of
from te_inductor.presentation.paths import plain

with parts_of("peft"):
    from peft import PeftModel
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    _USED = ParamWrapper.get_param, ParamWrapper.get_delta_factors, ParamWrapper.get_delta_weight

_in_eager = ParamWrapper.forward


def register() -> None:
    """Have compiled code, of any backend, add adapters of `target_parameters` in the graph, with the values that they
    have in eager code, which stays as it is. To be called before the model is compiled; a second call changes nothing.

    Raises:
        ImportError: peft is not installed, or older than version 0.21 (when this module is imported).
    """
    ParamWrapper.forward = _forward  # type: ignore[method-assign]


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    plain = self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None
    if plain or self.get_param().dtype.itemsize == 1 or not compat.is_compiling():
        return _in_eager(self, x, *args, **kwargs)
    weights, module = {}, self
    while isinstance(module, ParamWrapper):  # one around another, each of a parameter of the module in the middle
        adapters = [name for name in module.active_adapters if name in module.lora_A]
        if adapters:
            weights[module.parameter_name] = _adapted(module, adapters)
        module = module.base_layer
    return torch.func.functional_call(module, weights, (x, *args), kwargs)


def _adapted(wrapper: Any, adapters: list[str]) -> Tensor:
    """The parameter with its adapters, as peft's proxies compute it."""
    weight: nn.Parameter = wrapper.get_param()
    if len(adapters) == 1 and wrapper.num_experts > 1:
        a, b, scaling = wrapper.get_delta_factors(adapters[0])
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, a, b, alpha=scaling)
    first, *others = [wrapper.get_delta_weight(name) for name in adapters]
    for other in others:
        first = first + other
    return weight + first


def merge_and_unload(model: Any, *, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> nn.Module:
    """Merge adapters into a base whose weights are stored, and return the base, as `PeftModel.merge_and_unload` does, which
    cannot change stored weights: each is dequantized in fp32, gets its adapters, and is stored again by its recipe.

    Args:
        model: the PeftModel; use what is returned in its place.
        safe_merge, adapter_names: as peft's.

    What is stored again is rounded again: a merged weight is not the sum, but what its recipe makes of it. NVFP4 weights
    of q, k and v, and of gate and up, are stored again together, as they share a scale.

    Raises:
        OptionError: `model` is no PeftModel.
        StoredWeightError: adapters are on stored parameters of experts.
    """
    if not isinstance(model, PeftModel):
        raise OptionError(wrong_type("merge_and_unload's model", model, "a PeftModel"))
    adapted = {one.get_base_layer(): one for one in model.modules() if isinstance(one, BaseTunerLayer)}
    for one in adapted.values():
        if isinstance(one, ParamWrapper) and isinstance(one.get_param(), StoredWeight):
            raise StoredWeightError(
                f"an adapter is on {one.parameter_name}, which is stored as {one.get_param().recipe.name}, expected one on"
                " linear layers to merge; te_inductor.load_quantized(…, dequantize=True) makes a plain base"
            )
    stored = [
        (MultipliedWeight(module, "weight", (plain(name),)), module.weight.recipe)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module.weight, StoredWeight)
    ]
    given = {"safe_merge": safe_merge, "adapter_names": list(adapter_names) if adapter_names is not None else None}
    for together in multiplied_as_one(stored):
        layers = [held.module for held, _ in together]
        if not adapted.keys().isdisjoint(layers):
            _merge(layers, adapted, given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*already merged.*")
        return model.merge_and_unload(**given)  # type: ignore[no-any-return,operator]


@torch.no_grad()
def _merge(layers: Sequence[nn.Module], adapted: dict[Any, Any], given: dict[str, Any]) -> None:
    """Merge adapters into stored weights that are multiplied as one matrix."""
    old: dict[Any, StoredWeight] = {layer: layer.weight for layer in layers}  # type: ignore[misc]
    try:
        for layer, weight in old.items():
            values = weight.with_parts(weight.parts, torch.float32).dequantize()
            layer.weight = nn.Parameter(values, requires_grad=False)
            if layer in adapted:
                adapted[layer].merge(**given)
        kind, recipe = kind_of(old[layers[0]].recipe), old[layers[0]].recipe
        shared = kind.shared([layer.weight for layer in old]) if layers[1:] else ()
        new = {layer: kind.store(layer.weight, recipe, *shared) for layer in old if shared or layer in adapted}
    except BaseException:
        for layer, weight in old.items():
            layer.weight = weight
        raise
    for layer, weight in old.items():
        made = new.get(layer)
        layer.weight = as_parameter(made.with_parts(made.parts, weight.dtype)) if made is not None else weight
