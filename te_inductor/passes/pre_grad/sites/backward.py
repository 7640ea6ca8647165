"""The part of a layer whose backward is in the same graph: Note [Triples of products] in match/gradients.py."""

from dataclasses import dataclass

from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.sites.part import SitePart


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
