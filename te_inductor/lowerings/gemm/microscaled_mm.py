"""The GEMM of MXFP8 and NVFP4 operands where tensor cores apply their scales: cuBLASLt on Blackwell, or what
max-autotune finds to be fastest of it and CUTLASS's kernels.

# Note [Swizzled scales]
The tensor cores read the scales of 128 rows and 4 blocks from 512 bytes in a row. With C blocks a row, padded to a
multiple of 4, and rows padded to one of 128, the scale of row r and block c lies at ``((r / 128) * (C / 4) + c / 4) *
512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4``. Padding multiplies zeros. Source: cuBLAS documentation, "1D Block
Scaling Factors Layout"."""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops as prims
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from te_inductor.lowerings.casts import pointwise
from te_inductor.lowerings.casts.blocks import spread_loader
from te_inductor.lowerings.gemm import cutlass_choices
from te_inductor.numerics.scaled_products import ScaledProduct
from te_inductor.recipes.formats import Scope, padded

aten = torch.ops.aten
ROWS, BLOCKS = 128, 4  # of one tile of scales
_TILE, _QUARTER = ROWS * BLOCKS, ROWS // 4


def library(product: ScaledProduct) -> ir.TensorBox:
    """The product without the factors of tensors."""
    a, a_scale, b, b_scale, gemm, out_dtype, _ = product
    columns = b.get_size()[0]
    missing = padded(columns, floordiv=FloorDiv) - columns
    if missing != 0:  # cuBLASLt wants N % 16 == 0; the pad fuses with the cast that makes b
        b = lowerings[aten.constant_pad_nd](b, [0, 0, 0, missing], 0)
    operands = []
    for x, scale, element, scope, rows in zip(
        (a, b), (a_scale, b_scale), gemm.formats, gemm.granularities, (a.get_size()[0], columns), strict=True
    ):
        wide = x.get_size()[1] * element.packed
        operands += [_viewed(x, element.library)]
        operands += [_viewed(swizzled(scale, scope, [rows, wide], x.get_size()[0]), scope.scale.library)]
    a, a_scale, b, b_scale = operands
    y = lowerings[aten._scaled_mm.default](
        a, lowerings[aten.permute](b, [1, 0]), a_scale, b_scale, None, out_dtype=out_dtype, use_fast_accum=False
    )
    return y if missing == 0 else lowerings[aten.slice](y, 1, 0, columns)


def measured(product: ScaledProduct, bias: ir.TensorBox | None) -> ir.TensorBox | None:  # (M, N)
    """What max-autotune finds to be fastest; None where nothing is measured, and `library` multiplies."""
    a, a_scale, b, b_scale, gemm, out_dtype, alpha = product
    scopes = gemm.granularities
    problem = cutlass_choices.microscaled(a, b, bias, gemm, out_dtype)
    if problem is None:
        return None
    scales = [
        swizzled(scale, scope, [x.get_size()[0], x.get_size()[1] * gemm.packed], x.get_size()[0])
        for x, scale, scope in zip((a, b), (a_scale, b_scale), scopes, strict=True)
    ]
    return cutlass_choices.fastest(problem, [a, b, *scales, *(x for x in (alpha, bias) if x is not None)])


def swizzled(
    scale: ir.TensorBox,  # as the scope stores it
    scope: Scope,
    sizes: Sequence[Any],  # rows that have scales, columns
    whole: Any,  # rows with those that were padded to
) -> ir.TensorBox:  # (bytes,), in the order of Note [Swizzled scales]
    rows, wide = sizes[0], scope.block[1]
    blocks = scope.blocks(*sizes, floordiv=FloorDiv)[1]
    tiles, across = FloorDiv(whole + ROWS - 1, ROWS), FloorDiv(blocks + BLOCKS - 1, BLOCKS)
    load = spread_loader(scale, scope, sizes)

    def inner(index):
        [place] = index
        tile = FloorDiv(place, _TILE)
        row = FloorDiv(tile, across) * ROWS + ModularIndexing(place, BLOCKS, 4) * _QUARTER
        row = row + ModularIndexing(place, BLOCKS * 4, _QUARTER)
        block = ModularIndexing(tile, 1, across) * BLOCKS + ModularIndexing(place, 1, BLOCKS)
        inside = [
            prims.lt(prims.index_expr(at, torch.int64), prims.index_expr(end, torch.int64))
            for at, end, holds in ((row, rows, tiles * ROWS), (block, blocks, across * BLOCKS))
            if holds != end
        ]

        def value():
            return load([row, block * wide])

        if not inside:
            return value()
        return prims.masked(inside[0] if len(inside) == 1 else prims.and_(*inside), value, 0)

    box = pointwise(scale, scale.get_dtype(), [tiles * across * _TILE], inner)
    box.realize()
    return box


def _viewed(x: ir.TensorBox, dtype: torch.dtype) -> ir.TensorBox:
    if x.get_dtype() == dtype:
        return x
    x.realize()
    return lowerings[aten.view.dtype](x, dtype)  # type: ignore[no-any-return]
