"""The pass that has a bias gradient, the sum of dy's columns, found in the kernel that casts dy both ways.

Where dy is the gradient of an activation, its sum alone would read what the activation's backward reads, and compute it
again: of GPT-NeoX-20B's GELU 805 MB of a layer at 8192 tokens (docs/ledger.md). It is done where the scale is known when
the cast runs (`delayed`, `current`), both copies are wanted, so that the cast has a tile, and sizes are known. A number
of rows that needs padding has it by now (passes/post_grad/padded_rows.py)."""

from typing import Any

import torch
from torch import Tensor, fx

from te_inductor.fused.record import POST_GRAD, FusedKernel
from te_inductor.lowerings.codegen.column_sums import ROWS
from te_inductor.lowerings.codegen.column_sums import column_sums as lower
from te_inductor.ops.casts import TWO_WAY_KNOWN
from te_inductor.passes.graph.node_kinds import tensor_of
from te_inductor.runtime.definition import op_of

aten = torch.ops.aten
LEAST = 4 * ROWS  # rows and columns, below which a kernel more or less is all there is to gain
ALIGNED = 16  # likewise a multiple: padded copies have sizes of their own, and no tile in common


def _sums(x: Tensor) -> Tensor:  # (R, C) -> (C,)
    return x.sum(0, dtype=torch.float32)


column_sums = op_of(_sums, lambda x: x.new_empty(x.shape[1], dtype=torch.float32), name="column_sums")


def fold(graph: fx.Graph) -> None:
    """Replace ``sum(dy, 0)`` in fp32, where dy is cast both ways."""
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        x, dims, *keepdim = node.args
        if dims != [0] or any(keepdim) or node.meta["val"].dtype != torch.float32 or not _is_large(x):
            continue
        if any(_casts_both_ways(user, x) for user in x.users):
            with graph.inserting_before(node):
                new = graph.call_function(column_sums, (x,))
                new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _is_large(x: Any) -> bool:
    """A matrix of a GPU, of known sizes."""
    value = tensor_of(x)
    return (
        value is not None
        and value.device.type == "cuda"
        and value.dim() == 2
        and all(isinstance(size, int) and size >= LEAST and size % ALIGNED == 0 for size in value.shape)
    )


def _casts_both_ways(user: fx.Node, x: fx.Node) -> bool:
    """Whether it casts x, by itself or beside other pieces, and both copies are read."""
    if user.target not in TWO_WAY_KNOWN:
        return False
    source: Any = user.args[0]
    pieces = source if isinstance(source, list | tuple) else [source]
    return x in pieces and {item.args[1] for item in user.users} == {0, 1}


KERNEL = FusedKernel((POST_GRAD,), fold, column_sums, lower)
