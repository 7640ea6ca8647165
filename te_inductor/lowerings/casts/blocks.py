"""Quantization with scales of blocks in Inductor IR.

# Note [Loops of block copies]
Inductor fuses an amax with the cast that waits for it where the cast's loops are the amax's: those over scales outside,
those over a block inside. So a copy with blocks of one row loops over (row, block, 128) where x has its layout, and
over (block, row, 128) where x is its transpose: then the second loop, the copy's row, is x's contiguous dimension.
Either way one kernel reads x once, contiguously, and writes data and scales. Inductor by itself would order the loops
of a transposed cast by the majority of its reads, and would rather fuse the two casts, which read the same x, each away
from its amax: so the loops are pinned, and `loops_of` tells `choices.Choices` what to keep apart. Square blocks are too
large for all that: their amax is a kernel, and the casts of both copies are another, two-dimensional one, as with one
scale for the tensor.

All that is for one copy alone with blocks of one row, and for sizes that are no multiples of 128. Otherwise, both
copies of whole blocks, or one of whole square blocks, are one kernel: Note [Tiles that are blocks]. A norm's row copy
alone is in the norm's: Note [Rows that hold blocks]."""

# mypy: disable-error-code="no-untyped-def"

import functools
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as prims
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from te_inductor import compat
from te_inductor.lowerings.casts import microscaling, pointwise, store, values
from te_inductor.lowerings.casts.algebra import INDUCTOR
from te_inductor.lowerings.casts.concatenation import Concatenation
from te_inductor.lowerings.codegen import block_tiles
from te_inductor.numerics import arithmetic
from te_inductor.passes.graph.node_kinds import is_view, is_view_or_cast, tensor_of
from te_inductor.passes.graph.walks import back_past, reached
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import E8M0, HADAMARD, Element, Scope

aten = torch.ops.aten
_SUMS_OF_ROWS = (aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction)
_LOOPS = "te_loops"  # attribute of a buffer with blocks of one row


def quantize(
    x: ir.TensorBox, quantizer: Quantizer, amax: ir.TensorBox | None = None, seed: ir.TensorBox | None = None
) -> tuple[ir.TensorBox, ...]:
    """`amax` is the tensor's, () fp32, of two-level scales; `seed`, () int64, of stochastic rounding."""
    row_alone = (True, False)
    tiled = seed is None and block_tiles.fits(x, quantizer, row_alone)
    if tiled and (quantizer.granularity.transposes or block_tiles.comes_in_rows(x) or _is_read_by_norm(x)):
        return _tiled_copies([x], 0, quantizer, row_alone)[:2]  # type: ignore[return-value]
    if quantizer.granularity.transposes:
        scale, scale_inv, _ = _scales_of_squares(x, quantizer, amax)
        return _cast_by_squares(x, scale, quantizer), scale_inv
    if seed is not None:
        seed.realize()  # and not drawn again by every thread
    return _copy_by_rows(x, quantizer, amax, seed, x_is_transposed=_rows_are_contiguous(x))


def _is_read_by_norm(x: ir.TensorBox) -> bool:
    """Whether a sum of each row, as a norm's, reads what is cast, and a program of it may hold rows: the cast joins it,
    and does not read the tensor once more."""
    columns, cast = x.get_size()[1], V.graph.current_node.args[0]
    held = sympy.sympify(columns).is_number and block_tiles.may_be_held(int(columns))
    if not (held and isinstance(cast, torch.fx.Node)):
        return False

    def leads_on(node):
        return [user for user in node.users if is_view_or_cast(user) or user.target is aten.pow.Tensor_Scalar]

    read = reached([back_past(cast, is_view)], leads_on)
    rows = [one for one in read if (value := tensor_of(one)) is not None and value.shape[-1] == columns]
    sums = ((user.args[1], one) for one in rows for user in one.users if user.target in _SUMS_OF_ROWS)
    return any(dims in ([-1], [tensor_of(one).dim() - 1]) for dims, one in sums)  # type: ignore[union-attr]


def quantize_rowcol(
    x: ir.TensorBox,
    quantizer: Quantizer,
    amax: ir.TensorBox | None,
    wanted: Sequence[bool],  # whether somebody reads the row copy, the column copy
) -> tuple[ir.TensorBox, ...]:
    if block_tiles.fits(x, quantizer, wanted):
        return _tiled_copies([x], 0, quantizer, wanted)  # type: ignore[return-value]
    if quantizer.candidates and quantizer.granularity.transposes:  # the transpose's errors are other sums
        return *quantize(x, quantizer, amax), *quantize(_transposed(x), quantizer, amax)
    if quantizer.granularity.transposes:
        scale, scale_inv, scale_inv_t = _scales_of_squares(x, quantizer, amax)
        data = _cast_by_squares(x, scale, quantizer)
        return data, scale_inv, _cast_by_squares(_transposed(x), _transposed(scale), quantizer), scale_inv_t
    rowwise = _copy_by_rows(x, quantizer, amax, x_is_transposed=False)
    return *rowwise, *_copy_by_rows(_transposed(x), quantizer, amax, x_is_transposed=True)


def quantize_pieces(
    pieces: Sequence[ir.TensorBox],
    dim: int,
    quantizer: Quantizer,
    wanted: Sequence[bool],  # whether somebody reads the row copy, the column copy
) -> tuple[ir.TensorBox | None, ...]:
    """Both copies of pieces side by side along `dim`, each piece's of whole blocks."""
    if not all(block_tiles.fits(piece, quantizer, (True, True)) for piece in pieces):
        return quantize_rowcol(compat.concatenated(pieces, dim), quantizer, None, wanted)
    return _tiled_copies(pieces, dim, quantizer, wanted)


def dequantize(
    data: ir.TensorBox,  # (R, C), as stored
    scale_inv: ir.TensorBox,  # as the scope stores it
    element: Element,
    scope: Scope,
    dtype: torch.dtype,
) -> ir.TensorBox:  # (R, C)
    """What a copy stands for; of two-level scales in units of the tensor's factor."""
    (rows, columns), packed = data.get_size(), element.packed
    load, load_scale = data.make_loader(), spread_loader(scale_inv, scope, [rows, columns * packed])

    def inner(index):
        row, column = index
        if element.coded:
            place = ModularIndexing(column, 1, packed)
            value = microscaling.unpack(load([row, FloorDiv(column, packed)]), place, element)
        else:
            value = prims.to_dtype(load(index), torch.float32)
        return prims.to_dtype(prims.mul(value, _scale_value(load_scale(index), scope)), dtype)

    return pointwise(data, dtype, [rows, columns * packed], inner)


def loops_of(node: Any) -> set[str]:
    """Returns which loops of Note [Loops of block copies] a scheduler node has, none of them if it makes no such
    copy."""
    return {loops for part in node.get_nodes() if (loops := getattr(part.node, _LOOPS, None)) is not None}


def hadamard(x: ir.TensorBox) -> ir.TensorBox:
    """Each value of the result reads 16 of x, which is written first; their own producer would run 16 times."""
    x.realize()
    rows, columns = x.get_size()
    whole = FloorDiv(columns + HADAMARD - 1, HADAMARD) * HADAMARD
    load = _zero_beyond(x, rows, whole)

    def inner(index):
        row, column = index
        first = FloorDiv(column, HADAMARD) * HADAMARD
        sixteen = [load([row, first + place]) for place in range(HADAMARD)]
        return microscaling.hadamard(sixteen, ModularIndexing(column, 1, HADAMARD))

    box = pointwise(x, torch.bfloat16, [rows, whole], inner)
    store(box, (1, 0))
    return box


def scale_matrix(
    scale: ir.TensorBox,  # as a scope of blocks stores it
    scope: Scope,
    sizes: Sequence[Any],  # R, C
) -> ir.TensorBox:  # of Scope.scale_matrix's sizes
    return lowerings[aten.view](scale, list(scope.scale_matrix(*sizes, floordiv=FloorDiv)))  # type: ignore[no-any-return]


def spread_loader(scale: ir.TensorBox, scope: Scope, sizes: Sequence[Any]):
    """A loader of the scale of each element of (R, C), from scales as the scope stores them."""
    load, (high, wide) = scale_matrix(scale, scope, sizes).make_loader(), scope.block

    def inner(index):
        row, column = FloorDiv(index[0], high), FloorDiv(index[1], wide)
        return load([column, row] if scope.row_last else [row, column])

    return inner


def spread_rows(
    scale: ir.TensorBox,  # as the scope stores it
    scope: Scope,
    sizes: Sequence[Any],  # R, C
) -> ir.TensorBox:  # (C/128, R): the same scales, as those of blocks of one row
    matrix = scale_matrix(scale, scope, sizes)
    if scope.row_last:
        return matrix
    load, ranges = matrix.make_loader(), [matrix.get_size()[1], sizes[0]]
    return pointwise(scale, torch.float32, ranges, lambda index: load([FloorDiv(index[1], scope.block[0]), index[0]]))


def _tiled_copies(
    pieces: Sequence[ir.TensorBox], dim: int, quantizer: Quantizer, wanted: Sequence[bool]
) -> tuple[ir.TensorBox | None, ...]:
    """Both copies of pieces side by side along `dim`: Note [Tiles that are blocks]."""
    row, column = wanted
    in_rows = quantizer.granularity.one_row and row and not column
    sizes = [piece.get_size() for piece in pieces]
    alone = quantizer.granularity.one_row and column and not row
    matrices = [block_tiles.BlockMatrix(rows, columns, in_rows, alone) for rows, columns in sizes]
    made: list[ir.TensorBox | None] = []
    for transposed, wants in zip((False, True), wanted, strict=True):
        made += _tiled_copy(pieces, dim, quantizer, matrices, transposed) if wants else (None, None)
    return tuple(made)


def _tiled_copy(
    pieces: Sequence[ir.TensorBox],
    dim: int,
    quantizer: Quantizer,
    matrices: Sequence[block_tiles.BlockMatrix],
    transposed: bool,
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """data and scale_inv, of the transpose or not. In the order of x's loops either way."""
    scope = quantizer.granularity
    block = scope.block[::-1] if transposed else scope.block
    turned = transposed != scope.row_last
    data = Concatenation(pieces, dim, quantizer.format.dtype, (1, 1), (0, 1) if transposed else (1, 0))
    scale_inv = Concatenation(pieces, dim, torch.float32, block, (0, 1) if turned else (1, 0))
    places = zip(data.places(), scale_inv.places(), strict=True)
    made = [_tiles(x, quantizer, block, *place) for x, place in zip(pieces, places, strict=True)]
    for matrix, boxes in zip(matrices, made, strict=True):
        for box in boxes:
            _keep_loops(box)
            matrix.made_into(box)
    whole, whole_inv = (
        side.filled(boxes) for side, boxes in zip((data, scale_inv), zip(*made, strict=True), strict=True)
    )
    return _transposed(whole) if transposed else whole, _flat(_transposed(whole_inv) if turned else whole_inv)


def _tiles(
    x: ir.TensorBox, quantizer: Quantizer, block: tuple[int, int], data_layout: ir.Layout, scale_layout: ir.Layout
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """What a kernel makes of its tiles: values, and scale_inv once a block."""
    device, dtype, load = x.get_device_or_error(), x.get_dtype(), x.make_loader()
    along = [dim for dim, size in enumerate(block) if size > 1]

    def value(index):
        return prims.to_dtype(load(index), torch.float32)

    def scale(index):
        found = block_tiles.block_amax(values.magnitude(value(index)), [index[dim] for dim in along])
        return arithmetic.encode_scale(INDUCTOR, INDUCTOR.from_bits(found), quantizer, dtype)

    def cast(index):
        return values.cast(value(index), block_tiles.spread(scale(index)), quantizer, device, dtype)

    data = pointwise(x, quantizer.format.dtype, x.get_size(), cast)
    data.realize()
    data.data.data.layout = data_layout  # type: ignore[attr-defined]
    scale_inv = block_tiles.store_once_a_block(
        x, lambda index: arithmetic.decode_scale(INDUCTOR, scale(index), quantizer), block, scale_layout
    )
    return data, scale_inv


def _copy_by_rows(
    x: ir.TensorBox,
    quantizer: Quantizer,
    amax: ir.TensorBox | None,
    seed: ir.TensorBox | None = None,
    *,
    x_is_transposed: bool,
) -> tuple[ir.TensorBox, ...]:
    """data and scale_inv, with blocks of one row, of x as it stands. Which loops: Note [Loops of block copies]. Values
    that share a byte share a turn of the innermost loop, so that the amax of a block and its cast have the same
    loops."""
    rows, columns = x.get_size()
    wide, packed = quantizer.granularity.block[1], quantizer.format.packed
    _, across = quantizer.granularity.blocks(rows, columns, floordiv=FloorDiv)
    load = _zero_beyond(x, rows, across * wide)
    ranges, block = [across, rows] if x_is_transposed else [rows, across], [wide // packed]

    def element(outer, inner):
        row, block = reversed(outer) if x_is_transposed else outer
        return load([row, block * wide + inner[0]])

    def elements(outer, inner):
        return [element(outer, [inner[0] * packed + place]) for place in range(packed)]

    order = (1, 0) if x_is_transposed == quantizer.granularity.row_last else (0, 1)
    load_amax: Any = amax and amax.make_loader()

    def first_amax(outer):
        row = outer[1 if x_is_transposed else 0]
        return load_amax([row, sympy.Integer(0)] if quantizer.rows_have_factors else [])

    scale, scale_inv = _scales(x, element, elements, ranges, block, quantizer, order, first_amax)
    load_scale, load_seed = scale.make_loader(), None if seed is None else seed.make_loader()

    def cast(index):
        row, block_of_row = reversed(index[:2]) if x_is_transposed else index[:2]
        place = (row * across + block_of_row) * wide + index[2] * packed
        bits = [load_seed and microscaling.random_bits(load_seed([]), place + each) for each in range(packed)]
        return _stored(elements(index[:2], index[2:]), load_scale(index[:2]), quantizer, x, bits)

    data = pointwise(x, quantizer.format.dtype, [*ranges, *block], cast)
    store(data, (1, 2, 0) if x_is_transposed else (2, 1, 0))
    for box in (scale, scale_inv, data):
        _pin(box, "transposed" if x_is_transposed else "plain")
    if x_is_transposed:
        data = lowerings[aten.permute](data, [1, 0, 2])
    if x_is_transposed != quantizer.granularity.row_last:
        scale_inv = _transposed(scale_inv)
    return lowerings[aten.view](data, [rows, across * block[0]]), _flat(scale_inv)


def _stored(elements, scale, quantizer: Quantizer, x: ir.TensorBox, bits=(None, None)):
    """What is stored of neighbours in x that share a byte; mostly of one value. `bits` are random, or None."""
    element = quantizer.format
    if element.coded:
        pairs = zip(elements, bits, strict=False)
        codes = [arithmetic.encode_value(INDUCTOR, value * scale, element, random) for value, random in pairs]
        return arithmetic.pack(INDUCTOR, *codes) if element.packed == 2 else INDUCTOR.convert(codes[0], torch.uint8)
    [value] = elements
    return values.cast(value, scale, quantizer, x.get_device_or_error(), x.get_dtype())


def _scale_value(scale, scope: Scope):
    """The fp32 value of a stored scale."""
    return arithmetic.e8m0_value(INDUCTOR, scale) if scope.scale is E8M0 else prims.to_dtype(scale, torch.float32)


def _pin(box: ir.TensorBox, loops: str) -> None:
    _keep_loops(box)
    setattr(box.data.data, _LOOPS, loops)  # type: ignore[attr-defined]


def _keep_loops(box: ir.TensorBox) -> None:
    """Keeps loops as they are written. A torch without that method orders them itself, which is slower."""

    def as_written(index_vars, support_vars, sizes, *_):
        return list(sizes), list, list

    buffer = box.data.data  # type: ignore[attr-defined]
    compat.patch("torch._inductor.ir.ComputedBuffer._apply_loop_reordering", as_written, on=buffer)


def _scales_of_squares(
    x: ir.TensorBox, quantizer: Quantizer, amax: ir.TensorBox | None
) -> tuple[ir.TensorBox, ir.TensorBox, ir.TensorBox]:
    """What values are multiplied with, scale_inv, and scale_inv of the transpose."""
    high, wide = quantizer.granularity.block
    down, across = quantizer.granularity.blocks(*x.get_size(), floordiv=FloorDiv)
    load = _zero_beyond(x, down * high, across * wide)

    def element(outer, inner):
        return load([outer[0] * high + inner[0], outer[1] * wide + inner[1]])

    def elements(outer, inner):
        return [element(outer, inner)]

    load_amax: Any = amax and amax.make_loader()

    def first_amax(outer):
        return load_amax([])

    scale, scale_inv = _scales(x, element, elements, [down, across], [high, wide], quantizer, (1, 0), first_amax)
    load_inv = scale_inv.make_loader()
    scale_inv_t = pointwise(x, quantizer.granularity.scale.dtype, [down, across], load_inv)
    store(scale_inv_t, (0, 1))
    return scale, _flat(scale_inv), _flat(_transposed(scale_inv_t))


def _cast_by_squares(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    rows, columns = x.get_size()
    (high, wide), packed = quantizer.granularity.block, quantizer.format.packed
    whole = quantizer.granularity.blocks(rows, columns, floordiv=FloorDiv)[1] * wide
    load, load_scale = _zero_beyond(x, rows, whole), scale.make_loader()

    def cast(index):
        row, column = index[0], index[1] * packed
        elements = [load([row, column + place]) for place in range(packed)]
        scale = load_scale([FloorDiv(row, high), FloorDiv(column, wide)])
        return _stored(elements, scale, quantizer, x)

    data = pointwise(x, quantizer.format.dtype, [rows, FloorDiv(whole, packed)], cast)
    store(data, (1, 0))
    return data


def _scales(
    x, element, elements, ranges, block, quantizer: Quantizer, order: Sequence[int], first_amax
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """What values are multiplied with, and scale_inv, of size `ranges`, of all ``elements(index, index in the
    block)``; `first_amax(index)` is that of the first of two levels."""
    bits = ir.Reduction.create(
        device=x.get_device(),
        dst_dtype=torch.int32,
        src_dtype=torch.int32,
        inner_fn=lambda outer, inner: values.largest([values.magnitude(v) for v in elements(outer, inner)]),
        ranges=ranges,
        reduction_ranges=block,
        reduction_type="max",
    )
    bits.realize()
    load, dtype, scope = bits.make_loader(), x.get_dtype(), quantizer.granularity

    if quantizer.candidates:
        return _chosen_scales(x, element, ranges, quantizer, order, load, first_amax)

    def scales(index):
        found = INDUCTOR.from_bits(load(index))
        if scope.microscaled:
            return arithmetic.encode(INDUCTOR, found, quantizer, first_amax(index) if scope.two_level else None)
        scale = arithmetic.encode_scale(INDUCTOR, found, quantizer, dtype)
        return scale, arithmetic.decode_scale(INDUCTOR, scale, quantizer)

    made = [
        pointwise(x, dtype, ranges, lambda index, which=which: scales(index)[which])
        for which, dtype in enumerate((torch.float32, scope.scale.dtype))
    ]
    for box in made:  # in the reduction's epilogue, and not again by every thread of the cast
        store(box, order)
    return made[0], made[1]


def _chosen_scales(
    x, element, ranges, quantizer: Quantizer, order: Sequence[int], load_amax, first_amax
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Returns what `_scales` does, of all ``element(index, index in the block)``. Sums have an order, so that they are
    written out, and each term is stored: a reduction has an order of its own, and what would be computed for 16 terms
    at once takes Inductor's C++ 20 seconds instead of 3 (2026-11-25)."""
    high, wide = quantizer.granularity.block

    def pairs(index):
        return arithmetic.candidates(INDUCTOR, INDUCTOR.from_bits(load_amax(index)), quantizer, first_amax(index))

    def error(index, which):
        outer, inner = index[: len(ranges)], index[len(ranges) :]
        pair = pairs(outer)[which]
        return arithmetic.error(INDUCTOR, element(outer, inner), pair, quantizer, first_amax(outer))

    def stored(ranges, inner):
        box = pointwise(x, torch.float32, ranges, inner)
        box.realize()
        return box.make_loader()

    errors = []
    for which in range(len(quantizer.candidates)):
        terms = stored([*ranges, *([high] if high > 1 else []), wide], functools.partial(error, which=which))
        of_row = _sum(arithmetic.in_order, terms, wide)
        errors.append(_sum(arithmetic.in_halves, stored([*ranges, high], of_row), high) if high > 1 else of_row)

    def least(index):
        scales = [scale_inv for _, scale_inv in pairs(index)]
        return arithmetic.least(INDUCTOR, scales, [error(index) for error in errors])

    scale_inv = pointwise(x, quantizer.granularity.scale.dtype, ranges, least)
    store(scale_inv, order)
    load = scale_inv.make_loader()
    factor = pointwise(
        x,
        torch.float32,
        ranges,
        lambda index: arithmetic.factor_of(INDUCTOR, load(index), quantizer, first_amax(index)),
    )
    store(factor, order)
    return factor, scale_inv


def _sum(added, load, count: int):
    """The sum of what is loaded along a last dimension."""
    return lambda index: added(load([*index, sympy.Integer(place)]) for place in range(count))


def _zero_beyond(x: ir.TensorBox, rows: Any, columns: Any):
    """A loader of x in fp32, which is zero from the edge of x to (rows, columns)."""
    load, sizes = x.make_loader(), x.get_size()
    cut = [dim for dim, whole in enumerate((rows, columns)) if sizes[dim] != whole]

    def inner(index):
        def value():
            return prims.to_dtype(load(index), torch.float32)

        inside = None
        for dim in cut:
            below = prims.lt(prims.index_expr(index[dim], torch.int64), prims.index_expr(sizes[dim], torch.int64))
            inside = below if inside is None else prims.and_(inside, below)
        return value() if inside is None else prims.masked(inside, value, 0.0)

    return inner


def _rows_are_contiguous(x: ir.TensorBox) -> bool:
    """Whether neighbours along the first dimension are neighbours in memory; a view that transposes is taken for
    one."""
    stride = x.maybe_get_stride()
    return isinstance(x.data, ir.PermuteView) if stride is None else stride[0] == 1 and stride[1] != 1


def _transposed(x: ir.TensorBox) -> ir.TensorBox:
    return lowerings[aten.permute](x, [1, 0])  # type: ignore[no-any-return]


def _flat(matrix: ir.TensorBox) -> ir.TensorBox:
    """Contiguous in memory, in one dimension."""
    return lowerings[aten.view](matrix, [sympy_product(matrix.get_size())])  # type: ignore[no-any-return]
