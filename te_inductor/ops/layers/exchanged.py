"""Rows that experts have from other ranks: Note [Rows between ranks] in distributed/exchange.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_inductor.distributed.exchange import Exchange
from te_inductor.distributed.parallel import Ranks
from te_inductor.ops.layers.parts import BoundOperand, Operand
from te_inductor.recipes.constants import constant


@constant
class Exchanged(Operand):
    """The operand whose rows are exchanged as bytes. Its tensor, if it has one, is the order of rows on the experts'
    side; its sizes are the rows that go to each rank, then those that come from each."""

    group: str  # name of the process group

    def bound(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> BoundOperand:
        sent, received = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        return _ExchangedRows(Exchange(sent, received, self.group, tensors[0] if tensors else None))


@dataclass(frozen=True)
class _ExchangedRows(BoundOperand):
    exchange: Exchange
    shares_scale = True

    @property
    def ranks(self) -> Ranks:  # type: ignore[override]
        return self.exchange.ranks

    def forth(self, x: Tensor) -> Tensor:
        return self.exchange.to_experts(x)

    def back(self, y: Tensor, added: bool) -> Tensor:
        return self.exchange.from_experts(y, added)

    def largest(self, pieces: Sequence[Tensor]) -> Tensor:
        return super().largest(pieces).to(pieces[0].dtype)
