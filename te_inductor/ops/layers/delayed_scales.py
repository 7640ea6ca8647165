"""Scales that follow from the amaxes of earlier steps: those of the step, and those of a step before there are any."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from te_inductor.ops.casts import ScalePair, current_scale, tensor_amax
from te_inductor.ops.layers.parts import ScaleSource, StepTensors
from te_inductor.recipes import Quantizer
from te_inductor.recipes.constants import constant
from te_inductor.recipes.delayed import DelayedScaling, ScaleUpdate
from te_inductor.runtime.eager import delayed


@constant
class Delayed(ScaleSource):
    """The scales that were read when the step began."""

    recipe: DelayedScaling
    slots: tuple[str, ...]  # of the operands that have one, in the order of the pairs

    def pair(
        self,
        slot: str,
        pieces: Sequence[Tensor],
        quantizer: Quantizer,
        tensors: StepTensors,
        shared: Callable[[], Tensor] | None,
    ) -> ScalePair | None:
        if slot not in self.slots:
            return None
        place = 2 * self.slots.index(slot)
        return ScalePair(*tensors.pairs[place : place + 2])

    @property
    def first(self) -> "FirstStep":
        return FirstStep(self.recipe)


@constant
class FirstStep(ScaleSource):
    """The scales of a step in which some quantizer has no history: each tensor's follows from its own amax, by the
    recipe's formula. Note [A first step]."""

    recipe: DelayedScaling

    def pair(
        self,
        slot: str,
        pieces: Sequence[Tensor],
        quantizer: Quantizer,
        tensors: StepTensors,
        shared: Callable[[], Tensor] | None,
    ) -> ScalePair:
        recipe, pieces = self.recipe, pieces if shared is None else [shared()]
        if recipe.scaling_factor_compute_algo is None:
            scale, scale_inv = current_scale(pieces, quantizer)
            headroom = 2.0**recipe.margin
            return ScalePair(scale / headroom, scale_inv * headroom) if recipe.margin else ScalePair(scale, scale_inv)
        amaxes = torch.stack([tensor_amax(piece) for piece in pieces]).amax(0, keepdim=True)
        scale = delayed.scale_of(amaxes, torch.ones_like(amaxes), ScaleUpdate(recipe, quantizer.element)).squeeze(0)
        return ScalePair(scale, scale.reciprocal())

    @property
    def is_shared(self) -> bool:
        return True
