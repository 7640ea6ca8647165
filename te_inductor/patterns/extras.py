"""What a rewritten site takes besides its operands, where the options ask for it: kept copies of its weight, and the totals
that its weight's gradient is added to."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from te_inductor.patterns.kept import KeptSites
from te_inductor.patterns.main_grads import MainGradSites
from te_inductor.patterns.rule import Match


@dataclass(frozen=True)
class Extras:
    keeps: KeptSites
    totals: MainGradSites

    def of(self, matches: Sequence[Match], graph: fx.Graph) -> dict[str, list[fx.Node]]:
        """Arguments of `te_inductor.linears` by name; those that there are."""
        found = {"kept": self.keeps.of(matches, graph), "main_grads": self.totals.of(matches, graph)}
        return {name: nodes for name, nodes in found.items() if nodes}
