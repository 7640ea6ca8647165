"""Expert parallelism: rows that go to the ranks that have their experts, and back.

# Note [Rows between ranks]
Under expert parallelism rows are exchanged in front of the first layer of experts and behind the last one::

    x -> all_to_all -> order by expert -> layer … layer -> order by rank -> all_to_all -> y

A layer whose operands have one scale a tensor casts x before it is sent: a byte an element goes over the wire, and the
scale is that of the largest amax of all ranks, which is what one rank would find. In the backward the layer before the
second exchange casts dy likewise. y and dx, which are results, are exchanged in the layer's own dtype.

Formats with finer scales exchange x and dy in high precision: the weight gradient reads them with scales of columns of
one expert's rows, which no rank has before they are sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor.distributed.parallel import Ranks, wait
from te_inductor.ops.layers.parts import BoundOperand, Operand
from te_inductor.recipes.constants import constant

_collectives = torch.ops._c10d_functional


@constant
class Exchanged(Operand):
    """The operand whose rows are exchanged as bytes. Its tensor, if it has one, is the order of rows on the experts'
    side; its sizes are the rows that go to each rank, then those that come from each."""

    group: str  # name of the process group

    def bound(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> BoundOperand:
        sent, received = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        return _ExchangedRows(sent, received, self.group, tensors[0] if tensors else None)


@dataclass(frozen=True)
class _ExchangedRows(BoundOperand):
    """One all-to-all, with the order of rows on the experts' side of it. Splits are rows to and from each rank."""

    sent: Sequence[Any]
    received: Sequence[Any]
    group: str
    order: Tensor | None = None  # which of the rows at the all-to-all each of the experts' rows is
    shares_scale = True

    @property
    def ranks(self) -> Ranks:  # type: ignore[override]
        return Ranks(self.group, len(self.sent))

    def forth(self, x: Tensor) -> Tensor:
        """Rows as the experts see them, of x, or of a gradient of what goes back."""
        narrow = x.dtype.itemsize == 1
        rows = x.view(torch.uint8) if narrow else x
        rows = self._swap(rows, self.received, self.sent)
        rows = rows if self.order is None else rows[self.order]
        return rows.view(x.dtype) if narrow else rows

    def back(self, y: Tensor, added: bool) -> Tensor:
        """What goes back of experts' rows: outputs, or the gradient of x, where several experts' rows that are one are
        `added` up."""
        if self.order is not None:
            shape = (_sum(self.received), *y.shape[1:])
            rows = y.new_zeros(shape) if added else y.new_empty(shape)
            y = rows.index_put((self.order,), y, accumulate=added)
        return self._swap(y, self.sent, self.received)

    def largest(self, pieces: Sequence[Tensor]) -> Tensor:
        return super().largest(pieces).to(pieces[0].dtype)

    def _swap(self, x: Tensor, received: Sequence[Any], sent: Sequence[Any]) -> Tensor:
        made = _collectives.all_to_all_single(x.contiguous(), list(received), list(sent), self.group)
        return wait(made)


def _sum(sizes: Sequence[Any]) -> Any:
    return torch.sym_sum(list(sizes)) if any(isinstance(size, torch.SymInt) for size in sizes) else sum(sizes)
