"""Batched products of one matrix each, as ``torch.einsum`` decomposes a linear layer: ``bmm`` of (1, M, K) and (1, K, N),
between views that only add, move and remove dimensions of size 1, or merge rows.

`inline` writes each as the ``mm`` that it is, of the tensors behind those views, so that the three products of a layer name
the same operands: Note [Triples of products]. autoparallel's graphs are of this form."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.passes.graph.operators import Call
from te_inductor.passes.graph.tracing import take_place
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.views import Chain, source
from te_inductor.passes.graph.writes import AtenWrites, Writes

aten = torch.ops.aten


def inline(graph: fx.Graph) -> None:
    """Write every such product of a graph of ATen ops as one of matrices."""
    inlined = _Inlined(graph, AtenWrites(graph))
    found = [node for node in graph.nodes if _is_single(node)]
    for node in found:
        inlined.write(node)
    if found:
        graph.eliminate_dead_code()


@dataclass
class _Inlined:
    graph: fx.Graph
    writes: Writes
    views: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)  # those that are written so far

    def write(self, node: fx.Node) -> None:
        with self.graph.inserting_before(node):
            a, b = (self._matrix(operand, node) for operand in node.args)
            product = self._call(node, aten.mm.default, a, b)
        end, swapped = self._end(node)
        with self.graph.inserting_before(node):
            y = self._view(node, aten.permute.default, product, (1, 0)) if swapped else product
            y = self._view(node, aten.reshape.default, y, _given(value(end).shape))
        end.replace_all_uses_with(y)

    def _matrix(self, operand: Any, place: fx.Node) -> fx.Node:
        """(R, C), by the farthest tensor (..., C) or (..., R) that (1, R, C) is a plain view of, or a transposed one."""
        rows, columns = value(operand).shape[1:]
        root, swapped = operand, False
        for start, chain in _chains(operand):
            if self.writes.anywhere(start):  # of which a view may show other values later
                break
            found = chain.is_matrix(2)
            if found is not None and statically_known_true(value(start).shape[-1] == (rows if found else columns)):
                root, swapped = start, found
        made = self._view(place, aten.reshape.default, root, _given((columns, rows) if swapped else (rows, columns)))
        return self._view(place, aten.permute.default, made, (1, 0)) if swapped else made

    def _end(self, node: fx.Node) -> tuple[fx.Node, bool]:
        """The last of the views behind a product that is one of the whole matrix, and whether of its transpose."""
        path, end, swapped = [node], node, False
        while len(path[-1].users) == 1 and source(user := next(iter(path[-1].users))) is path[-1]:
            path.append(user)
        chain = Chain(value(node))
        for after in path[1:]:
            if not chain.follow(after, value(after)):
                break
            found = chain.of_matrix()
            if found is not None and _given(value(after).shape) is not None:
                end, swapped = after, found
        return end, swapped

    def _view(self, place: fx.Node, op: Any, operand: fx.Node, arg: Any) -> fx.Node:
        """One for all that read it; the operand itself where that has the shape."""
        if op is aten.reshape.default and arg == _given(value(operand).shape):
            return operand
        key = (op, operand, arg)
        if key not in self.views:
            self.views[key] = self._call(place, op, operand, list(arg))
        return self.views[key]

    def _call(self, place: fx.Node, op: Callable[..., torch.Tensor], *args: Any) -> fx.Node:
        made = self.graph.call_function(op, args)
        values = [value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
        with value(place).fake_mode:  # type: ignore[attr-defined]
            take_place(made, place.meta)
            made.meta["val"] = made.meta["example_value"] = op(*values)
        return made


def _chains(node: fx.Node) -> Iterator[tuple[fx.Node, Chain]]:
    """The tensors that a node is a view of, the nearest first, each with the views from it to the node."""
    path = [node]
    while (before := source(path[-1], copies=True)) is not None and is_tensor(before):
        path.append(before)
        chain, nodes = Chain(value(before)), path[::-1]
        if all(chain.follow(after, value(after)) for _, after in itertools.pairwise(nodes)):
            yield before, chain


def _is_single(node: fx.Node) -> bool:
    call = Call.read(node)
    if call is None or call.name != "bmm" or node.op != "call_function" or node.kwargs:
        return False
    shapes = [value(operand).shape for operand in node.args if is_tensor(operand)]
    return len(shapes) == 2 and all(
        statically_known_true(shape[0] == 1)
        and all(statically_known_true(size > 0) for size in shape)
        and _given(shape[1:]) is not None
        for shape in shapes
    )


def _given(shape: Sequence[int | torch.SymInt]) -> tuple[int, ...] | None:
    """A shape as the argument of a reshape, which has constants and one size that torch finds; None of others."""
    sizes = tuple(size if isinstance(size, int) else -1 for size in shape)
    return sizes if sizes.count(-1) < 2 else None
