"""Casts of ours in a graph, and the pass that removes repeated ones: one quantization of a tensor, however many GEMMs
read it. AOTAutograd's partitioner removes common subexpressions from training graphs; inference graphs get none, so q, k
and v would each quantize the same input."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from te_inductor import ops
from te_inductor.ops.casts import CASTS
from te_inductor.passes.graph.aliases import origins
from te_inductor.passes.graph.writes import AtenWrites, Writes

aten = torch.ops.aten
QUANTIZE = frozenset((*CASTS, ops.hadamard, ops.tensor_amax, ops.current_scale))


def where_quantized(one: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
    """The pass, on graphs that make a low-precision copy and no others."""

    @functools.wraps(one)
    def run(graph: fx.Graph) -> None:
        if any(node.target in QUANTIZE for node in graph.nodes):
            one(graph)

    return run


def records_amax(node: fx.Node) -> bool:
    """Whether it records an amax: until Inductor lowers the graph still as what torch makes of an op that changes a
    tensor."""
    return node.target is torch.ops.higher_order.auto_functionalized_v2 and node.args[0] is ops.record_amax


# Pure ops between a tensor and its quantized copies, with them.
_SHARED = QUANTIZE | {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    torch.ops.prims.convert_element_type.default,
}


def share(graph: fx.Graph) -> None:
    """Replace each repeated `_SHARED` node by the first."""
    seen: dict[Any, fx.Node] = {}
    writes = AtenWrites(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _SHARED:
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if _differ(first, node, writes):
            seen[key] = node
            continue
        node.replace_all_uses_with(first)
        graph.erase_node(node)


def _differ(first: fx.Node, node: fx.Node, writes: Writes) -> bool:
    """Whether the second of two equal calls may read other values, or something writes what one of them made."""
    sources = node.all_input_nodes
    is_view = any(origins(node) & origins(one) for one in sources)
    return writes.between(sources, first, node) or (not is_view and writes.anywhere(first, node))


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value
