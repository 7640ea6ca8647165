"""The parts of layers of experts: which rows each expert has, and what the product itself reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from te_inductor import ops
from te_inductor.diagnostics import Refusal
from te_inductor.ops import LayerSpec
from te_inductor.passes.graph.values import value
from te_inductor.passes.graph.writes import Writes, last_read
from te_inductor.passes.pre_grad.sites.part import SitePart
from te_inductor.recipes import Slots
from te_inductor.runtime.eager import grouped

if TYPE_CHECKING:
    from te_inductor.passes.pre_grad.sites.rule import Match

IN_CPP = Refusal("experts under cpp_wrapper, whose code calls no ops with constants of this package")


@dataclass(frozen=True)
class Groups(SitePart):
    """How the rows of a layer of experts are assigned to them, as nodes."""

    dims: ClassVar[int] = 1
    ends: fx.Node  # (E,), where each expert's rows end; where `numbered`, (M,), the expert of each row
    rows: fx.Node | None = None  # (M,), which rows of x they are; None: those of x itself
    # (M,), the permutation that sorts `each` choices of every row of x; rows is order // each
    order: fx.Node | None = None
    each: int = 1
    numbered: bool = False

    def sizes(self, match: "Match", m: Any, n: int, k: int) -> tuple[Any, int, int]:
        """M is of all experts together."""
        y = value(match.node)
        if self.numbered:
            return y.numel() // n, n, k
        m = 1
        for size in y.shape[:-1]:
            m = m * size
        return m, n, k

    def reads(self) -> Iterable[fx.Node]:
        return [one for one in (self.ends, self.rows, self.order) if one is not None]

    def chosen_by(self, match: "Match") -> Iterable[fx.Node]:
        """None where the groups are equal, and x stands for their ends until the layer is rewritten."""
        return [] if self.ends is match.x else [self.ends]

    def operand(self, match: "Match", x: fx.Node) -> fx.Node:
        """What belongs to no expert is not read: rows that are gathered, or come from other ranks, leave it out."""
        if self.rows is not None or match.arrives is not None:
            return x
        return x.graph.call_function(ops.mask_rows, (x, self.ends))

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        if self.order is None:
            return spec, {"ends": self.ends}
        places = graph.call_function(ops.places_of, (self.order, self.each))
        return spec, {"ends": self.ends, "rows": self.rows, "places": places}

    def refuse_here(self, match: "Match", writes: Writes, is_cpp: bool) -> Refusal | None:
        """The backward reads again where each one's rows end."""
        if is_cpp:
            return IN_CPP
        if not self.numbered and writes.between([self.ends], match.node, last_read(match.node)):
            return Refusal("the graph writes the ends of its groups before the backward has read them")
        return None

    def refuse_in_program(self, match: "Match", slots: Slots) -> Refusal | None:
        if grouped.is_written_out(value(match.weight).device, slots.fprop):
            return None
        return Refusal("experts with scales of blocks in a program, for which torch has no product")

    def refuse_kept(self, slots: Slots) -> Refusal | None:
        if slots.weight.granularity.two_level:
            return Refusal("copies of experts' weights are not kept where all experts share one level of their scales")
        return None

    def may_merge(self, match: "Match", slots: Slots) -> bool:
        """A column copy's rows run across all weights, and so do their scales."""
        return slots.weight.granularity.whole or slots.weight.granularity.transposes


@dataclass(frozen=True)
class Original(SitePart):
    """What a product of experts itself reads, where the layer reads what that was made of."""

    literal: "Match"
    adder: fx.Node | None = None  # what adds the bias to the product, where that is a node of its own

    def key(self) -> None:
        """Layers of one input are alike, whatever it was cast to."""
        return None

    def may_merge(self, match: "Match", slots: Slots) -> bool:
        """A node that adds the bias has the output."""
        return self.adder is None
