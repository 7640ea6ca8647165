"""What FSDP2's hooks do: cast a rank's rows of each weight, hand their bytes to FSDP's all-gather, and make a
`GatheredWeight` of what it brings.

# Note [A round of gathers]
Weights are measured, and their scales reduced over the ranks, once a round: all weights of one process group and dtype
by one MAX all-reduce, however many there are. A round begins with the first gather behind

- the start of the model's forward, which a hook notes;
- an optimizer's step, of any optimizer, and `load_state_dict`;
- a forward's gather of what this round has gathered in a forward already, as where parts of a model are called.

So a scale is never one of values that have changed since, and all ranks begin rounds at the same gathers. In a round
each weight is cast once: the bytes are kept, and gathered again for the backward. A weight's scale_inv is written where
FSDP has filled in its values, and nowhere else: what stays gathered while another round begins keeps its own.

The all-reduce is the group's first collective in a round, in front of FSDP's all-gathers, on all ranks. Under delayed
scaling nothing waits for it but the next step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

from te_inductor import compat
from te_inductor.compat.fsdp import Hook, ShardedParameter
from te_inductor.distributed.fsdp.casts import cast_rows
from te_inductor.distributed.fsdp.scales import KINDS, ScalesOf
from te_inductor.errors import GatherError
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.presentation.paths import grouped
from te_inductor.recipes import Quantizer, Recipe


@dataclass(eq=False)
class Weight:
    """One that is gathered in low precision."""

    name: str
    shard: ShardedParameter
    recipe: Recipe
    quantizer: Quantizer  # the recipe's for weights; one object for all, which guards then compare at once
    rounds: "Rounds" = field(init=False)
    together: list["Weight"] = field(init=False)  # what FSDP gathers at once, itself among them
    scale: Tensor | None = None  # of this round
    scale_inv: Tensor | None = None
    rows: Tensor | None = None  # bytes, cast in this round
    rows_scale_inv: Tensor | None = None  # theirs
    forwards: int = 0  # the last round in which a forward gathered it
    noted: int = 0  # the same, where its kind of scales knows
    given: Tensor | None = None  # the scale_inv that the gathered weight has

    def __post_init__(self) -> None:
        self.hooks = Hook(self.before_gather), Hook(self.after_gather)

    def attach(self) -> None:
        """Have FSDP call us; again where another tensor has taken the shard's place."""
        self.shard.hook(*self.hooks)

    def __deepcopy__(self, memo: Any) -> "Weight":
        """A copied shard has these hooks too, and nobody calls them."""
        return self

    def __reduce__(self) -> Any:
        raise GatherError(
            f"the shard of {self.name} itself is pickled, with the hooks by which FSDP2 gathers it in low precision,"
            " expected a tensor of model.state_dict(); or clone() it first"
        )

    def before_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The bytes that this rank contributes."""
        if not self.shard.in_backward:
            self.rounds.begin_if_over(self)
        elif self.rows is None:
            self.rounds.begin_if_stale()
        if self.rows is None:
            self.rounds.cast(self.together)
        assert self.rows is not None
        return (self.rows,), None

    def after_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The weight, made of all ranks' bytes; later its scales alone, as FSDP fills the same memory."""
        if not self.shard.in_backward:
            self.rounds.note_gathered(self)
        assert self.rows_scale_inv is not None
        if out is not None:
            made = cast(GatheredWeight, compat.shard_of(out))  # which this method made
            if self.given is not self.rows_scale_inv:
                with torch.no_grad(), _unsafe_preserve_version_counter(made.scale_inv):
                    made.scale_inv.copy_(self.rows_scale_inv)
                self.given = self.rows_scale_inv
            return None
        shape, element = self.shard.shape, self.quantizer.format.dtype
        values = gathered[0].view(-1, shape[1])[: shape[0]].view(element)
        with torch.inference_mode(False), torch.no_grad():
            scale_inv = self.rows_scale_inv.clone()
        self.given = self.rows_scale_inv
        return GatheredWeight(values, scale_inv, shape, dtype, self.recipe, self.quantizer), ()


class Rounds:
    """The rounds of all weights that are sharded over one process group and gathered from one dtype. `parallel` are the
    ranks that have other parts of them by tensor parallelism; a rank gathers its part, whose scale is its own but under
    delayed scaling, where all have that of the whole weight."""

    def __init__(self, ranks: Any, weights: Sequence[Weight], parallel: Any = None) -> None:
        self.ranks, self.weights, self.parallel = ranks, list(weights), parallel
        self.number = 0
        self.stale = True
        self.trains = True
        self.kinds: list[tuple[ScalesOf, list[Weight]]] = []
        self.places: dict[Any, list[tuple[int, list[int]]]] = {}  # of what is gathered at once: kinds, and where there
        self._reduction: Any = None  # while it runs
        self._reduced: list[Tensor] = []
        for together in grouped(weights, lambda weight: weight.shard.group).values():
            for weight in together:
                weight.rounds, weight.together = self, together

    def before_forward(self, trains: bool) -> None:
        """The model's forward starts."""
        self.stale, self.trains = True, trains
        for weight in self.weights:
            weight.attach()

    def weights_changed(self) -> None:
        self.stale = True
        for weight in self.weights:
            weight.rows = None

    def begin_if_stale(self) -> None:
        if self.stale:
            self._begin()

    def begin_if_over(self, weight: Weight) -> None:
        """Is called before a forward's gather of a weight."""
        if self.stale or weight.forwards == self.number:
            self._begin()
        weight.forwards = self.number

    @torch.no_grad()
    def _begin(self) -> None:
        self._wait()
        self.number += 1
        self.stale = False
        with torch.inference_mode(False):
            self._kinds()
            measured = [kind.measure(self.trains) for kind, _ in self.kinds]
            sizes = [len(one) for one in measured]
            whole = torch.cat(measured)
            self._reduction = dist.all_reduce(whole, dist.ReduceOp.MAX, self.ranks, async_op=True)
            self._reduced = list(whole.split(sizes))
            for (kind, _), numbers in zip(self.kinds, self._reduced, strict=True):
                if kind.whole and self.parallel is not None:
                    self._wait()
                    self._reduction = dist.all_reduce(numbers, dist.ReduceOp.MAX, self.parallel, async_op=True)
            if any(kind.waits for kind, _ in self.kinds):
                self._wait()
            for (kind, weights), numbers in zip(self.kinds, self._reduced, strict=True):
                scales = kind.scales(numbers)
                for weight, scale, scale_inv in zip(weights, *scales, strict=True):
                    weight.scale, weight.scale_inv, weight.rows = scale, scale_inv, None

    def _kinds(self) -> None:
        """Sorts weights by kind, at the first round, when shards have memory."""
        if self.kinds:
            return
        for recipe, weights in grouped(self.weights, lambda weight: weight.recipe).items():
            for group, places in grouped(range(len(weights)), [one.shard.group for one in weights].__getitem__).items():
                self.places.setdefault(group, []).append((len(self.kinds), places))
            self.kinds.append((KINDS[type(recipe)]([weight.shard for weight in weights], recipe), weights))

    @torch.no_grad()
    def note_gathered(self, weight: Weight) -> None:
        """A forward has gathered a weight, and those that FSDP gathers with it; behind the reduction."""
        self._wait()
        if weight.noted == self.number:
            return
        for one in weight.together:
            one.noted = self.number
        for number, places in self.places[weight.shard.group]:
            self.kinds[number][0].note_gathered(places)

    def _wait(self) -> None:
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None

    @torch.no_grad()
    def cast(self, weights: Sequence[Weight]) -> None:
        """The rows of weights that are gathered at once."""
        with torch.inference_mode(False):
            rows = cast_rows([(one.shard, one.quantizer, one.scale) for one in weights if one.scale is not None])
        for weight, copy in zip(weights, rows, strict=True):
            weight.rows, weight.rows_scale_inv = copy, weight.scale_inv
