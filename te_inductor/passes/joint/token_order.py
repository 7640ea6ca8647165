"""The pass that has gradients of experts' rows computed in the order of tokens, on the joint graph.

The gradient of a layer's output reaches the experts by a gather, in whose order it is multiplied by the router's weight
and cast, and its product with what the experts gave is added up for the gradient of that weight::

    dy = take_rows(dout, order, places)            each token's row once for each of its experts
    dw = zeros.index_put(order, sum(dy * y, 1))
    copy = cast(where(inside, dy * w[order], 0))

Of a permutation all of that is the same in the order of tokens, where a row is read once for all its experts, and only
the copy is put where its experts have it: Note [Where rows are computed] in ops/permutations.py::

    dw = sum(dout * y[places], 1)
    copy = place_rows(cast(where(inside[places], dout * w, 0)), order, places)

It is done where each row is computed by itself and becomes a copy in passing: its scale is known, or its own."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops
from te_inductor.passes.graph.casts import records_amax
from te_inductor.passes.graph.node_kinds import has_shape, is_cast, is_pointwise, tensor_of
from te_inductor.passes.graph.tracing import insert
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import ROW

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
)
_ZEROS = (aten.full.default, aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
_PUTS = (aten.index_put.default, aten.index_put_.default)


def compute(graph: fx.Graph) -> None:
    for take in graph.find_nodes(op="call_function", target=ops.take_rows):
        rows = _Rows(take)
        rows.find()
        if rows.casts and not rows.others and rows.has_known_columns():
            rows.reorder()


@dataclass
class _Rows:
    """What is computed of rows that are taken in experts' order."""

    take: fx.Node
    inside: list[fx.Node] = field(default_factory=list)  # each row of it of one row, in order
    casts: list[fx.Node] = field(default_factory=list)  # low-precision copies of rows
    sums: list[fx.Node] = field(default_factory=list)  # readers to which the order of rows is all the same
    puts: list[fx.Node] = field(default_factory=list)  # what puts them into the order of tokens
    small: list[fx.Node] = field(default_factory=list)  # others of a number a row
    others: list[fx.Node] = field(default_factory=list)
    _known: dict[fx.Node, fx.Node] = field(default_factory=dict)  # in tokens' order, by what is in experts' order

    @property
    def order(self) -> fx.Node:
        return self.take.args[1]  # type: ignore[return-value]

    @property
    def _places(self) -> torch.Tensor:
        return self.take.args[2].meta["val"]  # type: ignore[union-attr, no-any-return]

    def has_known_columns(self) -> bool:
        """Whether all but the numbers of rows are known, which a graph has as nodes."""
        return all(isinstance(size, int) for size in (*self.take.meta["val"].shape[1:], *self._places.shape[1:]))

    def find(self) -> None:
        inside = {self.take}
        for node in self._readers(inside):
            if node.target is aten.new_zeros.default:  # which reads a shape
                continue
            if self._is_by_rows(node, inside):
                inside.add(node)
                self.inside.append(node)
            elif _is_cast_of_rows(node) and node.args[0] in inside:
                self.casts.append(node)
            elif records_amax(node) or node.target is ops.current_scale:
                self.sums.append(node)
            elif self._is_put(node, inside):
                self.puts.append(node)
            elif all(self._is_number_a_row(one) for one in node.all_input_nodes if one in inside):
                self.small.append(node)
            else:
                self.others.append(node)

    def _readers(self, inside: set[fx.Node]) -> Iterable[fx.Node]:
        """The readers in order, those of what is found on the way, too."""
        node = self.take.next
        while node.op != "root":
            if not inside.isdisjoint(node.all_input_nodes):
                yield node
            node = node.next

    def _is_by_rows(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether each of its rows hangs on the same row of what it reads, and on nothing that is not in rows."""
        value = tensor_of(node)
        if value is None or not self._has_rows(value):
            return False
        if node.target in _VIEWS:
            return self._keeps_rows(node)
        if node.target is aten.sum.dim_IntList:
            dims = node.args[1] or [0]
            return all(dim % node.args[0].meta["val"].dim() for dim in dims)  # type: ignore[union-attr]
        if not (is_pointwise(node) or is_cast(node) or node.target is aten._to_copy.default):
            return False
        for one in node.all_input_nodes:
            read = tensor_of(one)
            less = read is None or read.dim() < value.dim()
            if not (self._is_in_rows(read, value) or (less and one not in inside)):
                return False
        return True

    def _is_in_rows(self, value: torch.Tensor | None, result: torch.Tensor) -> bool:
        """Whether it is a tensor with a row for each of the result's."""
        return value is not None and value.dim() == result.dim() and self._has_rows(value)

    def _keeps_rows(self, view: fx.Node) -> bool:
        before, after = view.args[0].meta["val"], view.meta["val"]  # type: ignore[union-attr]
        moved = view.target is aten.expand.default and before.dim() != after.dim()
        return self._has_rows(before) and self._has_rows(after) and not moved

    def _has_rows(self, value: torch.Tensor) -> bool:
        rows = self.order.meta["val"].shape[0]
        return value.dim() > 0 and statically_known_true(value.shape[0] == rows)

    def _is_number_a_row(self, node: fx.Node) -> bool:
        return statically_known_true(node.meta["val"].numel() == self.order.meta["val"].shape[0])

    def _is_put(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether it puts rows into zeros, each where the order has it from."""
        if node.target not in _PUTS or node.kwargs:
            return False
        zeros, places, rows = node.args[:3]  # type: Any, Any, Any
        made, value = node.meta["val"], rows.meta["val"]
        empty = zeros.target in _ZEROS and (zeros.target is not aten.full.default or zeros.args[1] == 0)
        return (
            rows in inside
            and list(places) == [self.order]
            and bool(empty)
            and len(zeros.users) == 1
            and made.dtype == value.dtype
            and has_shape(made, value.shape)
        )

    def reorder(self) -> None:
        """Compute in the order of tokens, and put copies where experts have them."""
        x, order, places = self.take.args
        x = self._of_each_place(x, self.take)  # type: ignore[arg-type]
        if self._places.dim() > 1:
            places = _call(self.take, aten.reshape.default, places, [-1])  # type: ignore[union-attr]
        reads = {self.take, *self.inside}
        for node in self.inside:
            for one in node.all_input_nodes:
                if one not in reads and self._is_in_rows(tensor_of(one), node.meta["val"]):
                    node.replace_input_with(one, self._of_tokens(one, places, node))  # type: ignore[arg-type]
        for cast in self.casts:
            items = list(cast.users) if cast.target is ops.quantize else [cast]
            for item in items:
                _behind(item, ops.place_rows, order, places)
        for node in self.small:
            for one in [one for one in node.all_input_nodes if one in reads]:
                node.replace_input_with(one, _call(node, ops.take_rows, one, order, places))
        for put in self.puts:
            put.replace_all_uses_with(put.args[2])  # type: ignore[arg-type]
            zeros = put.args[0]
            put.graph.erase_node(put)
            put.graph.erase_node(zeros)  # type: ignore[arg-type]
        self.take.replace_all_uses_with(x)  # type: ignore[arg-type]
        self.take.graph.erase_node(self.take)

    def _of_each_place(self, x: fx.Node, before: fx.Node) -> fx.Node:
        """Returns rows of tokens, each as often as it is taken."""
        if self._places.dim() == 1:
            return x
        rest = x.meta["val"].shape[1:]
        wide = _call(before, aten.unsqueeze.default, x, 1)
        wide = _call(before, aten.expand.default, wide, [-1, self._places.shape[1], *rest])
        return _call(before, aten.reshape.default, wide, [-1, *rest])

    def _of_tokens(self, node: fx.Node, places: fx.Node, reader: fx.Node) -> fx.Node:
        """What is in the order of experts, in that of tokens; in front of `reader`."""
        if node in self._known:
            return self._known[node]
        if node.target is aten.index.Tensor and list(node.args[1]) == [self.order]:  # type: ignore[arg-type]
            made: fx.Node = node.args[0]  # type: ignore[assignment]
        elif node.target is ops.take_rows and node.args[1:] == self.take.args[1:]:
            made = self._of_each_place(node.args[0], reader)  # type: ignore[arg-type]
        elif node.target in _VIEWS and self._keeps_rows(node):
            made = _call(reader, node.target, self._of_tokens(node.args[0], places, reader), *node.args[1:])  # type: ignore[arg-type]
        else:
            made = _call(reader, aten.index.Tensor, node, [places])
        self._known[node] = made
        return made


def _is_cast_of_rows(node: fx.Node) -> bool:
    """Whether it makes a row copy, with one scale that is known, or scales of rows."""
    if node.target is ops.quantize_delayed:
        return node.args[1].meta["val"].dim() == 0  # type: ignore[union-attr]
    if node.target is not ops.quantize or len([one for one in node.args if one is not None]) > 2 or node.kwargs:
        return False
    return isinstance(node.args[1], Quantizer) and node.args[1].granularity is ROW


def _behind(node: fx.Node, target: Any, *more: Any) -> None:
    """Have readers of a node read what `target` makes of it."""
    readers = list(node.users)
    made = _call(node.next, target, node, *more)
    for reader in readers:
        reader.replace_input_with(node, made)


def _call(before: fx.Node, target: Any, *args: Any) -> fx.Node:
    kept = {name: one for name, one in before.meta.items() if name in ("ac_graph_id", "partitioner_tag", "recompute")}
    with before.graph.inserting_before(before):
        return insert(before.graph, target, *args, like=kept)
