"""The inputs that bring cached copies of weights into a graph."""

from collections.abc import Sequence

import torch
from torch import fx

from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.rewrite.inputs import append_input
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import DelayedScaling, Recipe, Slots
from te_inductor.runtime.state.state_inputs import StateInput
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_inputs import CachedInput, CachedInputs, Refresh
from te_inductor.runtime.weights.cached_weights import Spec, stored_shapes, turned, weight_shape


class CachedSites:
    """The kept copies of one graph's weights: appends the inputs, before anything else does, and finds them again."""

    def __init__(self, bodies: Bodies, keeps: CachedInputs) -> None:
        self.bodies, self.keeps = bodies, keeps
        self.inputs: dict[fx.Node, CachedInput] = {}  # by the first site's node
        self.nodes: dict[fx.Node, list[fx.Node]] = {}  # of the root's graph, alike

    def add(self, matches: Sequence[Match], recipe: Recipe, slots: Slots) -> None:
        """Sites that are one GEMM, or one site."""
        first = matches[0]
        owners = [self.bodies.outer(match.weight) for match in matches]
        stateful = recipe if isinstance(recipe, DelayedScaling) else None
        spec = Spec(slots.weight, first.transposed, len(matches), stateful)
        columns = value(first.node).requires_grad and value(first.x).requires_grad
        places = [str(owner.target) if owner.op == "get_attr" else self.bodies.place_of(owner) for owner in owners]
        self.inputs[first.node] = CachedInput(places, spec, columns)
        self.keeps.weights.append(self.inputs[first.node])
        shape = weight_shape(spec, [value(owner).shape for owner in owners])
        copies = [shape, turned(shape)] if columns else [shape]
        self.nodes[first.node] = self._inputs(spec, copies, value(first.weight))

    def of(self, matches: Sequence[Match], graph: fx.Graph) -> list[fx.Node]:
        """What stands for their weights' copies in this graph; nothing where there are none."""
        return [self.bodies.hand(node, graph) for node in self.nodes.get(matches[0].node, [])]

    def scale(self, matches: Sequence[Match], state: StateInput, records: bool) -> None:
        """Delayed scaling's quantizer of their weight, and whether a call records its amax."""
        weight = self.inputs[matches[0].node]
        weight.state, weight.records = state, records

    def _inputs(self, spec: Spec, shapes: Sequence[Sequence[int]], weight: torch.Tensor) -> list[fx.Node]:
        """The inputs in the order of `CachedWeight.taken`."""
        quantizer, scope, device = spec.quantizer, spec.quantizer.granularity, weight.device
        examples = []
        with weight.fake_mode:  # type: ignore[attr-defined]
            for shape in shapes:
                stored, scales = stored_shapes(quantizer, shape)
                examples.append(torch.empty(stored, dtype=quantizer.format.dtype, device=device))
                examples.append(torch.empty(scales, dtype=scope.scale.dtype, device=device))
            if scope.two_level:
                examples.append(torch.empty((), dtype=torch.float32, device=device))
        made = []
        for example in examples:
            made.append(append_input(self.bodies.root.graph, self.keeps, example))
        return made


def refresh_on(device: torch.device) -> Refresh:
    """What makes the copies of a graph's weights anew, where they are."""
    if device.type != "cuda":
        return cached_weights.refresh
    from te_inductor.templates.triton.cached_weights import OnDevice

    return OnDevice()
