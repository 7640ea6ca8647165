"""What a rollout's view has of parameters that `fully_shard` has sharded: whole copies of those that it does not store, and
looks that all ranks have at once."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from te_inductor import compat
from te_inductor.compat.fsdp import ShardedParameter, members, sharded_parameters
from te_inductor.distributed import agreement
from te_inductor.distributed.world import digest, exchanged
from te_inductor.errors import StateError, StoredWeightError
from te_inductor.runtime.weights import followed_weights
from te_inductor.runtime.weights.followed_weights import FollowedView, FollowedWeights, ParameterPlace

Shards = Mapping[tuple[nn.Module, str], ShardedParameter]  # by the modules that hold them, and the names there
AT_ONCE = 256 << 20  # bytes of whole weights that are gathered before they are stored
_views = itertools.count()  # of sharded models, as all ranks make them in one order


def shards_of(model: nn.Module) -> Shards:
    """The parameters that `fully_shard` alone has sharded."""
    return {place: one for one in sharded_parameters(model) if one.parallel is None for place in one.modules}


def place_of(shard: ShardedParameter) -> ParameterPlace:
    """The place where optimizers find it, also while modules hold what was gathered."""
    return ParameterPlace(*shard.place, is_sharded=True)


@dataclass(frozen=True, eq=False)
class CopiedShard:
    """A parameter that the view holds whole, as it does not store it; among what follows, like weights that are stored
    together."""

    held: Tensor
    shard: ShardedParameter
    weights: tuple[()] = ()  # none is stored

    @property
    def gathered_bytes(self) -> int:
        return self.held.nbytes

    def again(self) -> Iterator[Any]:
        self.held.copy_(self.shard.whole)
        yield from ()


@dataclass(frozen=True)
class Look:
    """A hook before a module of the view that holds a copy. A compiled graph has looked before it runs."""

    weights: FollowedWeights | None  # None: of a copy of the view

    def __call__(self, *_: Any) -> None:
        if self.weights is not None and not compat.is_compiling():
            self.weights.view.look([self.weights])


def copy_others(
    view: FollowedView,
    stored: Iterable[tuple[nn.Module, str]],
    source_of: Mapping[nn.Module, nn.Module],
    shards: Shards,
) -> None:
    """Has the view hold copies of the sharded parameters that it does not store, which are yet to be filled."""
    copies, stored = dict[ShardedParameter, FollowedWeights](), set(stored)
    for module, source in source_of.items():
        for name in source._parameters:
            shard = shards.get((source, name))
            if shard is None or (module, name) in stored:
                continue
            if shard not in copies:
                empty = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
                held = nn.Parameter(empty, requires_grad=False)
                copies[shard] = FollowedWeights(view, [place_of(shard)], CopiedShard(held, shard))
                followed_weights.add([held], copies[shard])
            module._parameters[name] = copies[shard].group.held
            module.register_forward_pre_hook(Look(copies[shard]))
    view.weights += copies.values()


class GatheringRanks:
    """The ranks that gather what one view follows."""

    def __init__(self, shards: Shards, contents: Sequence[str]) -> None:
        groups = {tuple(members(one.ranks)) for one in shards.values()}
        [self.ranks] = groups if len(groups) == 1 else [tuple(range(dist.get_world_size()))]
        self.topic = f"rollout {next(_views)}"
        self.digest = digest(contents)

    def all(self, own: Any) -> list[Any]:
        """What the ranks have to say, in terms of JSON, this one among them; that which several say alike once.

        Raises:
            StateError: a rank did not come.
            StoredWeightError: their views store other weights, or by other recipes.
        """
        text = json.dumps([self.digest, own])
        told = [json.loads(one) for one in exchanged(self.ranks, self.topic, text, alone, agreement.PATIENCE)]
        if any(digest != self.digest for digest, _ in told):
            raise StoredWeightError(
                "ranks' views of a sharded model store different weights, expected the same ones by the same recipes; call"
                " te_inductor.rollout with the same arguments on all ranks, and for several models in the same order"
            )
        return [one for _, one in told]


def alone(rank: int, missing: Sequence[int], waited: float) -> StateError:
    """The error about ranks that do not look where this one has seen a change."""
    return StateError(
        f"rank {rank} has waited {waited:.0f} s with changed parameters, which ranks gather together, for"
        f" {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} to run the view of"
        " te_inductor.rollout too, expected all ranks to, between the same steps of the optimizer; call"
        " te_inductor.refresh_rollout(view) on all ranks behind the step, and each may then generate as much as it likes"
    )
