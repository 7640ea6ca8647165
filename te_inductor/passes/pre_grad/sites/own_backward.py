"""The part of a layer whose backward multiplies other operands than those that its slots cast: `Operands` of recipes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_inductor.diagnostics import Refusal
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.sites.part import SitePart
from te_inductor.recipes import Slots

if TYPE_CHECKING:
    from te_inductor.passes.pre_grad.sites.rule import Match


@dataclass(frozen=True)
class OwnBackward(SitePart):
    """What such a backward asks for, of the layer's slots."""

    slots: Slots

    def refuse(self, match: "Match") -> Refusal | None:
        if isinstance(value(match.weight), GatheredWeight) and self.slots.multiplies_given:
            return Refusal(
                "the backward multiplies by the weight itself, which was gathered in low precision;"
                " backward='dequantized' multiplies by what was gathered"
            )
        dtype = value(match.node).dtype
        if match.dims > 2 and dtype != torch.bfloat16 and (self.slots.dgrad.is_high or self.slots.wgrad.is_high):
            return Refusal(
                "the backward of experts in high precision is torch's grouped product, which it compiles for bfloat16"
                " alone, here is %s",
                str(dtype).removeprefix("torch."),
            )
        return None

    def refuse_taken(self, match: "Match", deferred: bool) -> Refusal | None:
        if self.slots.wgrad.is_high and match.dims > 2:
            return Refusal("torch's grouped product, which the backward is in high precision, adds to no total")
        if self.slots.wgrad.is_high and deferred:
            return Refusal("it multiplies tensors of the program, which may have changed when it runs")
        return None

    def refuse_gathered(self) -> Refusal | None:
        if self.slots.multiplies_given:
            return Refusal("the backward multiplies by the weight itself, or casts it by another recipe")
        return None

    def refuse_exchanged(self) -> Refusal | None:
        return Refusal("the backward multiplies them in another precision than the forward")

    def refuse_loss(self) -> Refusal | None:
        return Refusal("its backward is computed with the loss, in the recipe's own precision alone")
