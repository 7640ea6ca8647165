"""What makes the tensors that a layer casts: Note [Bytes of casts] in cast_costs.py."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import torch
from torch import fx
from torch.utils import _pytree as pytree

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.aliases import is_opaque, memory
from te_inductor.passes.graph.operators import Kind, name
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.pre_grad.decide.cast_costs import Maker
from te_inductor.passes.pre_grad.sites.rule import Match


class Makers:
    """The makers of the tensors of a graph, whose matrix products are known."""

    def __init__(self, products: AbstractSet[fx.Node], low: AbstractSet[fx.Node]) -> None:
        self.products, self.low = products, low

    def of_input(self, match: Match) -> Maker:
        """What makes x."""
        node = match.x
        while is_view(node):
            node = node.all_input_nodes[0]
        if node.op in ("placeholder", "get_attr") or self._is_foreign(node):
            return "memory"
        return "kernel" if all(user in self.low for user in _readers(node)) else "shared kernel"

    def of_gradient(self, match: Match) -> Maker:
        """What makes the gradient of the output."""
        readers = list(_readers(match.end))
        if not readers or any(reader.op == "output" for reader in readers):
            return "memory"
        if all(self._is_foreign(reader) for reader in readers):
            return "memory"
        return "shared kernel" if len(readers) == 1 and _is_residual(readers[0]) else "kernel"

    def _is_foreign(self, node: fx.Node) -> bool:
        """Whether no code that Inductor generates computes it, or its gradients."""
        called = name(node)
        return node in self.products or is_opaque(node) or "attention" in called or "attn" in called


def is_view(node: fx.Node) -> bool:
    """Whether it computes nothing: shares its operand's memory, or moves that at most."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return False
    called, kind, in_place = operators.read(node)
    if in_place:
        return False
    moves = kind in Kind.RESHAPE | Kind.CAST | Kind.COPY or called == "getitem"
    return moves or bool(memory(node) & memory(node.all_input_nodes[0]))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a tensor, or a view of it; without what only asks for its sizes."""
    for user in node.users:
        if user.op == "output":
            yield user
        elif is_view(user):
            yield from _readers(user)
        elif any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(user.meta.get("example_value"))):
            yield user


def _is_residual(node: fx.Node) -> bool:
    """Whether it adds two tensors that have gradients, which both then read the sum's."""
    operands = [one for one in node.all_input_nodes if is_tensor(one)]
    return (
        operators.read(node).name == "add"
        and len(operands) == 2
        and value(operands[0]).shape == value(operands[1]).shape
        and all(value(one).requires_grad for one in operands)
    )
