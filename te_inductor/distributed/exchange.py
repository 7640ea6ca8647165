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

_collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class Exchange:
    """One all-to-all, with the order of rows on the experts' side of it. Splits are rows to and from each rank."""

    sent: Sequence[Any]
    received: Sequence[Any]
    group: str
    order: Tensor | None = None  # which of the rows at the all-to-all each of the experts' rows is

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.group, len(self.sent))

    def to_experts(self, x: Tensor) -> Tensor:
        """Rows as the experts see them, of x, or of a gradient of what goes back."""
        narrow = x.dtype.itemsize == 1
        rows = x.view(torch.uint8) if narrow else x
        rows = self._swap(rows, self.received, self.sent)
        rows = rows if self.order is None else rows[self.order]
        return rows.view(x.dtype) if narrow else rows

    def from_experts(self, y: Tensor, added: bool) -> Tensor:
        """What goes back of experts' rows: outputs, or the gradient of x, where several experts' rows that are one are
        `added` up."""
        if self.order is not None:
            shape = (_sum(self.received), *y.shape[1:])
            rows = y.new_zeros(shape) if added else y.new_empty(shape)
            y = rows.index_put((self.order,), y, accumulate=added)
        return self._swap(y, self.sent, self.received)

    def _swap(self, x: Tensor, received: Sequence[Any], sent: Sequence[Any]) -> Tensor:
        made = _collectives.all_to_all_single(x.contiguous(), list(received), list(sent), self.group)
        return wait(made)


def _sum(sizes: Sequence[Any]) -> Any:
    return torch.sym_sum(list(sizes)) if any(isinstance(size, torch.SymInt) for size in sizes) else sum(sizes)
