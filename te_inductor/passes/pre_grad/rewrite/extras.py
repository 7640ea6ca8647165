"""What a rewritten site takes besides its operands, where the options ask for it: kept copies of its weight, and what
takes its weight's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from te_inductor.passes.pre_grad.rewrite.cached_weights import CachedSites
from te_inductor.passes.pre_grad.rewrite.weight_grads import GradientSites
from te_inductor.passes.pre_grad.sites.rule import Match


@dataclass(frozen=True)
class ExtraArguments:
    keeps: CachedSites
    gradients: GradientSites | None  # None: they go to autograd

    def of(self, matches: Sequence[Match], graph: fx.Graph) -> dict[str, list[fx.Node]]:
        """Arguments of `te_inductor.linears` by name; those that there are."""
        kept = self.keeps.of(matches, graph)
        return ({"kept": kept} if kept else {}) | (self.gradients.of(matches, graph) if self.gradients else {})
