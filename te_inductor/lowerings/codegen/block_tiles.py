"""Both copies of a tensor from one read, where whole blocks of 128 are the tiles of a kernel.

# Note [Tiles that are blocks]
Inductor knows reductions and pointwise kernels. The amax of 1 x 128 blocks and that of 128 x 1 blocks are reductions
along different dimensions, hence two kernels, each of which reads what the tensor is made from. A tile of 128 x 128
holds whole blocks of either kind, and of 128 x 128. So the copies are pointwise, and `block_amax` is what the kernel
class below writes as a reduction of its tile, along the dimensions whose positions it is given. A scale is stored once
a block, by a store of a mode of our own (`ir.Scatter`): its index has the position divided by 128, for which
`BlockKernel` takes the tile's first.

That is right only while a tile is as long as a block is, so `Choices` fixes it (tiles.py), `BlockKernel` has the two
dimensions of the matrix, whatever loops Inductor merged, and `fits` asks for whole blocks. Nothing is assumed of the
order of loops: a dimension is known by its variable. The mode keeps readers of a scale out of the kernel that writes
it.

# Note [Rows that hold blocks]
The row copy alone of what a norm makes joins the norm's own kernel, a reduction whose programs hold whole rows. There a
block is 128 neighbours of the row: its amax is the maximum along the last dimension of the row as (R / 128, 128). Of
tiles an amax is a tile of one row or one column, which the tile's own values broadcast; here it is a row of R / 128, of
which `spread` makes one of R again, when the scale has been computed: not by each thread for each of its elements. Rows
may be any number: where the copy cannot join, the last tile is cut off between two of them, which cuts no block."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.simd import SIMDKernel, SIMDScheduling
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as prims
from torch.utils._sympy.functions import FloorDiv

from te_inductor.lowerings.codegen import scattered
from te_inductor.lowerings.codegen.column_sums import SumsKernel
from te_inductor.recipes import Quantizer

TILE = 128
ROW, ROW_A_WARP = 8192, 1024  # elements of a row that a program holds at most, and those of each of its warps
MODE = "once_a_block"  # of a store
MAX, SPREAD = "max_of_block", "spread_over_block"  # of a reduction, in a pointwise kernel
_MATRIX = "te_matrix"  # attribute of a buffer


def fits(x: ir.TensorBox, quantizer: Quantizer, wanted: Sequence[bool]) -> bool:
    """Whether the blocks of both copies are tiles, or those of the row copy, if that alone is wanted, stand in rows
    that a program may hold. Not where Inductor compiles without our choices and our kernel class, as AOTInductor
    does."""
    scope, known = quantizer.granularity, V.graph.sizevars.statically_known_multiple_of
    row_alone = scope.one_row and wanted[0] and not wanted[1]
    return (
        x.get_device_or_error().type == "cuda"
        and getattr(V.choices, "cut_tiles", False)
        and not scope.microscaled
        and scope.block in ((1, TILE), (TILE, TILE))
        and (all(known(size, TILE) for size in x.get_size()) or (row_alone and comes_in_rows(x)))
    )


def comes_in_rows(x: ir.TensorBox) -> bool:
    """Whether it is made with numbers computed for its rows, as a norm's output is, and a program may hold a row."""
    rows, columns = x.get_size()
    if not (sympy.sympify(columns).is_number and may_be_held(int(columns))):
        return False
    known = V.graph.sizevars.statically_known_equals
    read = [V.graph.try_get_buffer(name) for name in x.get_read_names()]
    computed = [buffer for buffer in read if isinstance(buffer, ir.ComputedBuffer)]
    return any(known(sympy_product(buffer.get_size()), rows) for buffer in computed)


def may_be_held(columns: int) -> bool:
    """Whether a kernel may hold rows of so many elements, in whole blocks."""
    return ROW_A_WARP <= columns <= ROW and columns % TILE == 0


def block_amax(bits: Any, positions: list[Any]) -> Any:
    """The largest of an int32 along the dimensions of the tile where an element has these positions."""
    along = tuple(prims.index_expr(position, torch.int32) for position in positions)
    return prims.reduction(torch.int32, torch.int32, MAX, (bits, *along))  # type: ignore[arg-type]


def spread(value: Any) -> Any:
    """What has been computed of `block_amax`, fp32, for each element of the block."""
    return prims.reduction(torch.float32, torch.float32, SPREAD, (value,))  # type: ignore[arg-type]


def store_once_a_block(
    x: ir.TensorBox,  # (R, C)
    value: Any,  # of an index of x
    block: tuple[int, int],  # rows and columns that share a value
    layout: ir.Layout,  # of (R / rows, C / columns)
) -> ir.TensorBox:
    high, wide = block

    def place(index: Any) -> list[Any]:
        return [FloorDiv(index[0], high), FloorDiv(index[1], wide)]

    return scattered(layout, layout.dtype, x.get_size(), value, place, MODE)


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """What a kernel cuts into tiles: one tensor, of which it makes a copy or both."""

    rows: Any
    columns: Any
    in_rows: bool = False  # blocks of one row, and of no column: a kernel that holds whole rows may make them
    # A column copy, of blocks of one row, that the backward makes of what the forward computed: whoever reads the same
    # there computes much, and together they would be one tile a multiprocessor.
    alone: bool = False

    def made_into(self, box: ir.TensorBox) -> None:
        setattr(box.data.data, _MATRIX, self)  # type: ignore[attr-defined]

    def lies_in(self, nodes: Iterable[Any]) -> bool:
        """Whether all these scheduler nodes go through its rows, reduce them, or compute something for each, and a
        program can hold one."""
        if not (self.in_rows and sympy.sympify(self.columns).is_number and may_be_held(int(self.columns))):
            return False
        known, whole = V.graph.sizevars.statically_known_equals, self.rows * self.columns
        for node in nodes:
            loops, inner = (sympy_product(sizes) for sizes in node.get_ranges())
            if node.is_reduction():
                fits = known(loops, self.rows) and known(inner, self.columns) and _is_contiguous(node)
            else:
                fits = known(inner, 1) and (known(loops, self.rows) or known(loops, whole))
            if not fits:
                return False
        return True

    def cuts(self, nodes: Iterable[Any]) -> tuple[Any, Any] | None:
        """Its sizes in an order in which the loops of all these scheduler nodes split there."""
        ranges = [node.get_ranges() for node in nodes]
        if any(sympy_product(loops) != self.rows * self.columns or inner for loops, inner in ranges):
            return None
        orders = (self.rows, self.columns), (self.columns, self.rows)
        fitting = (sizes for sizes in orders if all(SIMDKernel.is_compatible((*sizes, sympy.S.One), r) for r in ranges))
        return next(fitting, None)


def matrices(nodes: Iterable[Any]) -> set[BlockMatrix]:
    """What the kernel of these scheduler nodes cuts."""
    parts = [part.node for node in nodes for part in node.get_nodes()]
    return {getattr(part, _MATRIX) for part in parts if is_tiled(part)}


def _is_contiguous(node: Any) -> bool:
    """Whether what it reads and writes lies in memory in the order of its loops, some of which Inductor has yet to
    merge."""
    deps = [*node.read_writes.reads, *node.read_writes.writes]
    return all(isinstance(dep, MemoryDep) and dep.normalize().is_contiguous() for dep in deps)


def is_tiled(buffer: Any) -> bool:
    return hasattr(buffer, _MATRIX)


def may_share_a_kernel(node1: Any, node2: Any) -> bool:
    """Answers as far as tiles are concerned: those of one tensor take the registers of a multiprocessor, and what joins
    them has its loops."""
    nodes = [*node1.get_nodes(), *node2.get_nodes()]
    found = matrices(nodes)
    if any(matrix.alone and not all(is_tiled(node.node) for node in nodes) for matrix in found):
        return False
    held = any(node.is_reduction() for node in nodes)  # Note [Rows that hold blocks]
    return len(found) < 2 and all(matrix.lies_in(nodes) if held else matrix.cuts(nodes) for matrix in found)


class BlockKernel(SumsKernel):
    """Inductor's Triton kernel with tiles that are blocks: Note [Tiles that are blocks]."""

    def __init__(self, tiling: dict[str, sympy.Expr], *args: Any, features: Any, **kwargs: Any) -> None:
        nodes = list(features.scheduler_nodes())
        for matrix in () if features.is_reduction() else matrices(nodes):
            sizes = matrix.cuts(nodes)
            assert sizes is not None, [node.get_ranges() for node in nodes]
            tiling = SIMDScheduling.create_tiling(sizes, [sympy.S.One])
        super().__init__(tiling, *args, features=features, **kwargs)

    def reduction(self, dtype: Any, src_dtype: Any, reduction_type: Any, value: Any) -> Any:
        if reduction_type not in (MAX, SPREAD):
            return super().reduction(dtype, src_dtype, reduction_type, value)
        found, *along = value
        if self.inside_reduction:
            return self._reduce_in_rows(dtype, reduction_type, found)
        if reduction_type == SPREAD:
            return found
        text, shape = f"tl.broadcast_to({found}, {self.dense_size_str()})", self.dense_size_list()
        axes = {axis for position in along for axis, size in enumerate(position.shape) if str(size) != "1"}
        assert all(self.fixed_config[self.dense_size_list()[axis]] == TILE for axis in axes)  # type: ignore[index]
        for axis in sorted(axes, reverse=True):  # along x first, where neighbours are of one thread
            text, shape[axis] = f"tl.max({text}, {axis}, keep_dims=True)", "1"
        return self.cse.generate(self.compute, text, dtype=dtype, shape=tuple(shape))

    def _reduce_in_rows(self, dtype: Any, reduction_type: str, found: Any) -> Any:
        """Note [Rows that hold blocks]"""
        assert self.persistent_reduction, "a turn of a loop may hold a part of a block"
        x, row = self.dense_size_list()
        blocks, groups = f"{row} // {TILE}", f"{x}, {row} // {TILE}, {TILE}"
        if reduction_type == MAX:
            text, shape = f"tl.max(tl.reshape(tl.broadcast_to({found}, [{x}, {row}]), [{groups}]), 2)", (x, blocks)
        else:
            whole = f"tl.broadcast_to({found}, [{x}, {blocks}])"
            text, shape = f"tl.reshape(tl.broadcast_to({whole}[:, :, None], [{groups}]), [{x}, {row}])", (x, row)
        return self.cse.generate(self.compute, text, dtype=dtype, shape=shape)

    def _store_in_rows(self, name: str, index: sympy.Expr, value: Any) -> None:
        [(division, columns)] = [(each, each.args[0]) for each in index.atoms(FloorDiv) if each.args[1] == TILE]
        assert self._is_whole(columns), index
        x, row = self.dense_size_list()
        blocks = f"tl.arange(0, {row} // {TILE})[None, :]"
        block = self.cse.generate(self.compute, blocks, dtype=torch.int32, shape=("1", f"{row} // {TILE}"))
        index = index.xreplace({division: sympy.Symbol(str(block), integer=True, nonnegative=True)})
        prefix = self.range_tree_nodes[columns].root.prefix
        masks = {f"{prefix}mask": f"({block} < {prefix}numel // {TILE})"}
        mask = " & ".join(masks.get(mask, mask) for mask in self.tile_masks()) or "None"
        value = f"tl.broadcast_to({value}, [{x}, {row} // {TILE}])"
        place = f"{self.args.output(name)} + ({self.kexpr(self.rename_indexing(index))})"
        self.stores.writeline(DeferredLine(name, f"tl.store({place}, {value}, {mask})"))

    def store(self, name: str, index: sympy.Expr, value: Any, mode: Any = None) -> None:
        if mode != MODE:
            super().store(name, index, value, mode)
            return
        index = self.prepare_indexing(index)
        if self.inside_reduction:
            self._store_in_rows(name, index, value)
            return
        masks = self.tile_masks()
        for division in index.atoms(FloorDiv):
            position, size = division.args
            if size == TILE and self._is_whole(position):
                prefix = self.range_tree_nodes[position].root.prefix
                index = index.xreplace({position: sympy.Symbol(f"{prefix}offset", integer=True, nonnegative=True)})
                if f"{prefix}mask" in masks:  # blocks are whole, but a grid of two axes for y has programs behind them
                    masks.discard(f"{prefix}mask")
                    masks.add(f"({prefix}offset < {prefix}numel)")
        # Added to zeros, as what does not depend on a position is no block, and the value is one; a mask is no larger
        # than what it hides, also of a matrix of one row, whose position is no part of the index.
        sizes = [size if f"{size[0].lower()}mask" in masks else "1" for size in self.dense_size_list()]
        place = f"{self.kexpr(self.rename_indexing(index))} + tl.zeros([{', '.join(sizes)}], tl.int32)"
        line = f"tl.store({self.args.output(name)} + ({place}), {value}, {' & '.join(masks) or None})"
        self.stores.writeline(DeferredLine(name, line))

    def _is_whole(self, position: sympy.Expr) -> bool:
        """Whether it is a dimension's, and not a part of it where loops were split: then all of a block store its
        scale."""
        node = self.range_tree_nodes.get(position)
        return node is not None and node.divisor == 1 and bool(node.length == node.root.numel)
