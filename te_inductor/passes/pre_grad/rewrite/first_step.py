"""The graph of a first step under delayed scaling.

# Note [A first step]
A quantizer without history knows no scale. Cast with scale 1, gradients below 2**-16 vanish, and those of the layers
below with them. So where any quantizer of a graph has no history, the call runs another graph: the same, but each
tensor's scale follows from its own amax, found by a pass over it as under current scaling, by the recipe's formula for
a history of that one amax. It records and updates as any step does. Which of the two graphs runs is decided on the
host, once a call (`runtime/state/state_inputs.py`), and its backward is that graph's. It is the first one until the device,
which is asked from the second call on, and ever more seldom, has histories of all quantizers; then it is never asked
again. So the second graph costs the time to compile it, and nothing in later steps. Forwards without a backward, and
gradients that are zero, may leave a quantizer without history for any number of calls: it goes on by its own amax.

Where it may be needed, it is traced and partitioned beside the other, and interpreted (`passes/graph/interpreted.py`):
a step or two of each run do not pay for code, which takes longer to generate than that of all later steps, as no scale
is known beforehand. A compile cache keeps it beside the other. Code is generated where interpreting would be wrong or
take too much memory, for CUDA graphs, and where ranks might call collectives in different orders (Note [Ranks that
interpret]). What comes without history later, as a copy of a model, runs a few calls by the eager runtime. Where either
has more than a few first steps, Dynamo compiles both graphs, with code."""

import copy
from dataclasses import replace

from torch import fx

from te_inductor import ops
from te_inductor.ops.layers.parts import Operand

_NOT_TAKEN = ("known", "of_weight")  # copies that are kept have the state's scale
_ENDS = (ops.update_scales, ops.delayed_step)
_SPEC_AT = {ops.layers: 3, ops.gather_weight: 1}  # its place among the arguments


def of(root: fx.GraphModule) -> fx.GraphModule:
    """The graph of a first step, of one that `DelayedSites` has rewritten; the parameters are the same ones."""
    made = _copied(root)
    for module in made.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in [one for op in _SPEC_AT for one in module.graph.find_nodes(op="call_function", target=op)]:
            spec = node.args[_SPEC_AT[node.target]]
            if spec.scales.first is not spec.scales:
                spec = replace(spec, scales=spec.scales.first, weight=Operand())
                node.update_arg(_SPEC_AT[node.target], spec)
                node.kwargs = {name: arg for name, arg in node.kwargs.items() if name not in _NOT_TAKEN}
        for node in [one for op in _ENDS for one in module.graph.find_nodes(op="call_function", target=op)]:
            node.kwargs = {**node.kwargs, "own": True}
        module.recompile()
    return made


def twin(graph: fx.Graph) -> fx.Graph:
    """A copy. Dynamo also hangs plain attributes on nodes (`_dynamo_source`), which fx does not copy; and metadata with
    the tensors that it traced, of which its own graph lets go behind the backend."""
    made = copy.deepcopy(graph)
    for node, other in zip(graph.nodes, made.nodes, strict=True):
        _add_attributes(node, other)
        other.meta.pop("grapharg", None)
    return made


def _add_attributes(to_copy: object, made: object) -> None:
    """Adds attributes in their order, which AOTAutograd's cache has in its key of a module: a set's is another in each
    process."""
    for name, value in vars(to_copy).items():
        if name not in vars(made):
            setattr(made, name, value)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the same class: Dynamo's writes its code when that is first read, and a compile reads it at most once."""
    made: fx.GraphModule = type(module).__base__(module, twin(module.graph))  # type: ignore[misc]
    _add_attributes(module, made)
    made.meta = dict(module.meta)
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(made, name, _copied(child))
    return made
