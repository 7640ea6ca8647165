"""The scales of weights that are cast before they are gathered. A scale is that of the whole weight, of which each rank
has some rows: the ranks take the largest of what each measures of its own.

One kind a recipe. Each measures all of its weights at once, and makes their scales of the numbers that the ranks have
reduced."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.compat.fsdp import ShardedParameter
from te_inductor.distributed.fsdp.casts import block_amaxes
from te_inductor.errors import GatherError
from te_inductor.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.runtime.eager import dense
from te_inductor.runtime.eager.delayed import scale_of
from te_inductor.runtime.state.state_sites import weight_site
from te_inductor.runtime.state.store import Key, QuantizerState, keep_with_shard, note_history

Scales = tuple[Sequence[Tensor], Sequence[Tensor]]  # of each weight: what it is cast with, and scale_inv


def amaxes_of(shards: Sequence[ShardedParameter]) -> Tensor:  # (weights,) fp32
    """The largest magnitude of each shard as it would be gathered; infinite where it has a value that is not finite."""
    # Rounding is monotonous: the largest of rounded values is the largest value, rounded.
    found = torch.stack(torch._foreach_norm([one.data for one in shards], torch.inf))
    return _visible(found.to(shards[0].dtype).float())


def _visible(amax: Tensor) -> Tensor:
    """A NaN as infinity, which a maximum over ranks keeps: either means scale 1, on all of them."""
    return torch.where(amax < torch.inf, amax, torch.inf)


class ScalesOf:
    """The scales of the weights of one recipe, which have one dtype."""

    whole = False  # whether parts of a weight that are gathered apart have its scale too

    def __init__(self, shards: Sequence[ShardedParameter], recipe: Any) -> None:
        self.shards, self.recipe, self.quantizer = shards, recipe, recipe.slots().weight
        self.dtype = shards[0].dtype

    def measure(self, records: bool) -> Tensor:
        """What the ranks have to reduce, in one dimension, fp32; `records` whether this is a step that trains."""
        raise NotImplementedError

    def scales(self, reduced: Tensor) -> Scales:
        """Returns the scales for the largest of what the ranks measured."""
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """Whether `scales` reads the numbers, so that they have to be there before a weight is cast."""
        return True

    def note_gathered(self, places: Sequence[int]) -> None:
        """Some of the weights, by their places, have been gathered for a forward, and the reduced numbers are there."""


class CurrentScales(ScalesOf):
    """One scale a weight, from its amax."""

    def measure(self, records: bool) -> Tensor:
        return amaxes_of(self.shards)

    def scales(self, reduced: Tensor) -> Scales:
        scale = dense.encode_scale(reduced, self.quantizer, self.dtype)
        return scale.unbind(), (1.0 / scale).unbind()


class BlockScales(ScalesOf):
    """One scale for each 128 x 128 block of the weight, wherever it is cut into shards."""

    def measure(self, records: bool) -> Tensor:
        return torch.cat([_visible(amaxes).flatten() for amaxes in block_amaxes(self.shards, self.quantizer)])

    def scales(self, reduced: Tensor) -> Scales:
        scope = self.quantizer.granularity
        sizes = [scope.scale_shape(*shard.shape)[0] for shard in self.shards]
        scale = dense.encode_scale(reduced, self.quantizer, self.dtype)
        return scale.split(sizes), (1.0 / scale).split(sizes)


class EarlierScales(ScalesOf):
    """One scale a weight, from the amaxes of earlier steps: the state of the weight's quantizer, kept with its
    parameter. Ranks have equal states, as they take the same amaxes; their scales are reduced beside those, so that
    what was loaded on one of them alone is found."""

    whole = True

    def __init__(self, shards: Sequence[ShardedParameter], recipe: DelayedScaling) -> None:
        super().__init__(shards, recipe)
        number, device = len(shards), shards[0].device
        made: dict[str, Any] = {"dtype": torch.float32, "device": device}
        numbers = torch.zeros(number, recipe.amax_history_len + 1, **made)
        self.histories, self.state_scales = numbers[:, :-1], numbers[:, -1]
        self.state_scales.fill_(1.0)
        self.states = [QuantizerState(tensor) for tensor in numbers.unbind()]
        for shard, state in zip(shards, self.states, strict=True):
            keep_with_shard(shard.sharded, Key(weight_site(""), recipe), state)
        self.records = self.recorded = self.goes_on = False
        self.loads: list[int] | None = None
        self.verifies = True
        self.lacking: list[bool] = []
        self.amaxes: Sequence[Tensor] = ()  # of this round, one a weight

    def measure(self, records: bool) -> Tensor:
        loads = [state.loads for state in self.states]
        self.verifies, self.loads = loads != self.loads, loads
        if self.verifies and bool((self.histories[:, 0] > 0).any()):  # saved between a step and its end
            self.recorded = True
        # The step before this one ends where the next one begins, which none of its microbatches does.
        if self.recorded and not self.goes_on:
            update, states = ScaleUpdate(self.recipe, self.quantizer.element), self.states
            ops.update_scales([state.tensor for state in states], update)
            self.recorded = False
        self.records, self.goes_on = records, not all(shard.reduces_gradient for shard in self.shards)
        if any(state.is_due for state in self.states):
            note_history([state for state in self.states if not state.has_history])
        self.lacking = [not state.has_history for state in self.states]
        for state in self.states if records else ():
            state.recordings += 1
        return torch.cat([amaxes_of(self.shards), self.state_scales, -self.state_scales])

    @property
    def waits(self) -> bool:
        return self.verifies or any(self.lacking)

    def scales(self, reduced: Tensor) -> Scales:
        self.amaxes = reduced[: len(self.states)].unbind()
        if self.verifies:
            self._verify(*reduced.chunk(3)[1:])
        scale, scale_inv = self.state_scales.clone(), self.state_scales.reciprocal()
        if any(self.lacking):
            own, own_inv = self._own(reduced[: len(self.states)])
            lacking = torch.tensor(self.lacking, dtype=torch.bool, device=scale.device)
            scale, scale_inv = torch.where(lacking, own, scale), torch.where(lacking, own_inv, scale_inv)
        return scale.unbind(), scale_inv.unbind()

    def _own(self, amaxes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scales of a first step: Note [A first step]."""
        if self.recipe.scaling_factor_compute_algo is None:
            headroom = 2.0**self.recipe.margin
            scale = dense.encode_scale(amaxes, self.quantizer, self.dtype)
            return scale / headroom, 1.0 / scale * headroom
        update = ScaleUpdate(self.recipe, self.quantizer.element)
        scale = scale_of(amaxes, torch.ones_like(amaxes), update)
        return scale, scale.reciprocal()

    def _verify(self, largest: Tensor, negated: Tensor) -> None:
        differ = (largest != -negated).tolist()
        if any(differ):
            place = differ.index(True)
            raise GatherError(
                f"ranks have scales from {-negated[place].item():.6g} to {largest[place].item():.6g} of one weight of"
                f" shape {tuple(self.shards[place].shape)}, expected the same state of delayed scaling on all of them;"
                " call te_inductor.load_state_dict with each rank's own state, on all ranks or on none"
            )

    def note_gathered(self, places: Sequence[int]) -> None:
        if self.records:
            noted = [self.states[place].amax for place in places], [self.amaxes[place] for place in places]
            torch._foreach_maximum_(*noted)  # of all microbatches
            self.recorded = True


KINDS: dict[type[Recipe], type[ScalesOf]] = {
    DelayedScaling: EarlierScales,
    Float8CurrentScaling: CurrentScales,
    Float8BlockScaling: BlockScales,
}
