"""Scales that follow from the amaxes of earlier steps: those of the step, and those of a step before there are any."""

import torch

from te_inductor.ops.casts import ScalePair, tensor_amax
from te_inductor.ops.layers.parts import ScaledOperand, ScaleSource
from te_inductor.recipes.constants import constant
from te_inductor.recipes.delayed import DelayedScaling, ScaleUpdate
from te_inductor.runtime.eager import delayed


@constant
class Delayed(ScaleSource):
    """The scales that were read when the step began."""

    recipe: DelayedScaling
    slots: tuple[str, ...]  # of the operands that have one, in the order of the pairs

    def pair(self, operand: ScaledOperand) -> ScalePair | None:
        if operand.slot not in self.slots:
            return None
        place = 2 * self.slots.index(operand.slot)
        return ScalePair(*operand.step.pairs[place : place + 2])

    @property
    def first(self) -> "FirstStep":
        return FirstStep(self.recipe)


@constant
class FirstStep(ScaleSource):
    """The scales of a step in which some quantizer has no history: each tensor's follows from its own amax, by the
    recipe's formula. Note [A first step]."""

    recipe: DelayedScaling

    def pair(self, operand: ScaledOperand) -> ScalePair:
        recipe = self.recipe
        if recipe.scaling_factor_compute_algo is None:
            found, headroom = operand.current(), 2.0**recipe.margin
            return ScalePair(found.scale / headroom, found.scale_inv * headroom) if recipe.margin else found
        pieces = operand.pieces if operand.shared is None else [operand.shared()]
        amaxes = torch.stack([tensor_amax(piece) for piece in pieces]).amax(0, keepdim=True)
        scale = delayed.scale_of(
            amaxes, torch.ones_like(amaxes), ScaleUpdate(recipe, operand.quantizer.element)
        ).squeeze(0)
        return ScalePair(scale, scale.reciprocal())

    @property
    def is_shared(self) -> bool:
        return True
