"""peft's adapters on parameters (`LoraConfig(target_parameters=…)`), as those of experts, in compiled code.

peft registers a parametrization in each forward and removes it behind. Dynamo's graphs break there, and what it has
compiled is for the old parametrization alone: each call compiles anew, until Dynamo gives the code up. `register` has
compiled code compute the same weights in the graph.

Source: peft 0.21, tuners/lora/layer.py (`ParamWrapper`, `_LoraFactorsProxy`)."""

from typing import Any

import torch
from torch import Tensor, nn

from te_inductor.integrations.versions import parts_of

with parts_of("peft"):
    from peft.tuners.lora.layer import ParamWrapper

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
    if plain or self.get_param().dtype.itemsize == 1 or not torch.compiler.is_compiling():
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
