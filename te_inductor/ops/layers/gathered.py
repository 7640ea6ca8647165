"""Layers whose tensors are sharded over several ranks: Note [Tensor-parallel layers] in distributed/parallel.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_inductor import compat
from te_inductor.distributed.parallel import Parallel, Ranks, gather, reduce
from te_inductor.ops.layers.layer import LinearLayers
from te_inductor.ops.layers.parts import BoundOperand, Operand
from te_inductor.recipes.constants import constant
from te_inductor.runtime.definition import op_of


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
    layers: LinearLayers,
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
