"""A scale that follows from a bound that is known beforehand, as gradients of a loss have one: what is cast with it is
not read for its amax."""

import torch

from te_inductor.errors import RecipeError
from te_inductor.ops.casts import ScalePair
from te_inductor.ops.layers.parts import ScaledOperand, ScaleSource
from te_inductor.recipes.constants import constant


@constant
class KnownScale(ScaleSource):
    """The source of one slot's scale where no magnitude of its operand is larger than `amax`: the scale that a tensor of
    this amax would have by its quantizer's formula. What is larger after all saturates, so that the bound has to be a
    proof. Other slots, and scales finer than the tensor's, have those of `others`."""

    amax: float
    slot: str = "grad_output"
    others: ScaleSource = ScaleSource()

    def __post_init__(self) -> None:
        tiny, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
        if not tiny <= self.amax <= most:
            raise RecipeError(
                f"KnownScale.amax is {self.amax}, expected a normal positive fp32 number, from {tiny:.3g} on"
            )

    def pair(self, operand: ScaledOperand) -> ScalePair | None:
        if operand.slot != self.slot or not operand.quantizer.granularity.whole:
            return self.others.pair(operand)
        bound = torch.full((1, 1), self.amax, dtype=torch.float32, device=operand.pieces[0].device)
        return ScaledOperand(self.slot, [bound], operand.quantizer).current()

    @property
    def is_shared(self) -> bool:
        return self.others.is_shared

    @property
    def first(self) -> "KnownScale":
        return KnownScale(self.amax, self.slot, self.others.first)
