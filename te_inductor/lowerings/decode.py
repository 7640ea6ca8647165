"""What a step of generation does besides its linear layers: an arg max over a vocabulary."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from te_inductor import compat
from te_inductor.lowerings.codegen.programmatic_launch import is_early

aten = torch.ops.aten
_PIECES = (256, 128, 64)  # that a row is cut into for an arg max
_LONG = 1 << 14  # elements of a row that is


def replaced() -> AbstractContextManager[Any]:
    """Have Inductor's table hold our lowerings during our compiles. They serve graphs whose kernels start early, where
    they fit."""
    return compat.patch("torch._inductor.lowering.lowerings", _ours)


def _ours(table: Mapping[Any, Callable[..., Any]]) -> Mapping[Any, Callable[..., Any]]:
    inductors = table[aten.argmax]

    def argmax(x: ir.TensorBox, *args: Any, **kwargs: Any) -> Any:
        found = _argmax(x, *args, **kwargs) if is_early() else None
        return inductors(x, *args, **kwargs) if found is None else found

    return {op: argmax for op in (aten.argmax, aten.argmax.default) if op in table}


def _argmax(x: ir.TensorBox, dim: int | None = None, keepdim: bool = False) -> ir.TensorBox | None:
    """The arg max of pieces, then of the pieces' maxima, since Inductor gives a row to one program: 30 us of 128256
    elements. The first of equals, and NaN before all, are found both ways."""
    size = x.get_size()
    known = V.graph.sizevars
    if dim is None or dim % len(size) != len(size) - 1 or keepdim or not known.statically_known_geq(size[-1], _LONG):
        return None
    pieces = next((count for count in _PIECES if known.statically_known_multiple_of(size[-1], count)), None)
    if pieces is None:
        return None
    cut = lowerings[aten.view](x, [*size[:-1], pieces, size[-1] // pieces])
    best, place = lowerings[aten.amax](cut, [-1]), lowerings[aten.argmax](cut, -1)
    piece = lowerings[aten.argmax](best, -1, True)
    inside = lowerings[aten.gather](place, len(size) - 1, piece)
    found = lowerings[aten.add](lowerings[aten.mul](piece, size[-1] // pieces), inside)
    return lowerings[aten.squeeze](found, -1)  # type: ignore[no-any-return]
