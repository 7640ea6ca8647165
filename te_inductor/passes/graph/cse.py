"""The pass that removes repeated casts: one quantization of a tensor, however many GEMMs read it.

AOTAutograd's partitioner removes common subexpressions from training graphs; inference graphs get none, so q, k and v
would each quantize the same input.
"""

from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from te_inductor.passes.graph.aliases import may_share, origin
from te_inductor.passes.graph.casts import QUANTIZE

aten = torch.ops.aten


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


def share(graph: fx.Graph, written: AbstractSet[fx.Node] = frozenset()) -> None:
    """Replace each repeated `_SHARED` node by the first, but for those of tensors whose origins are `written`."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _SHARED:
            continue
        if any(may_share(origin(one), other) for one in node.all_input_nodes for other in written):
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
