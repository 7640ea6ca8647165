"""What a site may have besides an input, a weight and a bias: a part each, which answers for itself. The passes ask all
parts of a site, so that another part is one class."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.distributed.parallel import Parallel
from te_inductor.ops import LayerSpec
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.ops.layers.operands import operands_of
from te_inductor.passes.graph.values import value
from te_inductor.passes.graph.writes import Writes
from te_inductor.recipes import Slots

if TYPE_CHECKING:
    from te_inductor.passes.pre_grad.sites.rule import Match


class SitePart:
    """Answers of a part that changes nothing. Parts are frozen dataclasses."""

    dims: ClassVar[int] = 0  # that the weight has besides those of a matrix
    between_ranks: ClassVar[bool] = False  # whether tensors of the site go between ranks
    knows_gradient: ClassVar[bool] = False  # whether the scale of its result's gradient is known beforehand

    def sizes(self, match: "Match", m: Any, n: int, k: int) -> tuple[Any, int, int]:
        """M, N and K of what one rank multiplies, of those that the operands have."""
        return m, n, k

    def key(self) -> Hashable:
        """What sites have in common that are one GEMM."""
        return self

    def reads(self) -> Iterable[fx.Node]:
        """What the layer reads besides its operands."""
        return ()

    def chosen_by(self, match: "Match") -> Iterable[fx.Node]:
        """The nodes that follow from a router's choice."""
        return ()

    def operand(self, match: "Match", x: fx.Node) -> fx.Node:
        """What the layer is given for the input `x`, at the graph's insertion point."""
        return x

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        """The spec of the layer's op with what the part adds to it, and the arguments of the op that it brings, at the
        graph's insertion point."""
        return spec, {}

    def refuse(self, match: "Match") -> Refusal | None:
        """Why the site cannot run in low precision."""
        return None

    def refuse_here(self, match: "Match", writes: Writes, is_cpp: bool) -> Refusal | None:
        """Why it cannot in a graph that makes these writes, and whose generated code is C++ or not."""
        return None

    def refuse_in_program(self, match: "Match", slots: Slots) -> Refusal | None:
        """Why it cannot in a program that leaves this process."""
        return None

    def refuse_kept(self, slots: Slots) -> Refusal | None:
        """Why no copy of the weight is kept."""
        return None

    def refuse_taken(self, match: "Match", deferred: bool) -> Refusal | None:
        """Why the weight's gradient goes to autograd, whether it is wanted at once or `deferred`."""
        return None

    def refuse_gathered(self) -> Refusal | None:
        """Why the graph does not gather the weight in low precision."""
        return None

    def refuse_exchanged(self) -> Refusal | None:
        """Why rows go between ranks in high precision."""
        return None

    def refuse_loss(self) -> Refusal | None:
        """Why a loss behind the layer is not computed with it."""
        return None

    def may_merge(self, match: "Match", slots: Slots) -> bool:
        """Whether the site may be one GEMM with others."""
        return True

    def describe(self, slots: Slots) -> list[str]:
        """What a report says of tensors that go between ranks."""
        return []


@dataclass(frozen=True)
class Unfit(SitePart):
    """Something in the call that no layer computes."""

    refusal: Refusal

    def refuse(self, match: "Match") -> Refusal | None:
        return self.refusal


@dataclass(frozen=True)
class OwnBackward(SitePart):
    """What such a backward asks for, of the layer's slots."""

    slots: Slots

    def refuse(self, match: "Match") -> Refusal | None:
        if isinstance(value(match.weight), GatheredWeight) and self.slots.multiplies_given:
            return Refusal(
                "the backward multiplies by the weight itself, which was gathered in low precision;"
                " backward='dequantized' multiplies by what was gathered"
            )
        dtype = value(match.node).dtype
        if match.dims > 2 and dtype != torch.bfloat16 and (self.slots.dgrad.is_high or self.slots.wgrad.is_high):
            return Refusal(
                "the backward of experts in high precision is torch's grouped product, which it compiles for bfloat16"
                " alone, here is %s",
                str(dtype).removeprefix("torch."),
            )
        return None

    def refuse_taken(self, match: "Match", deferred: bool) -> Refusal | None:
        if self.slots.wgrad.is_high and match.dims > 2:
            return Refusal("torch's grouped product, which the backward is in high precision, adds to no total")
        if self.slots.wgrad.is_high and deferred:
            return Refusal("it multiplies tensors of the program, which may have changed when it runs")
        return None

    def refuse_gathered(self) -> Refusal | None:
        if self.slots.multiplies_given:
            return Refusal("the backward multiplies by the weight itself, or casts it by another recipe")
        return None

    def refuse_exchanged(self) -> Refusal | None:
        return Refusal("the backward multiplies them in another precision than the forward")

    def refuse_loss(self) -> Refusal | None:
        return Refusal("its backward is computed with the loss, in the recipe's own precision alone")


@dataclass(frozen=True)
class Gather(SitePart):
    """How a weight is gathered in front of the layer."""

    between_ranks: ClassVar[bool] = True
    shard: fx.Node  # a DTensor, of the ranks' rows
    dtype: torch.dtype  # in which it is gathered
    backward_dtype: torch.dtype  # in which its gradient is reduced
    nodes: tuple[fx.Node, ...]  # what gathers it, the last first
    refusal: Refusal | None = None  # why no bytes of its cast are gathered instead

    def may_merge(self, match: "Match", slots: Slots) -> bool:
        """Each weight is cast with its own scale, or is no input of the graph."""
        return False

    def describe(self, slots: Slots) -> list[str]:
        if self.refusal is None:
            return [f"the graph gathers its weight in {slots.weight.element}"]
        return [f"the graph gathers its weight in {str(self.dtype).removeprefix('torch.')}: {self.refusal}"]


@dataclass(frozen=True)
class Gradients:
    """The products of one layer's backward."""

    dy: fx.Node  # (M, N), or (N, M) where `dy_transposed`
    dy_transposed: bool
    dgrad: fx.Node | None  # (M, K); None where x wants no gradient
    wgrad: fx.Node | None  # (N, K), or (K, N) where `wgrad_transposed`; None where the weight wants none
    wgrad_transposed: bool = False

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in (self.dgrad, self.wgrad) if node is not None]


@dataclass(frozen=True)
class Backward(SitePart):
    """What is known of a layer's backward in a graph that has both."""

    gradients: Gradients | None = None  # None: it has none, or that is not known
    unplaced: Refusal | None = None  # why it is not known


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
