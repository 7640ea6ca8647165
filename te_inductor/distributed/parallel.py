"""Tensor parallelism: how the tensors of one linear layer are sharded over the ranks of a process group, and the collectives
around its GEMMs.

# Note [Tensor-parallel layers]
Under a plan of torch.distributed.tensor.parallel a weight is a DTensor. Its layer is one of three::

    weight   x before              y                       dx
    rows     whole, or gathered    columns of y            partial sums, or scattered
    columns  columns of x          partial sums, reduced   columns of dx
    whole    whole, or rows        as x                    as x

Each rank multiplies its own operands, so a tensor that stays where it is may have one scale a rank. A tensor that is
gathered may not: its bytes are cast before the gather, and a GEMM takes one scale for all of them. So the amaxes of its
shards are reduced by MAX before the cast (current scaling; delayed scaling reduces them when scales are updated). That
is x in front of a weight of which each rank has rows, and dy behind one of which it has columns, whose sums were
scattered. Formats with scales finer than a tensor's are gathered in high precision, since the copies that the GEMMs
read would each need scales of all rows.

Partial sums are never cast: they are added up in the layer's own dtype first."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_inductor.recipes.constants import Constant, constant

_collectives = torch.ops._c10d_functional


class Ranks(NamedTuple):
    """The ranks of a process group."""

    group: str  # its name
    ranks: int  # its size


@constant
class Parallel(Constant):
    """The placements of one layer. Dimensions count from the front; None: no dimension is sharded."""

    group: str  # name of the process group
    ranks: int  # its size
    weight: int | None  # dimension of the weight: 0 (its rows, N), 1 (its columns, K)
    x: int | None  # dimension of x, which is the last one where the weight's is 1
    gathers: bool  # whether x is gathered along it
    reduces: bool  # whether y is summed over the ranks
    y: int | None  # dimension of y along which those sums are scattered
    local: bool  # whether what reads y reads what this rank has of it, a plain tensor

    def sizes(self, m: Any, n: int, k: int) -> tuple[Any, int, int]:
        """Returns the sizes of one rank's GEMM, from those of the whole layer; where ranks have some rows each, of the
        rank that has most."""
        sharded = self.weight is None and self.x is not None
        return (
            m // self.ranks if sharded else m,
            -(-n // self.ranks) if self.weight == 0 else n,
            k // self.ranks if self.weight == 1 else k,
        )

    @property
    def gathered(self) -> int | None:
        """The dimension along which x is gathered, and dx scattered."""
        return self.x if self.gathers else None

    @property
    def scattered(self) -> int | None:
        """The dimension along which y is scattered, and dy gathered."""
        return self.y if self.reduces else None


def is_shard(placement: Any) -> bool:
    """Whether a placement of a DTensor shards a dimension, and not in strides."""
    from torch.distributed.tensor import Shard

    return type(placement) is Shard


def gather(x: Tensor, dim: int, parallel: Parallel | Ranks) -> Tensor:
    """The x of all ranks, one behind the other along `dim`. FP8 goes over the wire as bytes."""
    wire = x.contiguous()
    narrow = x.dtype.itemsize == 1
    wire = wire.view(torch.uint8) if narrow else wire
    found = wait(_collectives.all_gather_into_tensor(wire, parallel.ranks, parallel.group))
    found = _to_dim(found, dim, parallel.ranks)
    return found.view(x.dtype) if narrow else found


def _to_dim(x: Tensor, dim: int, ranks: int) -> Tensor:
    """Blocks that lie behind each other along the first dimension, behind each other along `dim`."""
    if dim == 0:
        return x
    return torch.cat(x.split(x.shape[0] // ranks), dim)


def reduce(x: Tensor, dim: int | None, parallel: Parallel | Ranks) -> Tensor:
    """The sum of all ranks' x, or along `dim` this rank's part of it."""
    x = x.contiguous()
    if dim is None:
        return wait(_collectives.all_reduce(x, "sum", parallel.group))
    if dim:
        x = torch.cat(x.split(x.shape[dim] // parallel.ranks, dim))
    return wait(_collectives.reduce_scatter_tensor(x, "sum", parallel.ranks, parallel.group))


def largest(amax: Tensor, parallel: Parallel | Ranks) -> Tensor:
    """The largest amax of all ranks, of each element; NaN where one of them has one. Bit patterns are compared, which
    order NaN above all numbers, as each rank has to find the same."""
    bits = wait(_collectives.all_reduce(amax.view(torch.int32), "max", parallel.group))
    return bits.view(torch.float32)


def wait(x: Any) -> Tensor:
    return _collectives.wait_tensor(x)  # type: ignore[no-any-return]
