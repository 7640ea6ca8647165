"""What stands around the layers of experts whose rows are exchanged between ranks: Note [Rows between ranks] in
ops/layers/operands.py.

In front: ``all_to_all_single(x, …) -> wait -> [order]``. Behind: ``made = new_empty(…); made[order] = y``, or y itself,
``-> all_to_all_single -> wait``. As `torch.distributed._functional_collectives` writes them."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.ops import LayerSpec
from te_inductor.ops.layers.operands import Exchanged
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Kind, name
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.pre_grad.sites.part import SitePart
from te_inductor.recipes import Slots

if TYPE_CHECKING:
    from te_inductor.passes.pre_grad.sites.rule import Match

OTHERS = Refusal("something else reads the rows as they come")


@dataclass(frozen=True)
class ExchangeNodes:
    """One all-to-all in front of a layer or behind it."""

    rows: fx.Node  # what is sent
    sent: tuple[Any, ...]  # rows to each rank that go to experts, numbers or nodes
    received: tuple[Any, ...]
    group: str
    order: fx.Node | None  # which of the rows at the all-to-all each of the layer's is
    waited: fx.Node  # the rows that came
    nodes: tuple[fx.Node, ...]  # what does it, in order

    @property
    def splits(self) -> list[fx.Node]:
        return [one for one in (*self.sent, *self.received, self.order) if isinstance(one, fx.Node)]


@dataclass(frozen=True)
class Exchanges(SitePart):
    """What goes between ranks around a layer of experts, and which of it the layer does itself."""

    between_ranks: ClassVar[bool] = True
    groups: tuple[str, ...]  # whose ranks exchange rows around it
    arrives: ExchangeNodes | None = None  # which x is in front of; None: the graph does it, in high precision
    leaves: ExchangeNodes | None = None
    sizes_of: tuple[fx.Node, ...] = ()  # what asks for sizes of the rows that came
    wires: tuple[str, ...] = ()  # what a report says of it

    def key(self) -> ExchangeNodes | None:
        return self.arrives

    def reads(self) -> Iterable[fx.Node]:
        return [] if self.arrives is None or self.arrives.order is None else [self.arrives.order]

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        more: dict[str, Any] = {}
        around: dict[str, ExchangeNodes | None] = {"input": self.arrives, "output": self.leaves}
        for operand, exchange in around.items():
            if exchange is not None:
                changed: Any = {operand: Exchanged(exchange.group)}
                spec = replace(spec, **changed)
                more[f"of_{operand}"] = [] if exchange.order is None else [exchange.order]
                more[f"{operand}_sizes"] = [*exchange.sent, *exchange.received]
        return spec, more

    def may_merge(self, match: "Match", slots: Slots) -> bool:
        """Each output is exchanged by itself."""
        return self.leaves is None

    def describe(self, slots: Slots) -> list[str]:
        return list(self.wires)


def in_front(x: fx.Node) -> ExchangeNodes | None:
    """The exchange that makes the rows of a layer."""
    ordered, order = x, None
    picked = _picked(x)
    if picked is not None:
        x, order = picked
    read = _read(x)
    if read is None:
        return None
    exchange, waits, rows, sent, received, group = read
    nodes = (exchange, *waits) if ordered is x else (exchange, *waits, ordered)
    return ExchangeNodes(rows, sent, received, group, order, x, nodes)


def behind(y: fx.Node) -> ExchangeNodes | None:
    """The exchange that alone reads the rows of a layer."""
    readers = [user for user in y.users if not _asks_for_sizes(user)]
    if len(readers) != 1:
        return None
    [reader] = readers
    order, made = None, y
    nodes: tuple[fx.Node, ...] = ()
    if reader.target is operator.setitem and len(reader.args) == 3 and reader.args[2] is y:
        made, order = reader.args[0], _rows_index(reader.args[1])  # type: ignore[assignment]
        whole = isinstance(made, fx.Node) and name(made) == "new_empty" and made.args[:1] == (y,)
        if not whole or order is None or not is_tensor(order) or value(order).dim() != 1:
            return None
        nodes = (made, reader)
        readers = [user for user in made.users if user is not reader]
        if len(readers) != 1 or len(y.users) != 2:
            return None
        [reader] = readers
    elif len(y.users) != 1:
        return None
    read = next((found for node in _readers_of_all(reader) if (found := _read(node)) is not None), None)
    if read is None or read[0] is not reader or read[2] is not made:
        return None
    exchange, waits, _, received, sent, group = read
    return ExchangeNodes(made, sent, received, group, order, waits[-1], (*nodes, exchange, *waits))


def others(exchange: ExchangeNodes, layers: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Finds, of an exchange in front, who reads its rows: nodes that ask for sizes, and what is no layer of
    `layers`."""
    waited = exchange.waited
    sizes = [user for user in waited.users if _asks_for_sizes(user)]
    read = [user for user in waited.users if user not in sizes]
    ordered = [user for user in read if _picked(user) is not None and user not in layers]
    left = [user for user in read if user not in ordered and user not in layers]
    left += [user for one in ordered for user in one.users if user not in layers]
    return sizes, left


def _asks_for_sizes(node: fx.Node) -> bool:
    called, kind, _ = operators.read(node)
    return kind is Kind.SIZE or called == "new_empty"


def _readers_of_all(node: fx.Node) -> list[fx.Node]:
    """The only reader of a node, and that reader's."""
    found: list[fx.Node] = []
    while len(node.users) == 1 and len(found) < 2:
        [node] = node.users
        found.append(node)
    return found


def _read(
    waited: fx.Node,
) -> tuple[fx.Node, tuple[fx.Node, ...], fx.Node, tuple[Any, ...], tuple[Any, ...], str] | None:
    """Reads what waits for an all-to-all: that, the nodes that wait, its rows, the splits that are sent and received,
    its group."""
    found = compat.collective_behind(waited)
    if found is None:
        return None
    exchange, waits = found
    if name(exchange) != "all_to_all_single" or len(exchange.args) != 4 or len(exchange.users) != 1:
        return None
    rows, received, sent, group = exchange.args
    splits = isinstance(sent, list | tuple) and isinstance(received, list | tuple)
    if not (is_tensor(rows) and splits and isinstance(group, str) and value(rows).dim() == 2):  # type: ignore[arg-type]
        return None
    return exchange, waits, rows, tuple(sent), tuple(received), group  # type: ignore[return-value, arg-type]


def _picked(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns, of rows that are picked from others, those, and which they are."""
    if node.target is operator.getitem and len(node.args) == 2:
        source, index = node.args[0], _rows_index(node.args[1])
    elif name(node) == "index_select" and len(node.args) == 3 and node.args[1] == 0:
        source, index = node.args[0], node.args[2]
    else:
        return None
    if not (is_tensor(source) and is_tensor(index) and value(index).dim() == 1 and value(source).dim() == 2):  # type: ignore[arg-type]
        return None
    integers = not value(index).is_floating_point() and value(index).dtype != torch.bool  # type: ignore[arg-type]
    return (source, index) if integers else None  # type: ignore[return-value]


def _rows_index(index: Any) -> Any:
    """The index of ``[index]`` and ``[index, :]``."""
    if isinstance(index, tuple) and (len(index) == 1 or (len(index) == 2 and index[1] == slice(None))):
        return index[0]
    return index
