"""The passes on Inductor's graphs, after autograd and the split into forward and backward. Graphs that neither quantize nor
have stored weights are left as they are.
"""

from typing import Any

import torch
from torch import fx

from te_inductor import fused, ops
from te_inductor.errors import StateError
from te_inductor.passes.graph import activations, casts
from te_inductor.passes.graph.casts import where_quantized
from te_inductor.passes.post_grad import async_tp, padded_rows, rotary_tables
from te_inductor.runtime.eager.delayed import APART

_SELECT = torch.ops.aten.select.int


def check_scales(graph: fx.Graph) -> None:
    """Checks that no backward reads delayed scaling's scales for itself, which recompute.py has torch save: they would
    be the next step's.

    Raises:
        StateError: one does.
    """
    backward = any("tangent" in str(node.target) for node in graph.find_nodes(op="placeholder"))
    if backward and graph.find_nodes(op="call_function", target=ops.read_scales):
        raise StateError(
            "delayed scaling's scales are read again by the backward, behind the update of the step, expected those of"
            " its forward: torch's partitioner was told to save them and did not; set"
            " torch._functorch.config.activation_memory_budget = 1, or take a recipe without state"
        )


def release_scales(graph: fx.Graph) -> None:
    """The end of delayed scaling's step has the copies of its scales for the partitioner's sake (Note [A step under
    delayed scaling]). Inductor would make all weights' casts first for it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
        if node.args[0] is ops.update_scales and node.kwargs.get("read") is not None:
            node.update_kwarg("read", None)


def read_scales_first(graph: fx.Graph) -> None:
    """Puts the read of a step's scales to its begin again. Where there is no backward, Inductor has moved it to its first
    reader, behind a record of an amax, which then would copy its state, there and back."""
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in graph.find_nodes(op="call_function", target=ops.read_scales):
        first.prepend(node)


def part_scales(graph: fx.Graph) -> None:
    """Has kernels read each of a step's scales as a buffer: Note [Numbers of one tensor]."""
    for read in list(filter(_has_scales, graph.nodes)):
        for row in [user for user in read.users if user.target is _SELECT]:
            with graph.inserting_before(row):
                scale = graph.call_function(ops.scale_at, (read, row.args[2]))
            for number in list(row.users):
                scale.meta = dict(number.meta)
                number.replace_all_uses_with(scale)
                graph.erase_node(number)
            graph.erase_node(row)


def _has_scales(node: fx.Node) -> bool:
    """Whether it has a step's scales: in the forward the op's result, in the backward what was saved of it."""
    found: Any = node.meta.get("val")
    rows = [user for user in node.users if user.target is _SELECT]
    numbers = [number for row in rows for number in row.users]
    # One of the program's own may lie in memory like them. It is read as well, unless the program writes to it.
    lies_so = isinstance(found, torch.Tensor) and found.stride() == (APART, 1)
    saved = node.op == "placeholder" and lies_so and len(rows) == len(node.users)
    return (saved or node.target is ops.read_scales) and all(
        one.target is _SELECT and one.args[1] == 0 and (_is_counted(one) if one in rows else one.args[2] == 0)
        for one in [*rows, *numbers]
    )


def _is_counted(row: fx.Node) -> bool:
    """Whether its place is a number, from the first row on."""
    return isinstance(row.args[2], int) and row.args[2] >= 0


PASSES = (
    check_scales,
    release_scales,
    read_scales_first,
    where_quantized(casts.share),
    where_quantized(activations.share_sigmoids),
    where_quantized(rotary_tables.keep),
    where_quantized(padded_rows.pad),
    async_tp.expose,  # before what would take a product for a kernel of ours
    *fused.folds("post_grad"),
    where_quantized(activations.fold_gelu),  # of what no kernel above has taken
    where_quantized(part_scales),
)
