"""Rows in the order of experts: Note [Where rows are computed] in ops/permutations.py."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops as inductor_ops
from torch.utils._sympy.functions import FloorDiv

from te_inductor import ops
from te_inductor.lowerings.codegen import scattered
from te_inductor.lowerings.registry import lowering

aten = torch.ops.aten


@lowering(ops.take_rows)
def take_rows(x: ir.TensorBox, order: ir.TensorBox, places: ir.TensorBox) -> ir.TensorBox:
    """Computed by the kernels that read it."""
    each = _each(places)
    rows = lowerings[aten.div.Tensor_mode](order, each, rounding_mode="floor") if each != 1 else order
    return lowerings[aten.index](x, [rows])  # type: ignore[no-any-return]


@lowering(ops.place_rows)
def place_rows(x: ir.TensorBox, rows: ir.TensorBox, places: ir.TensorBox) -> ir.TensorBox:
    """Places rows in memory. Loops go through x, row by row as often as it goes to a place, and stores are contiguous
    in rows."""
    if x.get_device_or_error().type != "cuda":  # whose code stores one number at a time where it is told the place
        return _gathered(x, rows)
    each, sizes = _each(places), [*rows.get_size(), *x.get_size()[1:]]
    load, load_place = x.make_loader(), lowerings[aten.view](places, rows.get_size()).make_loader()

    def place(index: Any) -> list[Any]:
        row = inductor_ops.indirect_indexing(load_place([index[0]]), sizes[0], check=False, wrap_neg=False)
        return [row, *index[1:]]

    layout = ir.FixedLayout(x.get_device_or_error(), x.get_dtype(), sizes)
    return scattered(layout, x.get_dtype(), sizes, lambda index: load([FloorDiv(index[0], each), *index[1:]]), place)


def _each(places: ir.TensorBox) -> Any:
    """The number of places that a row goes to."""
    sizes = places.get_size()
    return sizes[1] if len(sizes) > 1 else 1


def _gathered(x: ir.TensorBox, rows: ir.TensorBox) -> ir.TensorBox:
    dtype, as_dtype = x.get_dtype(), lowerings[aten.view.dtype]
    if not dtype.is_floating_point or dtype.itemsize > 1:
        return lowerings[aten.index](x, [rows])  # type: ignore[no-any-return]
    return as_dtype(lowerings[aten.index](as_dtype(x, torch.uint8), [rows]), dtype)  # type: ignore[no-any-return]
