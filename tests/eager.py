"""The eager reference of a compiled model: the same layers quantized with the same quantizers, by the eager ops, under
plain autograd. Without code generation a compiled model computes this bit for bit."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_inductor import Report, explain, recipes
from te_inductor.ops import LayerSpec, layers
from te_inductor.ops.layers.delayed_scales import FirstStep
from te_inductor.recipes import DelayedScaling, Recipe


class _Layers:
    """Linear layers that are one GEMM: called one after the other with one input, computed at the first call."""

    def __init__(self, layers: list[nn.Linear], recipe: Recipe, path: str) -> None:
        self.layers, self.recipe, self.slots = layers, recipe, recipe.slots_of(path)
        self.outputs: dict[nn.Linear, Tensor] = {}

    def output(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if layer not in self.outputs:
            weights = [one.weight for one in self.layers]  # read anew: a parametrization computes them
            biases = [] if layer.bias is None else [one.bias for one in self.layers]
            device = x.device.type
            autocast = torch.is_autocast_enabled(device)
            out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
            if isinstance(self.recipe, DelayedScaling):  # a first step: scales follow from the tensors
                amax = torch.zeros(())
                spec = LayerSpec(self.slots, FirstStep(self.recipe))
                ys = layers(x, weights, biases, spec, out_dtype, grad_amax=amax)
            else:
                ys = layers(x, weights, biases, LayerSpec(self.slots), out_dtype)
            self.outputs = dict(zip(self.layers, ys, strict=True))
        return self.outputs.pop(layer)


class _Layer(nn.Module):
    """Stands for a linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.group: _Layers | None = None

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.group.output(self.layer, x)  # type: ignore[union-attr]


def quantized(model: nn.Module, *inputs: Any, options: Mapping[str, Any]) -> nn.Module:
    """A copy of a model of `nn.Linear`s in which those that run in low precision do so eagerly. Delayed scaling is in
    its first step."""
    return quantized_as(explain(model, *inputs, options=options), model, {})


def quantized_as(report: Report, model: nn.Module, instances: Mapping[str, Recipe]) -> nn.Module:
    """The same where `explain` has been asked. `instances` are recipes, by a layer's module path or by the name that
    the report has, where that is not the recipe of that name."""
    assert report.failure is None, report.failure
    twin = copy.deepcopy(model)
    sites = {site.fqn: site for site in report.sites if site.gemm == "fprop" and site.kernel != "high_precision"}
    for path in [path for path, site in sites.items() if site.pattern == "grouped_linear"]:
        site = sites.pop(path)
        recipe = instances.get(path) or instances.get(site.recipe) or recipes.resolve(site.recipe)
        twin.get_submodule(path.rpartition(".")[0]).low = recipe  # of tests/experts.py
    layers = {path: _Layer(twin.get_submodule(path)) for path in sites}  # type: ignore[arg-type]
    for path, site in sites.items():
        if layers[path].group is None:
            together = [layers[other] for other in site.merged or (path,)]
            recipe = instances.get(path) or instances.get(site.recipe) or recipes.resolve(site.recipe)
            group = _Layers([layer.layer for layer in together], recipe, path)  # type: ignore[arg-type]
            for layer in together:
                layer.group = group
    for path, layer in layers.items():
        twin.set_submodule(path, layer)
    return twin
