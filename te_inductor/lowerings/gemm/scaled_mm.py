"""The low-precision GEMM: cuBLASLt or Inductor's Triton choices on CUDA, an exact fp32 GEMM on CPU."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from te_inductor import ops
from te_inductor.kernels import fp8_small_m
from te_inductor.kernels.select import select
from te_inductor.lowerings.casts import blocks
from te_inductor.lowerings.casts.narrowing import narrowed
from te_inductor.lowerings.gemm import cutlass_choices, microscaled_mm
from te_inductor.lowerings.gemm.partial_sums import added_up, called
from te_inductor.lowerings.registry import lowering
from te_inductor.numerics import scaled_products
from te_inductor.numerics.scaled_products import Matrices, ScaledProduct, transposed, with_bias
from te_inductor.recipes import Gemm

aten = torch.ops.aten


@lowering(ops.fixed_mm)
def fixed_mm(
    a: ir.TensorBox,  # (B, M, K)
    b: ir.TensorBox,  # (B, N, K), or (B, K, N) where it is turned
    a_scale: ir.TensorBox | None,  # as the eager kernel has them
    b_scale: ir.TensorBox | None,
    blocked: bool,
    out_dtype: torch.dtype,
    turned: bool = False,
) -> ir.TensorBox:  # (B, M, N)
    """Calls our kernel on CUDA: Note [One order of sums] in kernels/fixed_order.py. On a CPU it is a sum over the last of
    four dimensions, which generated code makes one element after the other, where it neither has vectors nor threads
    (passes/pre_grad/decide/invariance.py)."""
    if a.get_device_or_error().type == "cuda":
        return called(ops.fixed_mm, a, b, a_scale, b_scale, blocked, out_dtype, turned)  # type: ignore[no-any-return]
    for operand in (a, b):  # once: each element is read N times, or M times
        operand.realize()
    b = lowerings[aten.permute](b, [0, 2, 1]) if turned else b
    wide_a, wide_b = (lowerings[torch.ops.prims.convert_element_type](x, torch.float32) for x in (a, b))
    products = lowerings[aten.mul](lowerings[aten.unsqueeze](wide_a, 2), lowerings[aten.unsqueeze](wide_b, 1))
    y = lowerings[aten.sum](products, [3])
    if a_scale is not None and b_scale is not None:
        turned = lowerings[aten.permute](b_scale, list(reversed(range(len(b_scale.get_size())))))
        y = lowerings[aten.mul](y, lowerings[aten.mul](a_scale, turned))
    return narrowed(y, out_dtype)


class InductorMatrices(Matrices):
    """Matrices of Inductor's IR."""

    floordiv = FloorDiv  # type: ignore[assignment]
    narrowed = staticmethod(narrowed)  # type: ignore[assignment]
    fixed_mm = staticmethod(fixed_mm)  # type: ignore[assignment]
    spread_rows = staticmethod(blocks.spread_rows)  # type: ignore[assignment]
    values = staticmethod(blocks.dequantize)  # type: ignore[assignment]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> ir.TensorBox:
        return lowerings[op](*args, **kwargs)  # type: ignore[no-any-return]

    def sizes(self, x: ir.TensorBox) -> Any:
        return x.get_size()

    def dtype(self, x: ir.TensorBox) -> torch.dtype:
        return x.get_dtype()

    def device(self, x: ir.TensorBox) -> torch.device:
        return x.get_device_or_error()

    def equals(self, size: Any, number: int) -> bool:
        return V.graph.sizevars.statically_known_equals(size, number)

    def is_multiple(self, size: Any, of: int) -> bool:
        return V.graph.sizevars.statically_known_multiple_of(size, of)

    def convert(self, x: ir.TensorBox, dtype: torch.dtype) -> ir.TensorBox:
        return lowerings[torch.ops.prims.convert_element_type](x, dtype)  # type: ignore[no-any-return]

    def pad(self, x: ir.TensorBox, missing: Sequence[Any]) -> ir.TensorBox:
        return lowerings[aten.constant_pad_nd](x, list(missing), 0.0)  # type: ignore[no-any-return]

    def mm(self, a: ir.TensorBox, b: ir.TensorBox, out: torch.dtype | None = None) -> ir.TensorBox:
        b = transposed(self, b)
        return lowerings[aten.mm](a, b) if out is None else lowerings[aten.mm.dtype](a, b, out)  # type: ignore[no-any-return]

    def library(self, product: ScaledProduct, bias: Any, columns: Any, measured: bool = True) -> ir.TensorBox:
        a, a_scale, b, b_scale, gemm, out_dtype, _ = product
        whole = b.get_size()[0] == columns
        fused_bias = bias if bias is not None and whole and bias.get_dtype() == out_dtype == torch.bfloat16 else None
        # Inductor takes a number that is part of a tensor for the tensor, where the number has no dimensions.
        scales = [a_scale, transposed(self, b_scale) if b_scale.get_size() else b_scale]
        if any(isinstance(one.data, ir.BaseView) for one in scales):
            scales = [lowerings[aten.view](one, one.get_size() or [1, 1]) for one in scales]
        operands = (a, transposed(self, b), *scales, fused_bias)
        with nullcontext() if measured else config.patch(max_autotune=False, max_autotune_gemm=False):
            y = lowerings[aten._scaled_mm.default](*operands, out_dtype=out_dtype, use_fast_accum=gemm.fast_accum)
        if not whole:
            y = lowerings[aten.slice](y, 1, 0, columns)
        return y if fused_bias is not None else with_bias(self, y, bias, out_dtype)  # type: ignore[no-any-return]


MATRICES = InductorMatrices()


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
    product = ScaledProduct(a, a_scale, b, b_scale, gemm, out_dtype, alpha)
    if added is not None:
        y = _adding(product, bias, added)
        return y or lowerings[aten.add](scaled_mm(*product[:4], bias, *product[4:]), added)  # type: ignore[no-any-return]
    choice = select(cutlass_choices.problem_of(a, b, bias, gemm, out_dtype))
    if choice.family.written is not None:
        y = choice.family.written(MATRICES, product)
    elif choice.family is fp8_small_m.FAMILY:
        y = _small_m(product, choice.config)
    elif gemm.microscaled:
        return _native(product, bias)
    else:
        return scaled_products.by_library(MATRICES, product, bias)  # type: ignore[no-any-return]
    return with_bias(MATRICES, y, bias, out_dtype)  # type: ignore[no-any-return]


def _small_m(product: ScaledProduct, cut: Any) -> ir.TensorBox:
    from te_inductor.templates.triton.fp8_small_m import fp8_partial_sums

    # A narrow layer of more rows does not change how the other kernels of a training graph start.
    few = V.graph.sizevars.statically_known_leq(product.a.get_size()[0], fp8_small_m.FEW)
    given, early = (*product[:4], cut, product.out_dtype), V.graph.is_inference or few
    return added_up(fp8_partial_sums, *given, splits=cut.splits, out_dtype=product.out_dtype, early=early)


def _adding(product: ScaledProduct, bias: ir.TensorBox | None, added: ir.TensorBox) -> ir.TensorBox | None:
    a, b, gemm = product.a, product.b, product.gemm
    if gemm.blocked and not gemm.microscaled:
        product = scaled_products.block_operands(MATRICES, product)
        if any(x.get_size()[0] != y.get_size()[0] for x, y in ((product.a, a), (product.b, b))):
            return None  # padded, as `added` is not
    product = product._replace(b_scale=transposed(MATRICES, product.b_scale))
    return cutlass_choices.adding(product, bias, added)


def _native(product: ScaledProduct, bias: ir.TensorBox | None) -> ir.TensorBox:
    alpha, out_dtype = product.alpha, product.out_dtype
    one_factor = alpha is None or not alpha.get_size()  # as those kernels take it
    measured = microscaled_mm.measured(product, bias) if one_factor else None
    if measured is not None:
        return measured
    y = microscaled_mm.library(product)
    if alpha is not None:  # it comes after the sum, which is rounded once more where the output is narrow
        y = narrowed(lowerings[aten.mul](y, alpha), out_dtype)
    return with_bias(MATRICES, y, bias, out_dtype)  # type: ignore[no-any-return]
