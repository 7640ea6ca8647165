"""The sums of a tensor's columns inside the kernel that casts it both ways: a bias gradient for no bytes of the tensor.

Inductor sums columns in a kernel of its own, which reads dy once more; where dy is an activation's gradient it reads what
that is computed from, and computes it again. Each program of a cast has a tile of rows and columns in registers. It
sums the tile's columns and stores one row of partial sums, which a small reduction adds up. The order of the sums is
fixed, so results repeat bit for bit.

As of the amax (amax.py), the store has a mode of our own, to a place that the kernel knows: the tile's number along the
rows. Partial sums have a row for each `ROWS` rows of the tensor, the fewest of a tile; larger tiles add rows of zeros. A
kernel without such a tile, which only one that casts nothing both ways is, ends the compile of the graph, which is then
compiled with the op's eager kernel: Note [Lowerings that fail] in lowerings/registry.py."""

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops as inductor_ops
from torch.utils._sympy.functions import FloorDiv

from te_inductor.lowerings.codegen import scattered
from te_inductor.lowerings.codegen.amax import AmaxKernel
from te_inductor.lowerings.registry import give_up

aten = torch.ops.aten
MODE = "column_sums"  # of a store: the sums of a tile's columns
ROWS = 32


def column_sums(x: ir.TensorBox) -> ir.TensorBox:
    """(R, C) -> (C,) fp32."""
    device, (rows, columns) = x.get_device_or_error(), x.get_size()
    if device.type != "cuda":
        return lowerings[aten.sum](x, [0], dtype=torch.float32)  # type: ignore[no-any-return]
    partial = lowerings[aten.empty]([_parts(rows), columns], dtype=torch.float32, device=device)
    partial.realize()
    load = x.make_loader()

    def value(index: Any) -> Any:
        return inductor_ops.to_dtype(load(index), torch.float32)

    def place(index: Any) -> list[Any]:
        return [FloorDiv(index[0], ROWS), index[1]]

    layout = ir.MutationLayoutSHOULDREMOVE(partial)
    scattered(layout, torch.float32, [rows, columns], value, place, MODE)
    return lowerings[aten.sum](partial, [0])  # type: ignore[no-any-return]


def _parts(rows: Any) -> Any:
    return FloorDiv(rows + ROWS - 1, ROWS)


class SumsKernel(AmaxKernel):
    """Inductor's Triton kernel, with stores of `MODE`."""

    def store(self, name: str, index: sympy.Expr, value: Any, mode: Any = None) -> None:
        if mode != MODE:
            super().store(name, index, value, mode)
            return
        dimensions = self._dimensions(self.prepare_indexing(index))
        if dimensions is None:
            give_up("te_inductor.column_sums.default", f"{name}: a kernel without a tile of rows and columns")
        rows, columns = dimensions
        size, masks = self.dense_size_list(), self.tile_masks()
        tile, block = f"tl.broadcast_to({value}, [{', '.join(size)}])", f"{rows.upper()}BLOCK"
        if masks:
            tile = f"tl.where(tl.broadcast_to({' & '.join(masks)}, [{', '.join(size)}]), {tile}, 0.0)"
        axis, argument = size.index(block), self.args.output(name)
        part = f"tl.arange(0, {block} // {ROWS}){'[:, None]' if axis == 0 else '[None, :]'}"
        first, place = f"{argument}_part", f"{argument}_place"
        inside = [f"{columns}mask"] if f"{columns}mask" in masks else []
        inside += [f"({place} < {_parts(self.numels[rows])})"] if f"{rows}mask" in masks else []
        for line in (
            f"{first} = {part}",
            f"{place} = {rows}offset // {ROWS} + {first}",
            f"tl.store({argument} + ({place} * {self.kexpr(self.numels[columns])} + {columns}index),"
            f" tl.where({first} == 0, tl.sum({tile}, {axis}, keep_dims=True), 0.0), {' & '.join(inside) or 'None'})",
        ):
            self.stores.writeline(DeferredLine(name, line))

    def _dimensions(self, index: sympy.Expr) -> tuple[str, str] | None:
        """The tile's dimensions that are rows and columns of what is summed, of ``row // ROWS * C + column``; None
        where a dimension is neither."""
        if self.inside_reduction or self.fixed_config is None or set(self.numels) - {"r0_"} != {"x", "y"}:
            return None
        found: dict[bool, set[str]] = {True: set(), False: set()}  # by whether one step moves the place
        symbols = [symbol for symbol in index.free_symbols if symbol in self.range_tree_nodes]
        for symbol in symbols:
            node = self.range_tree_nodes[symbol]
            if node.divisor != 1 or node.length != node.root.numel:
                return None
            alone = index.xreplace({other: sympy.S.Zero for other in symbols if other != symbol})
            moves = alone.xreplace({symbol: sympy.S.One}) != alone.xreplace({symbol: sympy.S.Zero})
            found[moves].add(node.root.prefix)
        if len(found[True]) != 1 or len(found[False]) != 1:
            return None
        [rows], [columns] = found[False], found[True]
        enough = rows != columns and self.fixed_config[f"{rows.upper()}BLOCK"] >= ROWS
        return (rows, columns) if enough else None
