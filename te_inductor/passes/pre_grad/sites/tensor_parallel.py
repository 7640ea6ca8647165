"""The part of a layer whose weight is a DTensor: Note [Tensor-parallel layers] in distributed/parallel.py."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.distributed.parallel import Parallel
from te_inductor.ops import LayerSpec
from te_inductor.ops.layers.gathered import operands_of
from te_inductor.passes.pre_grad.sites.part import SitePart
from te_inductor.recipes import Slots

if TYPE_CHECKING:
    from te_inductor.passes.pre_grad.sites.rule import Match


@dataclass(frozen=True)
class TensorParallel(SitePart):
    """The place of a layer among the ranks, or why it has none; with a place, why the layer alone stays as it is, where
    a loss may still be computed with it."""

    between_ranks: ClassVar[bool] = True
    parallel: Parallel | None = None
    refusal: Refusal | None = None

    def sizes(self, match: "Match", m: Any, n: int, k: int) -> tuple[Any, int, int]:
        return (m, n, k) if self.parallel is None else self.parallel.sizes(m, n, k)

    def key(self) -> Hashable:
        return self.parallel

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        if self.parallel is None:
            return spec, {}
        arrives, leaves = operands_of(self.parallel)
        return replace(spec, input=arrives, output=leaves, parallel=self.parallel), {}

    def refuse(self, match: "Match") -> Refusal | None:
        return self.refusal

    def refuse_kept(self, slots: Slots) -> Refusal | None:
        return Refusal("copies of weights that are sharded over ranks are not kept")

    def refuse_taken(self, match: "Match", deferred: bool) -> Refusal | None:
        return Refusal("the weight is sharded over ranks, and autograd says how its gradient is")

    def refuse_loss(self) -> Refusal | None:
        if self.parallel is None or self.parallel.weight == 0:
            return self.refusal if self.parallel is None else None
        return Refusal("the output layer is tensor parallel, but its weight is not sharded by words")

    @property
    def of_words(self) -> "TensorParallel":
        """The place of an output layer whose loss is computed with it: each rank has all rows of x and some words, and
        what it makes of them are plain tensors."""
        assert self.parallel is not None  # as refuse_loss says
        group, ranks = self.parallel.group, self.parallel.ranks
        return TensorParallel(Parallel(group, ranks, 0, None, False, False, None, True))

    def may_merge(self, match: "Match", slots: Slots) -> bool:
        """A DTensor does not say how its views are laid out."""
        return self.parallel is not None and self.parallel.local
