"""A predicate over (batch, head, query, key) as plain data, which a graph holds as text and a kernel computes.

A node is a number, the name of a place (``"b"``, ``"h"``, ``"q"``, ``"k"``), or a list of an operation's name and its
operands: ``["and", ["le", "k", "q"], ["ne", ["at", 0, "b", "k"], 0]]`` is causal attention to the keys that tensor 0
does not hide. ``["at", n, …]`` is an element of tensor n, which has one index a dimension."""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

Node = Any  # int | str | list, nested
BLOCK = 128  # queries, and keys, of a block of scores: torch's default, for which its kernels are tuned

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "le": operator.le,
    "lt": operator.lt,
    "ge": operator.ge,
    "gt": operator.gt,
    "eq": operator.eq,
    "ne": operator.ne,
    "not": operator.invert,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
}
_FOLDS: dict[str, Callable[..., Any]] = {
    "and": operator.and_,
    "or": operator.or_,
    "add": operator.add,
    "mul": operator.mul,
}


def to_text(node: Node) -> str:
    return json.dumps(node, separators=(",", ":"))


def from_text(text: str) -> Node:
    return json.loads(text)


def evaluate(node: Node, places: Mapping[str, Any], tensors: Sequence[Any]) -> Any:
    """The value at some places: tensors that broadcast, scalar tensors of a kernel, or proxies of a trace."""
    if isinstance(node, str):
        return places[node]
    if not isinstance(node, list):
        return node
    called, *operands = node
    if called == "at":
        which, *index = operands
        return tensors[which][tuple(evaluate(one, places, tensors) for one in index)] if index else tensors[which]
    values = [evaluate(one, places, tensors) for one in operands]
    return _OPERATIONS[called](*values) if called in _OPERATIONS else reduce(_FOLDS[called], values)


def places_of(node: Node) -> set[str]:
    """The places that a node depends on."""
    if isinstance(node, str):
        return {node}
    operands = node[2 if node[0] == "at" else 1 :] if isinstance(node, list) else []
    return set().union(*map(places_of, operands)) if operands else set()


class Blocks:
    """What is known of a predicate on blocks of scores, from the smallest and the largest value that each side of a
    comparison has in a block. Nothing has the size of the scores."""

    def __init__(
        self, tensors: Sequence[Tensor], sizes: Sequence[Any], device: torch.device, block: int | None = BLOCK
    ) -> None:
        """`sizes` are those of batch, heads, queries and keys; without `block` all scores of a head are one."""
        self.tensors, self.device, self.block = tensors, device, block
        self.batch, self.heads, self.queries, self.keys = sizes

    def find(self, node: Node) -> tuple[Any, Any]:
        """Finds where some score of a block may be attended to, and where all are known to be: (batch or 1, heads or 1,
        blocks of queries or 1, blocks of keys or 1), or Booleans."""
        called, *operands = node if isinstance(node, list) else ["", node]
        if called in ("and", "or"):
            found = [self.find(one) for one in operands]
            join = operator.and_ if called == "and" else operator.or_
            return reduce(join, (some for some, _ in found)), reduce(join, (every for _, every in found))
        if called == "not":
            some, every = self.find(operands[0])
            return _negated(every), _negated(some)
        compare = _COMPARED.get(called)
        if compare is None or any({"q", "k"} <= places_of(one) for one in operands):
            return True, False
        return compare(*(self._bounds(one) for one in operands))

    def _bounds(self, side: Node) -> tuple[Any, Any]:
        """The smallest and the largest value of one side in each block."""
        along = places_of(side) & {"q", "k"}
        length = self.queries if along == {"q"} else self.keys
        block = length if self.block is None or not along else self.block
        first = torch.arange(0, length, block, device=self.device) if along else None
        axis = -1 if along == {"q"} else -2
        if first is not None and _rises(side):
            last = (first + block - 1).clamp(max=length - 1)
            least, largest = (self._at(side, dict.fromkeys(along, ends.view(1, 1, -1))) for ends in (first, last))
            return least.unsqueeze(axis), largest.unsqueeze(axis)
        positions = None
        if first is not None:  # the last position again behind the end
            positions = torch.arange(first.shape[0] * block, device=self.device).clamp(max=length - 1).view(1, 1, -1)
        value = self._at(side, dict.fromkeys(along, positions))
        if not isinstance(value, Tensor):
            return value, value
        value = value.to(torch.int64) if value.dtype is torch.bool else value
        if first is None:
            value = value.view(*([1] * (3 - value.dim())), *value.shape).unsqueeze(-1)
            return value, value
        value = value.view(*value.shape[:2], first.shape[0], -1)
        least, largest = value.amin(-1).unsqueeze(axis), value.amax(-1).unsqueeze(axis)
        if value.is_floating_point():  # a NaN is in no order with the others
            least, largest = (
                least.nan_to_num(-torch.inf, torch.inf, -torch.inf),
                largest.nan_to_num(torch.inf, torch.inf, -torch.inf),
            )
        return least, largest

    def _at(self, side: Node, positions: Mapping[str, Any]) -> Any:
        places = {
            "b": torch.arange(self.batch, device=self.device).view(-1, 1, 1),
            "h": torch.arange(self.heads, device=self.device).view(1, -1, 1),
        }
        return evaluate(side, {**places, **positions}, self.tensors)


def _rises(side: Node) -> bool:
    """Whether a side of a comparison is known not to fall from one position to the next."""
    if isinstance(side, str) or not places_of(side) & {"q", "k"}:
        return True
    called, first, *others = side
    rises = called == "add" or (called == "floordiv" and isinstance(others[0], int) and others[0] > 0)
    return rises and all(map(_rises, (first, *others)))


def _negated(known: Any) -> Any:
    return not known if isinstance(known, bool) else ~known


def _at_most(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    return one[0] <= other[1], one[1] <= other[0]


def _below(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    return one[0] < other[1], one[1] < other[0]


def _equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    meet = (one[0] <= other[1]) & (other[0] <= one[1])
    return meet, (one[0] == other[1]) & (one[1] == other[0])


def _unequal(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    meet, same = _equal(one, other)
    return _negated(same), _negated(meet)


_COMPARED: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "le": _at_most,
    "lt": _below,
    "ge": lambda one, other: _at_most(other, one),
    "gt": lambda one, other: _below(other, one),
    "eq": _equal,
    "ne": _unequal,
}


def block_mask(node: Node, tensors: Sequence[Tensor], sizes: Sequence[Any], device: torch.device) -> list[Tensor]:
    """What FlexAttention calls a block mask: for each row of blocks how many blocks to compute in part, and which, and
    how many in full, and which; then likewise for each column. int32, the counts (B, H, rows), the blocks (B, H, rows,
    columns), with B and H 1 where the predicate does not depend on them."""
    queries, keys = sizes[2:]
    shape = _shape_of_blocks(node, sizes)
    some, every = Blocks(tensors, sizes, device).find(node)
    # A block at the end that is not full is computed in part.
    inside_rows = (torch.arange(shape[2], device=device) + 1) * BLOCK <= queries
    inside_columns = (torch.arange(shape[3], device=device) + 1) * BLOCK <= keys
    inside = inside_rows[:, None] & inside_columns
    every = (every & inside).expand(shape)
    some = (some | torch.zeros_like(inside)).expand(shape) & ~every
    return [one for blocks in (some, every, some.mT, every.mT) for one in _ordered(blocks)]


def empty_block_mask(node: Node, sizes: Sequence[Any], device: torch.device) -> list[Tensor]:
    """The memory of a block mask, to which nothing has been written."""
    *outer, rows, columns = _shape_of_blocks(node, sizes)
    of_rows, of_columns = [(rows,), (rows, columns)], [(columns,), (columns, rows)]
    shapes = [*of_rows, *of_rows, *of_columns, *of_columns]
    return [torch.empty((*outer, *shape), dtype=torch.int32, device=device) for shape in shapes]


def _shape_of_blocks(node: Node, sizes: Sequence[Any]) -> tuple[Any, ...]:
    batch, heads, queries, keys = sizes
    places = places_of(node)
    outer = (batch if "b" in places else 1), (heads if "h" in places else 1)
    return *outer, (queries + BLOCK - 1) // BLOCK, (keys + BLOCK - 1) // BLOCK


def _ordered(blocks: Tensor) -> list[Tensor]:
    """How many blocks of each row are chosen, and all blocks of the row, the chosen ones in front. A sort of so few
    Inductor would write as a network of comparisons, which Triton compiles for ten seconds and more, four times over."""
    places = torch.arange(blocks.shape[-1], dtype=torch.int32, device=blocks.device).expand(blocks.shape)
    counts, upto = blocks.sum(-1, dtype=torch.int32), blocks.cumsum(-1, dtype=torch.int32)
    order = torch.where(blocks, upto - 1, counts[..., None] + places - upto)
    starts = torch.arange(0, blocks.numel(), blocks.shape[-1], device=blocks.device).view(*counts.shape, 1)
    chosen = torch.empty(blocks.numel(), dtype=torch.int32, device=blocks.device)
    chosen = chosen.index_put(((starts + order).flatten(),), places.flatten())
    return [counts, chosen.view(blocks.shape)]


def empty_rows(node: Node, tensors: Sequence[Tensor], sizes: Sequence[Any], device: torch.device) -> Tensor:
    """Finds where a query attends to no key: Booleans, (B, H, L), with B and H 1 where the predicate does not depend on
    them. A reduction of the predicate, into which a compiler fuses it."""
    shapes = {"b": (-1, 1, 1, 1), "h": (1, -1, 1, 1), "q": (1, 1, -1, 1), "k": (1, 1, 1, -1)}
    places = {
        place: torch.arange(size, device=device).view(shape)
        for (place, shape), size in zip(shapes.items(), sizes, strict=True)
    }
    every_query = torch.zeros(sizes[2], dtype=torch.bool, device=device)  # where the predicate has them all alike
    return ~evaluate(node, places, tensors).any(-1) | every_query


def holds_everywhere(node: Node, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Tensor:
    """Whether a predicate is known to hold for all scores: a Boolean, ()."""
    device = tensors[0].device
    _, every = Blocks(tensors, sizes, device, block=None).find(node)
    return every.all() if isinstance(every, Tensor) else torch.tensor(bool(every), dtype=torch.bool, device=device)
