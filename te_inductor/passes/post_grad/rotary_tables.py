"""The pass that has sines and cosines of positions computed once, and not again for each head of each layer.

Rotary positions are a table of tokens x head size, and its readers, queries and keys, are as many times larger as there
are heads. Inductor has each reader's kernel compute what it reads of the table, as it does with any operator of one
input. But a sine that is right for large angles is a long piece of code with a branch, of which a kernel that casts a
gradient both ways computes three for each of the many elements of a thread: 806 us where Inductor's own, without casts,
takes 174 (the queries' gradient in Llama-3.2-1B, 16384 tokens; H200, torch 2.11, 2026-11-23). A table in memory is
rounded to its dtype, as in eager code, where Inductor keeps what it computes in fp32."""

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.passes.graph.node_kinds import IN_MEMORY, is_pointwise, is_view, tensor_of

aten = torch.ops.aten
_TABLES = (aten.sin.default, aten.cos.default)


def keep(graph: fx.Graph) -> None:
    """Put tables that larger tensors are computed from in memory, in the dtype in which they are read."""
    for target in _TABLES:
        for node in graph.find_nodes(op="call_function", target=target):
            _keep(node)


def _keep(table: fx.Node) -> None:
    readers = _readers(table)
    if any(_is_larger(reader, table) for reader in readers):
        table.meta[IN_MEMORY] = True
    for reader in readers:
        if is_pointwise(reader) and len(reader.all_input_nodes) == 1:  # a cast, or a factor
            _keep(reader)


def _readers(table: fx.Node) -> list[fx.Node]:
    """The readers of a table, and those of its views in place of the views."""
    found = []
    for user in table.users:
        found += _readers(user) if is_view(user) and not _is_larger(user, table) else [user]
    return found


def _is_larger(reader: fx.Node, table: fx.Node) -> bool:
    made, value = tensor_of(reader), tensor_of(table)
    return made is not None and value is not None and statically_known_true(made.numel() >= 2 * value.numel())
