"""Products of scaled operands, written once for torch's tensors and for Inductor's IR, as `arithmetic.py` is for their
elements. `Matrices` says how an operation on whole matrices is done; the functions here say which.

Each takes what it multiplies as a `ScaledProduct`, and returns (M, N) in the dtype that was asked for, without a bias
unless it takes one."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_inductor.numerics import blocks
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import ALIGNMENT, Division, Element, Scope, padded

aten = torch.ops.aten
# The only output that torch._scaled_mm gives of operands with a scale a row, on every device (aten/.../ScaledBlas.cpp,
# torch 2.11 to 2.13: fp32 and fp16 depend on the release, cuBLAS and the GPU). For another, the GEMM runs with scales
# of 1 into fp32 and the scales are multiplied there: one more pass over the output, which Inductor fuses with its
# reader, and no rounding to bf16 on the way.
ROW_SCALED_OUTPUT = torch.bfloat16
# cuBLASLt reads scales of blocks in units of 16 bytes: four rows of blocks of one row, four blocks along K of square
# ones.
BLOCK_SCALES = 4

Matrix = Any  # a tensor, or an `ir.TensorBox`


class ScaledProduct(NamedTuple):
    """``((a * a_scale) @ (b * b_scale).T) * alpha``."""

    a: Matrix  # (M, K), low precision
    a_scale: Matrix  # (), (M, 1), or of the shape that gemm.scopes[0] stores
    b: Matrix  # (N, K), low precision
    b_scale: Matrix  # (), (N, 1), or of the shape that gemm.scopes[1] stores
    gemm: Gemm
    out_dtype: torch.dtype
    alpha: Matrix | None = None  # (), (M, 1) or (1, N), of two-level scales


class Matrices:
    """Operations on matrices. Here they are tensors, which are not autograd's; a user's autocast may be around them."""

    floordiv: Division = staticmethod(operator.floordiv)  # of sizes

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Matrix:
        """The result of an ATen operator."""
        return op(*args, **kwargs)

    def sizes(self, x: Matrix) -> Any:
        return x.shape

    def dtype(self, x: Matrix) -> torch.dtype:
        return x.dtype  # type: ignore[no-any-return]

    def device(self, x: Matrix) -> torch.device:
        return x.device  # type: ignore[no-any-return]

    def equals(self, size: Any, number: int) -> bool:
        """Whether a size is known to be this."""
        return size == number  # type: ignore[no-any-return]

    def is_multiple(self, size: Any, of: int) -> bool:
        """Whether a size is known to be a multiple."""
        return size % of == 0  # type: ignore[no-any-return]

    def convert(self, x: Matrix, dtype: torch.dtype) -> Matrix:
        return x.to(dtype)

    def narrowed(self, y: Matrix, dtype: torch.dtype) -> Matrix:
        """Returns an fp32 result in `dtype`, infinite where that overflows."""
        return y.to(dtype)

    def pad(self, x: Matrix, missing: Sequence[Any]) -> Matrix:
        """Puts zeros behind the elements of each dimension, the last first; of fp8 bytes, as no such kernel knows it."""
        bits = x if x.itemsize > 1 else x.view(torch.uint8)
        return aten.constant_pad_nd(bits, missing).view(x.dtype)

    def mm(self, a: Matrix, b: Matrix, out: torch.dtype | None = None) -> Matrix:
        """The product ``a @ b.T``, in the operands' dtype or, on CUDA, in `out`."""
        with torch.autocast(a.device.type, enabled=False):
            return torch.mm(a, b.t()) if out is None else torch.mm(a, b.t(), out_dtype=out)

    def fixed_mm(self, a: Matrix, b: Matrix, *given: Any) -> Matrix:
        """The op of this name: Note [One order of sums] in kernels/fixed_order.py."""
        return torch.ops.te_inductor.fixed_mm.default(a, b, *given)

    def library(self, product: ScaledProduct, bias: Matrix | None, columns: Any, measured: bool = True) -> Matrix:
        """The first `columns` columns of `torch._scaled_mm`'s result, and the bias; `measured` says whether max-autotune
        may find another kernel for it."""
        a, a_scale, b, b_scale, gemm, out_dtype, _ = product
        scales: Any = {"scale_a": a_scale, "scale_b": b_scale.t()}
        y = torch._scaled_mm(a, b.t(), **scales, out_dtype=out_dtype, use_fast_accum=gemm.fast_accum)
        return with_bias(self, y[:, :columns], bias, out_dtype)

    def values(self, x: Matrix, scale: Matrix, element: Element, scope: Scope, dtype: torch.dtype) -> Matrix:
        """What a low-precision copy stands for, but for the tensor's own factor of two-level scales."""
        return blocks.values(x, scale, element, scope).to(dtype)

    def spread_rows(self, scale: Matrix, scope: Scope, sizes: Any) -> Matrix:  # (blocks of columns, R)
        """The scales of blocks, as those of blocks of one row."""
        return blocks.spread_rows(scale, scope, sizes)


TENSORS = Matrices()


def exact(ops: Matrices, product: ScaledProduct) -> Matrix:
    """Multiplies in fp32, in which the elements' values are exact: FP8 without tensor cores for it."""
    if product.gemm.blocked:
        return ops.narrowed(ops.mm(*_values(ops, product, torch.float32)), product.out_dtype)
    wide = [ops.convert(x, torch.float32) for x in (product.a, product.b)]
    return _scaled(ops, ops.mm(*wide), product)


def high(ops: Matrices, product: ScaledProduct) -> Matrix:
    """Multiplies tensors that are not cast; the result is rounded to their dtype or not at all."""
    a, b, out = product.a, product.b, product.out_dtype
    if ops.dtype(a) == out:
        return ops.mm(a, b)
    if _is_cuda(ops, a) and out == torch.float32:
        return ops.mm(a, b, out)
    wide = [ops.convert(x, torch.float32) for x in (a, b)]
    return ops.narrowed(ops.mm(*wide), out)


def emulated(ops: Matrices, product: ScaledProduct) -> Matrix:
    """fp32 sums of the values that MXFP8 and NVFP4 stand for: Note [Emulated GEMMs] in microscaling.py."""
    cuda = _is_cuda(ops, product.a)
    a, b = _values(ops, product, torch.bfloat16 if cuda else torch.float32)
    return _with_factor(ops, ops.mm(a, b, torch.float32 if cuda else None), product)


def in_fixed_order(ops: Matrices, product: ScaledProduct) -> Matrix:
    """Note [One order of sums] in kernels/fixed_order.py."""
    a, a_scale, b, b_scale, gemm, out_dtype, _ = product
    if gemm.microscaled or (gemm.blocked and not _is_cuda(ops, a)):
        dtype = torch.bfloat16 if _is_cuda(ops, a) else torch.float32
        wide = [ops.call(aten.unsqueeze, x, 0) for x in _values(ops, product, dtype)]
        y = ops.call(aten.squeeze, ops.fixed_mm(*wide, None, None, False, torch.float32), 0)
        return _with_factor(ops, y, product)
    if gemm.blocked:
        scopes = zip((a_scale, b_scale), gemm.granularities, (ops.sizes(a), ops.sizes(b)), strict=True)
        a_scale, b_scale = (ops.spread_rows(*one) for one in scopes)
    batches = (ops.call(aten.unsqueeze, x, 0) for x in (a, b))
    return ops.call(aten.squeeze, ops.fixed_mm(*batches, a_scale, b_scale, gemm.blocked, out_dtype), 0)


def by_library(ops: Matrices, product: ScaledProduct, bias: Matrix | None = None) -> Matrix:
    """torch's GEMM of FP8 operands on tensor cores, with its bias."""
    return (_of_blocks if product.gemm.blocked else _of_rows)(ops, product, bias)


def with_bias(ops: Matrices, y: Matrix, bias: Matrix | None, out_dtype: torch.dtype) -> Matrix:
    return y if bias is None else ops.narrowed(ops.call(aten.add, y, ops.convert(bias, out_dtype)), out_dtype)


def transposed(ops: Matrices, x: Matrix) -> Matrix:
    """The transpose of a matrix; a scalar as it is."""
    return ops.call(aten.permute, x, list(reversed(range(len(ops.sizes(x))))))


def _of_rows(ops: Matrices, product: ScaledProduct, bias: Matrix | None) -> Matrix:
    a, a_scale, b, b_scale, _, out_dtype, _ = product
    if ops.sizes(a_scale) and out_dtype != ROW_SCALED_OUTPUT:
        one = ops.call(aten.full, [], 1.0, dtype=torch.float32, device=ops.device(a))
        y = _of_rows(ops, product._replace(a_scale=one, b_scale=one, out_dtype=torch.float32), None)
        return with_bias(ops, _scaled(ops, y, product), bias, out_dtype)
    rows = ops.sizes(b)[0]
    missing = _missing(ops, rows, ALIGNMENT)
    if missing != 0:  # cuBLASLt wants N % 16 == 0; Inductor fuses the pad with the cast that makes b
        b, b_scale = (ops.pad(x, [0, 0, 0, missing]) if ops.sizes(x) else x for x in (b, b_scale))
    return ops.library(product._replace(b=b, b_scale=b_scale), bias, rows)


def _of_blocks(ops: Matrices, product: ScaledProduct, bias: Matrix | None) -> Matrix:
    """cuBLASLt's GEMM of operands with scales of blocks, which PyTorch tells apart by their shapes. Never Inductor's
    Triton template, which max-autotune would try: it reads scales of blocks of one row as if those of one row lay beside
    each other (torch 2.13, triton_main_loop_scaled_mm.py.jinja)."""
    a, a_scale, b, b_scale, gemm, _, _ = product
    (rows, wide), columns = ops.sizes(a), ops.sizes(b)[0]
    a_scope, b_scope = gemm.granularities
    if ops.equals(wide, a_scope.alignment):  # one block: scales of rows, which PyTorch would take these for
        a_scale = transposed(ops, ops.spread_rows(a_scale, a_scope, ops.sizes(a)))
        b_scale = transposed(ops, ops.spread_rows(b_scale, b_scope, ops.sizes(b)))
        return _of_rows(ops, product._replace(a_scale=a_scale, b_scale=b_scale), bias)
    whole = block_operands(ops, product)
    y = ops.library(whole, bias, columns, measured=False)
    return y if ops.sizes(whole.a)[0] == rows else ops.call(aten.slice, y, 0, 0, rows)


def block_operands(ops: Matrices, product: ScaledProduct) -> ScaledProduct:
    """Returns operands with scales of blocks as torch._scaled_mm wants them: rows padded with zeros, and scales of the
    left operand, (R, K/128) with rows contiguous, or (R/128, K/128)."""
    a_scope, b_scope = product.gemm.granularities
    a, a_scale = _block_operand(ops, product.a, product.a_scale, a_scope, BLOCK_SCALES)
    b, b_scale = _block_operand(ops, product.b, product.b_scale, b_scope, ALIGNMENT)
    return product._replace(a=a, a_scale=a_scale, b=b, b_scale=b_scale)


def _block_operand(ops: Matrices, x: Matrix, scale: Matrix, scope: Scope, alignment: int) -> tuple[Matrix, Matrix]:
    sizes = ops.sizes(x)
    missing = _missing(ops, sizes[0], alignment)
    if missing != 0:
        x = ops.pad(x, [0, 0, 0, missing])
    # Where four do not divide K/128, PyTorch's versions disagree on the stride of square blocks' scales, and one is
    # wrong.
    matrix = scope.scale_matrix(*sizes, floordiv=ops.floordiv)
    if not scope.row_last and ops.is_multiple(matrix[1], BLOCK_SCALES):
        return x, ops.call(aten.view, scale, list(matrix))
    scale = ops.spread_rows(scale, scope, sizes)
    if missing != 0:
        scale = ops.pad(scale, [0, missing])
    return x, transposed(ops, scale)


def _is_cuda(ops: Matrices, x: Matrix) -> bool:
    return ops.device(x).type == "cuda"


def _missing(ops: Matrices, size: Any, alignment: int) -> Any:
    """How many rows there are to the next multiple."""
    return 0 if ops.is_multiple(size, alignment) else padded(size, alignment, floordiv=ops.floordiv) - size


def _scaled(ops: Matrices, y: Matrix, product: ScaledProduct) -> Matrix:
    scales = ops.call(aten.mul, product.a_scale, transposed(ops, product.b_scale))
    return ops.narrowed(ops.call(aten.mul, y, scales), product.out_dtype)


def _with_factor(ops: Matrices, y: Matrix, product: ScaledProduct) -> Matrix:
    y = y if product.alpha is None else ops.call(aten.mul, y, product.alpha)
    return ops.narrowed(y, product.out_dtype)


def _values(ops: Matrices, product: ScaledProduct, dtype: torch.dtype) -> list[Matrix]:
    gemm = product.gemm
    operands = ((product.a, product.a_scale), (product.b, product.b_scale))
    pairs = zip(operands, gemm.formats, gemm.granularities, strict=True)
    return [ops.values(*operand, element, scope, dtype) for operand, element, scope in pairs]
