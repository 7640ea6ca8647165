"""Weights whose copies outlive a call: Note [A weight that has not changed]."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_inductor.ops.casts import Copy
from te_inductor.ops.layers.parts import BoundOperand, Operand
from te_inductor.recipes.constants import constant


@constant
class Kept(Operand):
    """The weight operand whose tensors are the copies, as `CachedWeight.taken` has them."""

    two_level: bool = False  # whether their scales have two levels: then the amax is the last tensor

    def bound(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> BoundOperand:
        return _Copies(tensors, self.two_level)


@dataclass(frozen=True)
class _Copies(BoundOperand):
    tensors: Sequence[Tensor]
    two_level: bool

    def found(self, weights: Sequence[Tensor], columnwise: bool) -> list[tuple[Copy, Copy | None]]:
        kept, amax = (self.tensors[:-1], self.tensors[-1]) if self.two_level else (self.tensors, None)
        return [(Copy(kept[0], kept[1], amax), Copy(kept[2], kept[3], amax) if len(kept) > 2 else None)]
