"""What a rewritten graph and its sites take besides the program's operands: inputs that the rewrite appends, of which
Dynamo, which writes the call, does not know; and, where the options ask for it, kept copies of weights, and what takes
their gradients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource

from te_inductor.ops import LayerSpec
from te_inductor.ops.layers.operands import Kept
from te_inductor.ops.layers.parts import GradientSink
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.decide.weight_grads import other_readers, takes
from te_inductor.passes.pre_grad.plan import Candidate
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import DelayedScaling, Slots
from te_inductor.runtime.extra_inputs import ExtraInputs, GradientInputs
from te_inductor.runtime.state.state_inputs import StateInput
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_inputs import CachedInput, CachedInputs, Refresh
from te_inductor.runtime.weights.cached_weights import Spec, stored_shapes, turned, weight_shape


def append_input(graph: fx.Graph, kind: ExtraInputs, example: torch.Tensor) -> fx.Node:
    """One more input of a kind, with what AOTAutograd asks of those that Dynamo found. CUDA graphs do not copy it."""
    name = f"{kind.prefix}{len(kind.examples)}"
    kind.examples.append(example)
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta = {"example_value": example, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
    node._dynamo_source = ConstantSource(name)  # type: ignore[attr-defined]
    return node


def check_order(graph: fx.Graph, kinds: Sequence[ExtraInputs]) -> None:
    """Checks that the inputs were appended in the order of their kinds, in which a call brings them."""
    wanted = [f"{kind.prefix}{place}" for kind in kinds for place in range(len(kind.examples))]
    found = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    if wanted and found[-len(wanted) :] != wanted:
        raise RuntimeError(f"inputs of the rewritten graph end in {found[-len(wanted) :]}, expected {wanted}")


class CachedSites:
    """The kept copies of one graph's weights: appends the inputs, before anything else does, and finds them again."""

    def __init__(self, bodies: Bodies, keeps: CachedInputs) -> None:
        self.bodies, self.keeps = bodies, keeps
        self.inputs: dict[fx.Node, CachedInput] = {}  # by the first site's node
        self.nodes: dict[fx.Node, list[fx.Node]] = {}  # of the root's graph, alike

    def add(self, matches: Sequence[Match], recipe: DelayedScaling | None, slots: Slots) -> None:
        """Sites that are one GEMM, or one site; their recipe, if it keeps state."""
        first = matches[0]
        owners = [self.bodies.outer(match.weight) for match in matches]
        spec = Spec(slots.weight, first.transposed, len(matches), recipe)
        columns = value(first.node).requires_grad and value(first.x).requires_grad and slots.dgrad_operands is None
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


@dataclass(frozen=True)
class ExtraArguments:
    keeps: CachedSites
    gradients: GradientSites | None  # None: they go to autograd

    def of(self, matches: Sequence[Match], graph: fx.Graph, spec: LayerSpec) -> tuple[LayerSpec, dict[str, Any]]:
        """The layer's spec with those that there are, and their arguments of `te_inductor.layers` by name."""
        found: dict[str, Any] = {}
        kept = self.keeps.of(matches, graph)
        if kept:
            spec, found["of_weight"] = replace(spec, weight=Kept(spec.slots.weight.granularity.two_level)), kept
        takers = self.gradients.of(matches, graph) if self.gradients else []
        if self.gradients and takers:
            spec, found["takers"] = replace(spec, sink=self.gradients.sink), takers
        return spec, found
