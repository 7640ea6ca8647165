"""What a chain of views does to the elements of a tensor: whether it only gives them another shape, or swaps two groups of
dimensions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Kind


@dataclass(eq=False)
class _Factor:
    """A factor of a dimension's size. A reshape may split it, which all who hold it see."""

    size: Any  # int or SymInt, whose % mypy does not know
    parts: "tuple[_Factor, _Factor] | None" = field(default=None)

    def leaves(self) -> "Iterator[_Factor]":
        if self.parts is None:
            yield self
        else:
            for part in self.parts:
                yield from part.leaves()


class Chain:
    """The dimensions of a tensor as the factors of those of its root, step by step."""

    def __init__(self, root: torch.Tensor) -> None:
        self._root = [[] if statically_known_true(size == 1) else [_Factor(size)] for size in root.shape]
        self._dims = self._root

    def follow(self, node: fx.Node, after: torch.Tensor) -> bool:
        """Take one more view; False of what is none, or cannot be followed."""
        order, kind = operators.order(node), operators.read(node).kind
        if order is not None:
            self._dims = [self._dims[dim] for dim in order]
            return True
        return kind in Kind.SAME | Kind.COPY or (kind is Kind.RESHAPE and self._reshape(after.shape))

    def is_matrix(self, rows: int) -> bool | None:
        """Answers for the tensor at the end, whose first `rows` dimensions are the rows of a matrix: True where the
        root's elements are in the order of its transpose, False where they are in its own, None otherwise."""
        return _swapped(_leaves(self._root), _leaves(self._dims[:rows]), _leaves(self._dims[rows:]))

    def of_matrix(self) -> bool | None:
        """The same of the tensor at the end of a chain whose root is the matrix."""
        return _swapped(_leaves(self._dims), _leaves(self._root[:-1]), _leaves(self._root[-1:]))

    def _reshape(self, shape: Sequence[Any]) -> bool:
        rest = _leaves(self._dims)[::-1]
        dims: list[list[_Factor]] = []
        for size in shape:
            dims.append([])
            while not statically_known_true(size == 1):
                if not rest:
                    return False
                one = rest.pop()
                if statically_known_true(size % one.size == 0):
                    size = size // one.size
                elif statically_known_true(one.size % size == 0):
                    one.parts = _Factor(size), _Factor(one.size // size)
                    one, left = one.parts
                    rest.append(left)
                    size = 1
                else:
                    return False
                dims[-1].append(one)
        self._dims = dims
        return not rest


def _leaves(dims: Sequence[Sequence[_Factor]]) -> list[_Factor]:
    return [leaf for dim in dims for factor in dim for leaf in factor.leaves()]


def _swapped(order: list[_Factor], rows: list[_Factor], columns: list[_Factor]) -> bool | None:
    if order == rows + columns:
        return False
    return True if order == columns + rows else None


def source(node: fx.Node, copies: bool = False) -> fx.Node | None:
    """The tensor that a node returns another view of, of the views that a chain follows; with `copies` also one that it
    copies."""
    known = Kind.PERMUTE | Kind.RESHAPE | Kind.SAME
    is_one = operators.read(node).kind in (known | Kind.COPY if copies else known) and bool(node.args)
    return node.args[0] if is_one and isinstance(node.args[0], fx.Node) else None
