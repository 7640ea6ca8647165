"""The pass that pads the rows of a tensor once, where it is cast both ways.

A column copy is padded to whole rows of 16 bytes, as an FP8 GEMM wants them: with 257 patches an image there are rarely
16 of them. So it has other sizes than the row copy of the same tensor, and Inductor gives each a kernel, which reads
what the tensor is made from once more; the bias gradient takes a third, as its sum has no tile to join
(fused/column_sums.py). Here the tensor gets its rows of zeros first, and both copies, the amax and the sum are of the
padded one. The row copy has rows more than its GEMM reads.

The gradient of ViT-huge's GELU, 7967 x 5120, took 256, 91 and 96 us in three kernels under delayed scaling, and that of
BERT-large's, 8192 x 4096, 227 in one (H200, 2026-11-26)."""

from typing import Any

import torch
from torch import fx

from te_inductor import ops
from te_inductor.passes.graph.casts import records_amax

aten = torch.ops.aten
_ROWS_FIRST = 1  # the dimension along which pieces share their rows


def pad(graph: fx.Graph, devices: tuple[str, ...] = ("cuda",)) -> None:
    """Casts with a known scale, of tensors of a known number of rows."""
    padded: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        pieces = _pieces(node)
        if not pieces or {user.args[1] for user in node.users} != {0, 1}:
            continue
        values = [piece.meta["val"] for piece in pieces]
        rows = values[0].shape[0]
        if not all(isinstance(value.shape[0], int) for value in values) or values[0].device.type not in devices:
            continue
        quantizer: Any = node.args[-1]
        wanted = quantizer.padded(rows)
        if wanted != rows:
            for piece in pieces:
                if piece not in padded:
                    padded[piece] = _padded(piece, wanted)
            _cast_padded(node, padded, rows)
    for x, more in padded.items():
        for user in list(x.users):
            if records_amax(user) or _sums_columns(user):
                user.replace_input_with(x, more)


def _pieces(node: fx.Node) -> list[fx.Node]:
    """What a cast both ways, with a known scale, reads; nothing of another node."""
    if node.target is ops.quantize_rowcol_delayed:
        return [node.args[0]]  # type: ignore[list-item]
    if node.target is ops.quantize_pieces_delayed and node.args[1] == _ROWS_FIRST:
        return list(node.args[0])  # type: ignore[arg-type]
    return []


def _padded(x: fx.Node, rows: int) -> fx.Node:
    before = x.next
    while before.op == "placeholder":
        before = before.next
    with x.graph.inserting_before(before):
        more = x.graph.call_function(ops.pad_rows, (x, rows))
    more.meta = {**x.meta, "val": x.meta["val"].new_empty((rows, x.meta["val"].shape[1]))}
    return more


def _cast_padded(node: fx.Node, padded: dict[fx.Node, fx.Node], rows: int) -> None:
    """Casts padded rows, and gives readers of the row copy the rows that they had."""
    source, *rest = node.args
    node.args = (torch.fx.map_arg(source, padded.__getitem__), *rest)
    row_copy, column_copy = node.meta["val"]
    node.meta["val"] = row_copy.new_empty((column_copy.shape[1], row_copy.shape[1])), column_copy
    for item in list(node.users):
        if item.args[1] == 0:
            with node.graph.inserting_after(item):
                part = node.graph.call_function(aten.slice.Tensor, (item, 0, 0, rows))
            part.meta = dict(item.meta)
            for user in [user for user in item.users if user is not part]:
                user.replace_input_with(item, part)
            item.meta["val"] = node.meta["val"][0]


def _sums_columns(user: fx.Node) -> bool:
    if user.target is not aten.sum.dim_IntList:
        return False
    dims, *keepdim = user.args[1:]
    return dims == [0] and not any(keepdim)
