"""What a rewritten graph and its sites take besides the program's operands: inputs that the rewrite appends, of which
Dynamo, which writes the call, does not know; and, as parts of sites, where the options ask for it, kept copies of
weights, and what takes their gradients."""

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
from te_inductor.passes.pre_grad.decide.weight_grads import other_readers, sink_of
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites.part import SitePart
from te_inductor.runtime.extra_inputs import ExtraInputs, GradientInputs
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


@dataclass(frozen=True, eq=False)
class KeptCopies(SitePart):
    """The copies of a layer's weight that a call brings, or of the weights of layers that are one GEMM."""

    bodies: Bodies
    weight: CachedInput
    nodes: Sequence[fx.Node]  # of the root's graph, in the order of `CachedWeight.taken`

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        copies = [self.bodies.hand(node, graph) for node in self.nodes]
        return replace(spec, weight=Kept(spec.slots.weight.granularity.two_level)), {"of_weight": copies}


@dataclass(frozen=True, eq=False)
class GradientTakers(SitePart):
    """What takes the gradients of such weights in autograd's place, a node of the root's graph for each."""

    bodies: Bodies
    sink: GradientSink
    nodes: Sequence[fx.Node]

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        return replace(spec, sink=self.sink), {"takers": [self.bodies.hand(node, graph) for node in self.nodes]}


def keep_copies(plan: Plan, calls: Iterable[Sequence[Candidate]]) -> None:
    """Append the inputs of cached weights. A call is of one site, or of those that are one GEMM."""
    bodies = Bodies(plan.gm)
    kept = CachedInputs(refresh_on, plan.options.fallback, dict(plan.gm.named_parameters()))
    plan.outcome.extra_inputs.append(kept)
    for sites in calls if plan.options.weights != "each_call" else ():
        if "weights" not in sites[0].unmet:
            weight, nodes = _kept(bodies, kept, sites)
            sites[0].match = sites[0].match.having(KeptCopies(bodies, weight, nodes))


def _kept(bodies: Bodies, kept: CachedInputs, sites: Sequence[Candidate]) -> tuple[CachedInput, list[fx.Node]]:
    first, quantizer = sites[0].match, sites[0].slots.weight  # type: ignore[union-attr]
    owners = [bodies.outer(site.match.weight) for site in sites]
    spec = Spec(quantizer, first.transposed, len(sites), sites[0].delayed)
    backward = sites[0].slots.dgrad_operands is None  # type: ignore[union-attr]
    columns = value(first.node).requires_grad and value(first.x).requires_grad and backward
    places = [str(owner.target) if owner.op == "get_attr" else bodies.place_of(owner) for owner in owners]
    kept.weights.append(CachedInput(places, spec, columns))
    shape = weight_shape(spec, [value(owner).shape for owner in owners])
    scope, weight, examples = quantizer.granularity, value(first.weight), list[torch.Tensor]()
    with weight.fake_mode:  # type: ignore[attr-defined]
        for sizes in [shape, turned(shape)] if columns else [shape]:
            for stored, dtype in zip(
                stored_shapes(quantizer, sizes), (quantizer.format.dtype, scope.scale.dtype), strict=True
            ):
                examples.append(torch.empty(stored, dtype=dtype, device=weight.device))
        if scope.two_level:
            examples.append(torch.empty((), dtype=torch.float32, device=weight.device))
    return kept.weights[-1], [append_input(bodies.root.graph, kept, example) for example in examples]


def refresh_on(device: torch.device) -> Refresh:
    """What makes the copies of a graph's weights anew, where they are."""
    if device.type != "cuda":
        return cached_weights.refresh
    from te_inductor.templates.triton.cached_weights import OnDevice

    return OnDevice()


def take_gradients(plan: Plan, calls: Iterable[Sequence[Candidate]]) -> None:
    """Append what takes the gradients of weights, one a parameter. A site of the same parameter whose gradients are not
    taken leaves them to autograd."""
    bodies, by_sink = Bodies(plan.gm), dict[GradientSink, list[Sequence[Candidate]]]()
    for call in calls:
        if (sink := sink_of(call, bodies, plan)) is not None:
            by_sink.setdefault(sink, []).append(call)
    for sink, taken in by_sink.items():
        nodes = _append_takers(plan, bodies, sink, taken)
        for call in taken:
            takers = GradientTakers(bodies, sink, [nodes[bodies.outer(site.match.weight)] for site in call])
            call[0].match = call[0].match.having(takers)


def _append_takers(
    plan: Plan, bodies: Bodies, sink: GradientSink, calls: Sequence[Sequence[Candidate]]
) -> dict[fx.Node, fx.Node]:
    """What takes the gradient of each parameter, by the node of that."""
    assert sink.takers is not None  # what stands in for autograd
    inputs, nodes = GradientInputs(sink.takers), dict[fx.Node, fx.Node]()
    plan.outcome.extra_inputs.append(inputs)
    shared = {parameter for parameter, _ in other_readers((site for site in plan.candidates if site.low), bodies)}
    for parameter in dict.fromkeys(bodies.outer(site.match.weight) for call in calls for site in call):
        weight = value(parameter)
        with weight.fake_mode:  # type: ignore[attr-defined]
            example = sink.takers.example(weight)
        inputs.parameters.append(bodies.place_of(parameter))
        inputs.whole.append(parameter not in shared)
        nodes[parameter] = append_input(bodies.root.graph, inputs, example)
    return nodes
