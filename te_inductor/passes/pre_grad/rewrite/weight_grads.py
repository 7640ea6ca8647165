"""The inputs that bring what takes weight gradients into a graph."""

from collections.abc import Sequence

from torch import fx

from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.owners import place_of
from te_inductor.passes.pre_grad.decide.support import value
from te_inductor.passes.pre_grad.decide.weight_grads import wanted
from te_inductor.passes.pre_grad.match.rule import Match
from te_inductor.passes.pre_grad.rewrite.inputs import append_input
from te_inductor.runtime.gradient_inputs import GradientInputs


class GradientSites:
    """What takes the gradients of one graph's weights: appends the inputs, and finds them again."""

    def __init__(self, bodies: Bodies, inputs: GradientInputs) -> None:
        self.bodies, self.inputs = bodies, inputs
        self.nodes: dict[fx.Node, fx.Node] = {}  # of the root's graph, by the parameter's

    def add(self, match: Match) -> None:
        owner = self.bodies.outer(match.weight)
        if owner in self.nodes:
            return
        weight = value(owner)
        with weight.fake_mode:  # type: ignore[attr-defined]
            example = self.inputs.takers.example(weight)
        self.inputs.parameters.append(place_of(owner))
        self.nodes[owner] = append_input(self.bodies.root.graph, self.inputs, example)

    def of(self, matches: Sequence[Match], graph: fx.Graph) -> dict[str, list[fx.Node]]:
        """What stands for those of some sites in this graph, by the name of `te_inductor.linears`' argument; nothing
        where there are none."""
        owners = [self.bodies.outer(match.weight) for match in matches]
        found = (wanted(match) and owner in self.nodes for match, owner in zip(matches, owners, strict=True))
        if not all(found):
            return {}
        return {self.inputs.takers.name: [self.bodies.hand(self.nodes[owner], graph) for owner in owners]}
