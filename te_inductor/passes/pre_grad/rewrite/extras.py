"""What a rewritten site takes besides its operands, where the options ask for it: kept copies of its weight, and what
takes its weight's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from te_inductor.ops import LayerSpec
from te_inductor.ops.layers.kept import Kept
from te_inductor.passes.pre_grad.rewrite.cached_weights import CachedSites
from te_inductor.passes.pre_grad.rewrite.weight_grads import GradientSites
from te_inductor.passes.pre_grad.sites.rule import Match


@dataclass(frozen=True)
class ExtraArguments:
    keeps: CachedSites
    gradients: GradientSites | None  # None: they go to autograd

    def of(
        self, matches: Sequence[Match], graph: fx.Graph, spec: LayerSpec
    ) -> tuple[LayerSpec, dict[str, list[fx.Node]]]:
        """The layer's spec with those that there are, and their arguments of `te_inductor.layers` by name."""
        found: dict[str, list[fx.Node]] = {}
        kept = self.keeps.of(matches, graph)
        if kept:
            spec, found["of_weight"] = replace(spec, weight=Kept(spec.slots.weight.granularity.two_level)), kept
        takers = self.gradients.of(matches, graph) if self.gradients else []
        if self.gradients and takers:
            spec, found["takers"] = replace(spec, sink=self.gradients.sink), takers
        return spec, found
