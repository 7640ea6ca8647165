"""The part of a layer whose weight the graph gathers from its shards: Note [Graph FSDP] in ops/sharded_weight.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.sites.part import SitePart
from te_inductor.recipes import Slots

if TYPE_CHECKING:
    from te_inductor.passes.pre_grad.sites.rule import Match


@dataclass(frozen=True)
class Gather(SitePart):
    """How a weight is gathered in front of the layer."""

    between_ranks: ClassVar[bool] = True
    shard: fx.Node  # a DTensor, of the ranks' rows
    dtype: torch.dtype  # in which it is gathered
    backward_dtype: torch.dtype  # in which its gradient is reduced
    nodes: tuple[fx.Node, ...]  # what gathers it, the last first
    refusal: Refusal | None = None  # why no bytes of its cast are gathered instead

    def may_merge(self, match: "Match", slots: Slots) -> bool:
        """Each weight is cast with its own scale, or is no input of the graph."""
        return False

    def describe(self, slots: Slots) -> list[str]:
        if self.refusal is None:
            return [f"the graph gathers its weight in {slots.weight.element}"]
        return [f"the graph gathers its weight in {str(self.dtype).removeprefix('torch.')}: {self.refusal}"]
