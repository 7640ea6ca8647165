"""What the package changes of Inductor's code generation: tiles, fusion, its kernel class."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V


def scattered(
    layout: ir.Layout, dtype: torch.dtype, ranges: Sequence[Any], inner: Any, place: Any, mode: str | None = None
) -> ir.TensorBox:
    """A buffer of values that `inner` computes, of an index each, stored at the `place` of that index; how, a `mode` of our
    own may say, which a kernel class of ours writes."""
    kinds: Any = {"output_indexer": place, "scatter_mode": mode}
    scatter = ir.Scatter(device=layout.device, dtype=dtype, inner_fn=inner, ranges=list(ranges), **kinds)
    buffer = ir.ComputedBuffer(name=None, layout=layout, data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
    return ir.TensorBox.create(buffer)


def holds_ops_of_ours(nodes: Iterable[Any]) -> bool:
    """Whether an op of ours is part of what these scheduler nodes compute."""
    parts = (part.node for node in nodes for part in node.get_nodes() if part.node is not None)
    return any(getattr(one.target, "namespace", None) == "te_inductor" for part in parts for one in part.get_origins())
