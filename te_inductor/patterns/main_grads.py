"""Sites whose backward adds the weight's gradient to the parameter's `main_grad`: Note [Gradients that are added in the
backward]. Which can, and the inputs that bring the totals into the graph."""

from collections.abc import Sequence

import torch
from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.patterns.bodies import Bodies
from te_inductor.patterns.inputs import append_input, place_of
from te_inductor.patterns.rule import Match
from te_inductor.patterns.support import value
from te_inductor.runtime.main_grads import MainGradInputs, checked

PREFIX = "te_main_grad_"  # of the inputs


def wanted(match: Match) -> bool:
    """Whether the site has a weight gradient at all."""
    return value(match.node).requires_grad and value(match.weight).requires_grad


def refusal(match: Match, bodies: Bodies, examples: Sequence[object]) -> Refusal | None:
    """Why a site's weight gradient goes to autograd all the same; `examples` are the inputs that the graph is compiled for.

    Raises:
        MainGradError: there is a main_grad that does not fit its parameter.
    """
    if not bodies.reaches(match.node.graph):
        return Refusal("inside a control-flow body, which main_grad does not reach")
    node = bodies.outer(match.weight)
    if not (node.op == "placeholder" and isinstance(value(node), torch.nn.Parameter) and value(node).dim() == 2):
        return Refusal("the weight is computed in the graph, or one of several in a parameter")
    if match.transposed:
        return Refusal("the parameter holds the transpose of what the GEMM computes")
    parameter = examples[place_of(node)] if examples else None
    if not isinstance(getattr(parameter, "main_grad", None), torch.Tensor):
        return Refusal("the parameter has no main_grad")
    checked(parameter)  # type: ignore[arg-type]
    return None


class MainGradSites:
    """The totals of one graph's weights: appends the inputs, and finds them again."""

    def __init__(self, bodies: Bodies, totals: MainGradInputs) -> None:
        self.bodies, self.totals = bodies, totals
        self.nodes: dict[fx.Node, fx.Node] = {}  # of the root's graph, by the parameter's

    def add(self, match: Match) -> None:
        owner = self.bodies.outer(match.weight)
        if owner in self.nodes:
            return
        weight = value(owner)
        with weight.fake_mode:  # type: ignore[attr-defined]
            example = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        self.totals.parameters.append(place_of(owner))
        self.nodes[owner] = append_input(self.bodies.root.graph, f"{PREFIX}{len(self.totals.examples)}", example)
        self.totals.examples.append(example)

    def of(self, matches: Sequence[Match], graph: fx.Graph) -> list[fx.Node]:
        """What stands for their totals in this graph; nothing where there are none."""
        owners = [self.bodies.outer(match.weight) for match in matches]
        if not all(wanted(match) and owner in self.nodes for match, owner in zip(matches, owners, strict=True)):
            return []
        return [self.bodies.hand(self.nodes[owner], graph) for owner in owners]
