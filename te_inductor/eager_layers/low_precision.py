"""A linear layer in low precision, and the values of a low-precision copy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.eager_layers.high_precision import LinearMap
from te_inductor.errors import RecipeError
from te_inductor.recipes import DelayedScaling, Quantizer, Recipe, resolve


class Linear:
    """``x @ weight.T + bias``, the operands of all three GEMMs in the low precision of a recipe. Inputs: x (..., K),
    weight (N, K), bias (N,) or None. The result has the dtype of x.

    Raises:
        RecipeError: the recipe has state (DelayedScaling), or no low precision.
    """

    def __init__(self, recipe: Recipe | str) -> None:
        self.spec = spec_of(recipe, "Linear")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # An op of a library is out of torch.func's reach while it is called.
        layers = ops.trace_layers if torch._C._are_functorch_transforms_active() else ops.layers
        return layers(x, [weight], [] if bias is None else [bias], self.spec, x.dtype)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Quantize(LinearMap):
    """The values that the rowwise copy of x (..., C) stands for, in x's dtype; likewise of the gradient; None: as it
    is."""

    quantizer: Quantizer | None
    grad_quantizer: Quantizer | None = None

    def value(self, x: Tensor) -> Tensor:
        return _rounded(x, self.quantizer)

    def gradient(self, dy: Tensor, shape: torch.Size) -> Tensor:
        return _rounded(dy, self.grad_quantizer)


def spec_of(recipe: Recipe | str, layer: str) -> ops.LayerSpec:
    """What a layer by hand is.

    Raises:
        RecipeError: the recipe has state, or no low precision.
    """
    named = resolve(recipe)
    if named is None or isinstance(named, DelayedScaling):
        raise RecipeError(f"recipe {recipe!r} of an eager {layer}, expected one of low precision and without state")
    return ops.LayerSpec(named.slots_of(""))


def _rounded(x: Tensor, quantizer: Quantizer | None) -> Tensor:
    if quantizer is None:
        return x.clone()
    flat = x.reshape(-1, x.shape[-1])
    copy, _ = ops.copies([flat], 0, quantizer, None, columnwise=False)
    assert copy is not None
    return ops.values(copy, quantizer, flat.shape[1], x.dtype).view(x.shape)
