"""Casts of ours in a graph."""

import functools
from collections.abc import Callable

import torch
from torch import fx

from te_inductor import ops

QUANTIZE = frozenset(
    {
        ops.quantize,
        ops.quantize_rowcol,
        ops.quantize_pieces,
        ops.hadamard,
        ops.tensor_amax,
        ops.current_scale,
        ops.quantize_delayed,
        ops.quantize_rowcol_delayed,
        ops.quantize_pieces_delayed,
    }
)


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
