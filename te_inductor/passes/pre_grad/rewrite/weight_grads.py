"""The inputs that bring what takes weight gradients into a graph."""

from collections.abc import Iterable, Sequence

from torch import fx

from te_inductor.ops.layers.parts import GradientSink
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.decide.weight_grads import other_readers, takes
from te_inductor.passes.pre_grad.plan import Candidate
from te_inductor.passes.pre_grad.rewrite.inputs import append_input
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.runtime.extra_inputs import GradientInputs


class GradientSites:
    """What takes the gradients of one graph's weights: appends the inputs, one a parameter, and finds them again, by
    the sites whose gradients it takes. Another site of the same parameter leaves its gradient to autograd."""

    def __init__(self, bodies: Bodies, sink: GradientSink, inputs: GradientInputs, sites: Iterable[Candidate]) -> None:
        self.bodies, self.sink, self.inputs = bodies, sink, inputs
        taken = {site.match.node: bodies.outer(site.match.weight) for site in sites if takes(site)}
        shared = {parameter for parameter, _ in other_readers(sites, bodies)}
        of_parameters = {parameter: self._input(parameter, parameter in shared) for parameter in taken.values()}
        # The nodes of the root's graph, by the site's.
        self.nodes = {site: of_parameters[parameter] for site, parameter in taken.items()}

    def _input(self, parameter: fx.Node, shared: bool) -> fx.Node:
        weight = value(parameter)
        with weight.fake_mode:  # type: ignore[attr-defined]
            example = self.inputs.takers.example(weight)
        self.inputs.parameters.append(self.bodies.place_of(parameter))
        self.inputs.whole.append(not shared)
        return append_input(self.bodies.root.graph, self.inputs, example)

    def of(self, matches: Sequence[Match], graph: fx.Graph) -> list[fx.Node]:
        """What stands for those of some sites in this graph; nothing where there are none."""
        found = [self.nodes[match.node] for match in matches if match.node in self.nodes]
        if len(found) < len(matches):
            return []
        return [self.bodies.hand(node, graph) for node in found]
