"""The operands besides those that are cast at each call, where they lie: of layers whose tensors are sharded over several
ranks (Note [Tensor-parallel layers] in distributed/parallel.py), rows that experts have from other ranks, and weights
whose copies outlive a call (Note [A weight that has not changed]) or are what the program holds.

# Note [Rows between ranks]
Under expert parallelism rows are exchanged in front of the first layer of experts and behind the last one::

    x -> all_to_all -> order by expert -> layer … layer -> order by rank -> all_to_all -> y

A layer whose operands have one scale a tensor casts x before it is sent: a byte an element goes over the wire, and the
scale is that of the largest amax of all ranks, which is what one rank would find. In the backward the layer before the
second exchange casts dy likewise. y and dx, which are results, are exchanged in the layer's own dtype.

Formats with finer scales exchange x and dy in high precision: the weight gradient reads them with scales of columns of
one expert's rows, which no rank has before they are sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor import compat
from te_inductor.distributed.parallel import Parallel, Ranks, gather, reduce, wait
from te_inductor.ops.casts import Copy, transpose
from te_inductor.ops.layers.parts import BoundOperand, Operand
from te_inductor.recipes.constants import constant
from te_inductor.runtime.definition import op_of

_collectives = torch.ops._c10d_functional


@constant
class AllGathered(Operand):
    """The operand of which each rank has a part along a dimension; what the layer makes of it is a sum over ranks, and
    scattered along it."""

    group: str  # name of the process group
    size: int  # its number of ranks
    dim: int | None  # None: each rank has all of it, and of the sum
    reduces: bool  # whether what the layer makes is such a sum

    def bound(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> BoundOperand:
        return _Part(self)


@dataclass(frozen=True)
class _Part(BoundOperand):
    how: AllGathered

    @property
    def ranks(self) -> Ranks:  # type: ignore[override]
        return Ranks(self.how.group, self.how.size)

    @property
    def shares_scale(self) -> bool:  # type: ignore[override]
        return self.how.dim is not None

    @property
    def adds_up(self) -> bool:  # type: ignore[override]
        return self.how.reduces

    def forth(self, x: Tensor) -> Tensor:
        return x if self.how.dim is None else gather(x, self.how.dim, self.ranks)

    def back(self, y: Tensor, added: bool) -> Tensor:
        return reduce(y, self.how.dim, self.ranks) if self.how.reduces else y


def operands_of(parallel: Parallel) -> tuple[AllGathered, AllGathered]:
    """The input and the output of a layer's spec."""
    group = parallel.group, parallel.ranks
    return (
        AllGathered(*group, parallel.gathered, parallel.gathers),
        AllGathered(*group, parallel.scattered, parallel.reduces),
    )


def of_shards(
    layers: Callable[..., Any],
    parallel: Parallel,
    x: Any,
    token: Tensor | None,
    weights: Sequence[Any],
    biases: Sequence[Any],
    groups: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The layers of DTensors, on what this rank has of them; gradients are DTensors of the placements that each
    operand's have."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = x.device_mesh
    shard = None if parallel.x is None else Shard(parallel.x)
    # A whole operand of which each rank computes a part of the gradient has partial sums of it.
    whole_x = Partial() if parallel.weight == 0 else Replicate()
    whole_weight = Replicate() if shard is None else Partial()
    weight = whole_weight if parallel.weight is None else Shard(parallel.weight)
    scattered = parallel.reduces and parallel.y is not None
    bias = (
        Shard(0)
        if parallel.weight == 0
        else Partial()
        if scattered
        else whole_weight
        if parallel.weight is None
        else Replicate()
    )
    local = x.to_local(grad_placements=[shard or whole_x])
    ys = layers(
        local,
        token,
        *groups,
        *(one.to_local(grad_placements=[weight]) for one in weights),
        *(one.to_local(grad_placements=[bias]) for one in biases),
    )
    if parallel.local:
        return list(ys)
    if parallel.weight == 0:
        placement: Any = Shard(ys[0].dim() - 1)
    elif parallel.weight == 1:
        placement = Partial() if not parallel.reduces else Replicate() if parallel.y is None else Shard(parallel.y)
    else:
        placement = shard or Replicate()
    return [DTensor.from_local(y, mesh, [placement], run_check=False) for y in ys]


def _replicated(y: Tensor, like: Tensor) -> Tensor:
    """The DTensor, on the mesh of another one, that each rank has whole as y."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(y, like.device_mesh, [Replicate()], run_check=False)  # type: ignore[attr-defined]


local_of = op_of(compat.local_of, name="local_of")
replicated = op_of(_replicated, name="replicated")


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


@constant
class HeldValues(Operand):
    """The weight operand that the program holds in FP8, whose tensors are the values (N, K) and their scale, () or (N, 1)
    in fp32: the layer's row copy. Of a scale for all, the column copy is the transpose; of one a row, it is cast from what
    the program dequantized."""

    def bound(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> BoundOperand:
        data, scale_inv = tensors
        return _HeldValues(data, scale_inv)


@dataclass(frozen=True)
class _HeldValues(BoundOperand):
    data: Tensor
    scale_inv: Tensor

    def found(self, weights: Sequence[Tensor], columnwise: bool) -> list[tuple[Copy, Copy | None]]:
        column = None
        if columnwise and not self.scale_inv.dim():
            column = Copy(transpose(self.data, self.data.shape[1]), self.scale_inv)
        return [(Copy(self.data, self.scale_inv), column)]
