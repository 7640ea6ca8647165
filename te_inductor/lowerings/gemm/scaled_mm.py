"""The low-precision GEMM: cuBLASLt or Inductor's Triton choices on CUDA, an exact fp32 GEMM on CPU."""

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from te_inductor import ops
from te_inductor.kernels import emulated, exact, fixed_order, fp8_small_m, uncast
from te_inductor.kernels.select import select
from te_inductor.lowerings.casts import blocks
from te_inductor.lowerings.casts.narrowing import narrowed
from te_inductor.lowerings.gemm import cutlass_choices, microscaled_mm
from te_inductor.lowerings.gemm import fixed_order as in_fixed_order
from te_inductor.lowerings.gemm.partial_sums import added_up
from te_inductor.lowerings.registry import lowering
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import ALIGNMENT, padded
from te_inductor.runtime.eager.dense import BLOCK_SCALES, ROW_SCALED_OUTPUT

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type


@lowering(ops.scaled_mm)
def scaled_mm(
    a: ir.TensorBox,  # (M, K)
    a_scale: ir.TensorBox,  # (), (M, 1), or of the shape that gemm.scopes[0] stores
    b: ir.TensorBox,  # (N, K)
    b_scale: ir.TensorBox,  # (), (N, 1), or of the shape that gemm.scopes[1] stores
    bias: ir.TensorBox | None,
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: ir.TensorBox | None = None,  # (), (M, 1) or (1, N)
    added: ir.TensorBox | None = None,  # (M, N), of out_dtype
) -> ir.TensorBox:
    if added is not None:
        y = _adding(a, a_scale, b, b_scale, bias, added, gemm)
        return y or lowerings[aten.add](scaled_mm(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha), added)  # type: ignore[no-any-return]
    choice = select(cutlass_choices.problem_of(a, b, bias, gemm, out_dtype))
    if choice.family is fixed_order.FAMILY:
        return _add(in_fixed_order.scaled(a, a_scale, b, b_scale, gemm, out_dtype, alpha), bias, out_dtype)  # type: ignore[no-any-return]
    if choice.family is uncast.FAMILY:
        return _add(_high(a, b, out_dtype), bias, out_dtype)  # type: ignore[no-any-return]
    if choice.family is emulated.FAMILY:
        return _emulated(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha)  # type: ignore[no-any-return]
    if choice.family is exact.FAMILY:
        return (_exact_blocks if gemm.blocked else _exact)(a, a_scale, b, b_scale, bias, gemm, out_dtype)
    if choice.family is fp8_small_m.FAMILY:
        return _add(_small_m(a, a_scale, b, b_scale, choice.config, out_dtype), bias, out_dtype)  # type: ignore[no-any-return]
    if gemm.microscaled:
        return _native(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha)  # type: ignore[no-any-return]
    return (_cuda_blocks if gemm.blocked else _cuda)(a, a_scale, b, b_scale, bias, gemm, out_dtype)


def _exact(a, a_scale, b, b_scale, bias, gemm, out_dtype):  # type: ignore[no-untyped-def]
    """An fp8 value is exact in fp32, so this is the low-precision product up to the order of the fp32 sum."""
    y = lowerings[aten.mm](lowerings[convert](a, torch.float32), _transposed(lowerings[convert](b, torch.float32)))
    return _add(_scaled(y, a_scale, b_scale, out_dtype), bias, out_dtype)  # type: ignore[no-any-return]


def _high(a, b, out_dtype):  # type: ignore[no-untyped-def]
    """Mirrors `eager.high_product`."""
    if a.get_dtype() == out_dtype:
        return lowerings[aten.mm](a, _transposed(b))
    if a.get_device_or_error().type == "cuda" and out_dtype == torch.float32:
        return lowerings[aten.mm.dtype](a, _transposed(b), out_dtype)
    a, b = (lowerings[convert](x, torch.float32) for x in (a, b))
    return narrowed(lowerings[aten.mm](a, _transposed(b)), out_dtype)


def _transposed(x):  # type: ignore[no-untyped-def]
    """The transpose of a matrix; a scalar as it is."""
    return lowerings[aten.permute](x, list(reversed(range(len(x.get_size())))))


def _scaled(y, a_scale, b_scale, out_dtype):  # type: ignore[no-untyped-def]
    scales = lowerings[aten.mul](a_scale, _transposed(b_scale))
    return narrowed(lowerings[aten.mul](y, scales), out_dtype)


def _add(y, bias, out_dtype):  # type: ignore[no-untyped-def]
    return y if bias is None else narrowed(lowerings[aten.add](y, lowerings[convert](bias, out_dtype)), out_dtype)


def _small_m(a, a_scale, b, b_scale, cut, out_dtype):  # type: ignore[no-untyped-def]
    from te_inductor.templates.triton.fp8_small_m import fp8_partial_sums

    given = (a, a_scale, b, b_scale, cut, out_dtype)
    # A narrow layer of more rows does not change how the other kernels of a training graph start.
    early = V.graph.is_inference or V.graph.sizevars.statically_known_leq(a.get_size()[0], fp8_small_m.FEW)
    return added_up(fp8_partial_sums, *given, splits=cut.splits, out_dtype=out_dtype, early=early)


def _cuda(a, a_scale, b, b_scale, bias, gemm, out_dtype):  # type: ignore[no-untyped-def]
    if a_scale.get_size() and out_dtype != ROW_SCALED_OUTPUT:
        one = lowerings[aten.full]([], 1.0, dtype=torch.float32, device=a.get_device())
        y = _cuda(a, one, b, one, None, gemm, torch.float32)
        return _add(_scaled(y, a_scale, b_scale, out_dtype), bias, out_dtype)
    rows = b.get_size()[0]
    missing = padded(rows, floordiv=FloorDiv) - rows
    if missing != 0:  # cuBLASLt wants N % 16 == 0; the pad fuses with the cast that makes b
        b, b_scale = (
            lowerings[aten.constant_pad_nd](x, [0, 0, 0, missing], 0.0) if x.get_size() else x for x in (b, b_scale)
        )
    return _library(a, a_scale, b, _transposed(b_scale), bias, gemm, out_dtype, rows)


def _library(a, a_scale, b, b_scale, bias, gemm, out_dtype, columns):  # type: ignore[no-untyped-def]
    """Inductor's lowering of aten._scaled_mm, and the first `columns` columns of its result."""
    whole = b.get_size()[0] == columns
    fused_bias = bias if bias is not None and whole and bias.get_dtype() == out_dtype == torch.bfloat16 else None
    y = lowerings[aten._scaled_mm.default](
        a, _transposed(b), a_scale, b_scale, fused_bias, out_dtype=out_dtype, use_fast_accum=gemm.fast_accum
    )
    if not whole:
        y = lowerings[aten.slice](y, 1, 0, columns)
    return y if fused_bias is not None else _add(y, bias, out_dtype)


def _adding(a, a_scale, b, b_scale, bias, added, gemm):  # type: ignore[no-untyped-def]
    if gemm.blocked and not gemm.microscaled:
        rows, columns = a.get_size()[0], b.get_size()[0]
        (a, a_scale), (b, b_scale) = _block_operands(a, a_scale, b, b_scale, gemm)
        if (a.get_size()[0], b.get_size()[0]) != (rows, columns):  # padded, as `added` is not
            return None
    return cutlass_choices.adding(a, a_scale, b, _transposed(b_scale), bias, added, gemm)


def _exact_blocks(a, a_scale, b, b_scale, bias, gemm, out_dtype):  # type: ignore[no-untyped-def]
    wide_a, wide_b = _values(a, a_scale, b, b_scale, gemm, torch.float32)
    y = lowerings[aten.mm](wide_a, _transposed(wide_b))
    return _add(narrowed(y, out_dtype), bias, out_dtype)


def _values(a, a_scale, b, b_scale, gemm, dtype):  # type: ignore[no-untyped-def]
    operands = zip((a, b), (a_scale, b_scale), gemm.formats, gemm.granularities, strict=True)
    return [blocks.dequantize(*operand, dtype) for operand in operands]


def _emulated(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha):  # type: ignore[no-untyped-def]
    """MXFP8 and NVFP4 without their tensor cores: Note [Emulated GEMMs] in numerics/microscaling.py. Mirrors
    `eager._emulated`."""
    if a.get_device_or_error().type == "cuda":
        wide_a, wide_b = _values(a, a_scale, b, b_scale, gemm, torch.bfloat16)
        y = lowerings[aten.mm.dtype](wide_a, _transposed(wide_b), torch.float32)
    else:
        wide_a, wide_b = _values(a, a_scale, b, b_scale, gemm, torch.float32)
        y = lowerings[aten.mm](wide_a, _transposed(wide_b))
    y = y if alpha is None else lowerings[aten.mul](y, alpha)
    return _add(narrowed(y, out_dtype), bias, out_dtype)


def _native(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha):  # type: ignore[no-untyped-def]
    one_factor = alpha is None or not alpha.get_size()  # as those kernels take it
    measured = microscaled_mm.measured(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha) if one_factor else None
    if measured is not None:
        return measured
    if alpha is None:
        return _add(microscaled_mm.library(a, a_scale, b, b_scale, gemm, out_dtype), bias, out_dtype)
    # The factors of both tensors come after the sum, which is rounded once more where the output is narrow.
    y = lowerings[aten.mul](microscaled_mm.library(a, a_scale, b, b_scale, gemm, out_dtype), alpha)
    return _add(narrowed(y, out_dtype), bias, out_dtype)


def _cuda_blocks(a, a_scale, b, b_scale, bias, gemm, out_dtype):  # type: ignore[no-untyped-def]
    """Mirrors `eager._cuda_blocks`. Never Inductor's Triton template, which max-autotune would try: it reads scales of
    blocks of one row as if those of one row lay beside each other (torch 2.13, triton_main_loop_scaled_mm.py.jinja)."""
    rows, columns = a.get_size()[0], b.get_size()[0]
    a_scope, b_scope = gemm.granularities
    if V.graph.sizevars.statically_known_equals(a.get_size()[1], a_scope.alignment):  # one block: scales of rows
        a_scale = _transposed(blocks.spread_rows(a_scale, a_scope, a.get_size()))
        b_scale = _transposed(blocks.spread_rows(b_scale, b_scope, b.get_size()))
        return _cuda(a, a_scale, b, b_scale, bias, gemm, out_dtype)
    (a, a_scale), (b, b_scale) = _block_operands(a, a_scale, b, b_scale, gemm)
    with config.patch(max_autotune=False, max_autotune_gemm=False):
        y = _library(a, a_scale, b, _transposed(b_scale), bias, gemm, out_dtype, columns)
    return y if a.get_size()[0] == rows else lowerings[aten.slice](y, 0, 0, rows)


def _block_operands(a, a_scale, b, b_scale, gemm):  # type: ignore[no-untyped-def]
    a_scope, b_scope = gemm.granularities
    return _block_operand(a, a_scale, a_scope, BLOCK_SCALES), _block_operand(b, b_scale, b_scope, ALIGNMENT)


def _block_operand(x, scale, scope, alignment):  # type: ignore[no-untyped-def]
    """Mirrors `eager._block_operand`. The pads fuse with the cast, or are not there."""
    sizes, known, missing = x.get_size(), V.graph.sizevars.statically_known_multiple_of, 0
    if not known(sizes[0], alignment):
        missing = padded(sizes[0], alignment, floordiv=FloorDiv) - sizes[0]
    if missing != 0:
        x = lowerings[aten.constant_pad_nd](x, [0, 0, 0, missing], 0.0)
    if not scope.row_last and known(scope.blocks(*sizes, floordiv=FloorDiv)[1], BLOCK_SCALES):
        return x, blocks.scale_matrix(scale, scope, sizes)
    scale = blocks.spread_rows(scale, scope, sizes)
    if missing != 0:
        scale = lowerings[aten.constant_pad_nd](scale, [0, missing], 0.0)
    return x, _transposed(scale)
