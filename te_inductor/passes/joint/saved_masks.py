"""Comparisons that a backward makes of what a forward has: which the forward can make, and what it saves of them.

A mask is saved as bits, exactly: of 128 neighbours two words of 64 bits, which the kernel sums up that has the scales of
128 neighbours."""

from collections.abc import Container, Mapping

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.node_kinds import in_memory_order, is_pointwise, is_view, tensor_of
from te_inductor.passes.graph.tracing import take_place
from te_inductor.passes.graph.walks import reached

LANES, WORD = 128, 64
_FILLS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)


def is_mask(node: fx.Node, later: Container[fx.Node]) -> bool:
    """Whether it is computed of single elements, as true or false, before a gradient comes in."""
    value = tensor_of(node)
    return value is not None and value.dtype is torch.bool and _is_elementwise(node) and node not in later


def is_read(mask: fx.Node, later: Container[fx.Node]) -> bool:
    """Whether anything but other masks reads it."""
    return not all(is_mask(user, later) for user in mask.users)


def is_known(node: fx.Node, known: Mapping[str, fx.Node]) -> bool:
    """Whether the forward, whose nodes are given by their names, has a node of the backward."""
    return node.name in known and (node.op == "placeholder" or known[node.name].target == node.target)


def refuse_mask(mask: fx.Node, known: Mapping[str, fx.Node]) -> Refusal | None:
    """Why a forward cannot save a mask as bits."""
    value = mask.meta["val"]
    if in_memory_order(value) is None or not statically_known_true(value.numel() % LANES == 0):
        return Refusal("%s of the backward computes with it, and its bits are no multiple of %d", mask.target, LANES)
    if new_in_forward(mask, known) is None:
        return Refusal("%s of the backward computes with it, and with what the forward has not", mask.target)
    return None


def new_in_forward(value: fx.Node, known: Mapping[str, fx.Node]) -> list[fx.Node] | None:
    """The nodes of the backward that the forward would have to compute for a value, in their order; None where it does
    not compute single elements of what it has."""
    start = [] if is_known(value, known) else [value]
    new = reached(start, lambda node: [one for one in node.all_input_nodes if not is_known(one, known)])
    if not all(_is_elementwise(one) or one.target in _FILLS for one in new):
        return None
    return [node for node in value.graph.nodes if node in new]


def compute_in_forward(value: fx.Node, known: Mapping[str, fx.Node]) -> fx.Node:
    """A value of the backward as the forward has it, which copies it behind what it is made of."""
    if is_known(value, known):
        return known[value.name]
    copies = dict[fx.Node, fx.Node]()
    new = new_in_forward(value, known) or []
    read = {known[one.name] for node in new for one in node.all_input_nodes if one not in new}
    graph = next(iter(read)).graph
    *_, last = (node for node in graph.nodes if node in read)
    for node in new:
        with graph.inserting_before(last.next):
            last = copies[node] = graph.node_copy(node, lambda one: copies.get(one) or known[one.name])
    return copies[value]


def pack(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (N, LANES) to N words of the first half, and N
    lanes, bits = _lanes(mask)
    low, high = (torch.where(mask & half, bits, 0).sum(-1) for half in (lanes < WORD, lanes >= WORD))
    return low, high


def unpack(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    lanes, bits = _lanes(low)
    words = torch.where(lanes < WORD, low.unsqueeze(-1), high.unsqueeze(-1))
    return (words & bits) != 0


def _lanes(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of neighbours, and the bit of each in its word."""
    lanes = torch.arange(LANES, device=like.device)
    return lanes, torch.bitwise_left_shift(torch.ones_like(lanes), lanes % WORD)


def traced(like: fx.Node, function: object, *nodes: fx.Node) -> list[fx.Node]:
    """What a function returns, as nodes put into the graph of some at its insertion point."""
    values = [node.meta["val"] for node in nodes]
    with values[0].fake_mode, torch.no_grad():
        made = make_fx(function, decomposition_table=select_decomp_table())(*values)  # type: ignore[arg-type]
    copies = dict(zip(made.graph.find_nodes(op="placeholder"), nodes, strict=True))
    given = set(copies)
    results = like.graph.graph_copy(made.graph, copies)
    for node, copy in copies.items():
        if node not in given:
            take_place(copy, like.meta)
    return list(results) if isinstance(results, tuple | list) else [results]  # type: ignore[list-item]


def _is_elementwise(node: fx.Node) -> bool:
    return is_pointwise(node) or is_view(node)
