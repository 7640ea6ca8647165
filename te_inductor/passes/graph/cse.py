"""The pass that removes repeated casts: one quantization of a tensor, however many GEMMs read it.

AOTAutograd's partitioner removes common subexpressions from training graphs; inference graphs get none, so q, k and v
would each quantize the same input.
"""

from typing import Any

import torch
from torch import fx

from te_inductor.passes.graph.casts import QUANTIZE

aten = torch.ops.aten


# Pure ops between a tensor and its quantized copies, with them.
_SHARED = QUANTIZE | {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.permute.default,
    torch.ops.prims.convert_element_type.default,
}


def share(graph: fx.Graph) -> None:
    """Replace each repeated `_SHARED` node by the first."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _SHARED:
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    return value
