"""Casts and GEMMs of matrices: slower than their lowerings (each step is a kernel of its own) and equal to them, casts bit
for bit, GEMMs up to the order of fp32 sums."""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import targets
from te_inductor.numerics import arithmetic, blocks, microscaling
from te_inductor.numerics.algebra import TORCH
from te_inductor.numerics.philox import random_bits
from te_inductor.recipes.formats import ALIGNMENT, ROW, Scope, padded
from te_inductor.recipes.quantizers import Gemm, Quantizer
from te_inductor.runtime.eager import Written

# The only output that torch._scaled_mm gives of operands with a scale a row, on every device (aten/.../ScaledBlas.cpp,
# torch 2.11 to 2.13: fp32 and fp16 depend on the release, cuBLAS and the GPU). For another, the GEMM runs with scales
# of 1 into fp32 and the scales are multiplied there: one more pass over the output, which Inductor fuses with its
# reader, and no rounding to bf16 on the way.
ROW_SCALED_OUTPUT = torch.bfloat16
# cuBLASLt reads scales of blocks in units of 16 bytes: four rows of blocks of one row, four blocks along K of square
# ones.
BLOCK_SCALES = 4


def encode_scale(amax: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Tensor:
    """The fp32 factors that map `amax` (any shape, fp32), of a tensor of `dtype`, to the element's largest value."""
    return arithmetic.encode_scale(TORCH, amax, quantizer, dtype)  # type: ignore[no-any-return]


def cast(x: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    """Round ``x * scale`` to the element, to nearest even. Finite values saturate; an infinity becomes NaN, as NaN
    stays: Note [Overflow stays visible] in lowerings/casts/values.py."""
    return saturate(x, scale, quantizer.format.max, quantizer.format.dtype)


def saturate(x: Tensor, scale: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """The same of an element whose largest value is `limit`."""
    product = (x.float() * scale).clamp(-limit, limit)
    return torch.where(x.isinf(), torch.nan, product).to(dtype)


def _scales(x: Tensor, quantizer: Quantizer, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """What values are multiplied with before the cast, and `scale_inv`; `amax` is that of the first of two
    levels."""
    scope = quantizer.granularity
    shape = scope.scale_shape(*x.shape)
    if x.numel() == 0:
        found = x.new_zeros(shape, dtype=torch.float32)
    elif scope.blocked:
        found = blocks.amax(x, scope).float()
    else:
        found = x.abs().amax((1,) if scope is ROW else (0, 1)).float().view(shape)
    if amax is not None and amax.dim():
        amax = amax.expand(scope.blocks(*x.shape)).flatten()
    if quantizer.candidates and amax is not None:
        return blocks.chosen(x, found, quantizer, amax)
    if scope.microscaled:
        return arithmetic.encode(TORCH, found, quantizer, amax)
    scale = encode_scale(found, quantizer, x.dtype)
    return scale, arithmetic.decode_scale(TORCH, scale, quantizer)


def _copy(x: Tensor, scale: Tensor, quantizer: Quantizer, seed: Tensor | None = None) -> Tensor:
    missing = quantizer.padded(x.shape[1]) - x.shape[1]
    x = F.pad(x, (0, missing)) if missing else x
    each = blocks.spread(scale, quantizer.granularity, x.shape)
    if quantizer.format.coded:
        bits = None if seed is None else random_bits(seed, x.numel()).view(x.shape)
        return microscaling.stored(x.float() * each, quantizer.format, bits).contiguous()
    return cast(x, each, quantizer).contiguous()


def quantize(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: Tensor | None = None,  # () fp32, of the tensor, or (R, 1), of its rows, where scales have two levels
    seed: Tensor | None = None,  # () int64, of stochastic rounding
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), scale_inv as Scope.scale_shape says: (), (R, 1), ...
    scale, scale_inv = _scales(x, quantizer, amax)
    return _copy(x, scale, quantizer, seed), scale_inv


def quantize_rowcol(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: Tensor | None = None,  # () fp32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # data (R, pad(C)), scale_inv, data_t (C, pad(R)), scale_inv_t
    return *quantize(x, quantizer, amax), *quantize(x.t(), quantizer, amax)


def quantize_pieces(
    pieces: list[Tensor],  # matrices that make one (R, C) side by side along dim
    dim: int,
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # as of `quantize_rowcol`
    return quantize_rowcol(torch.cat(pieces, dim), quantizer)


def tensor_amax(x: Tensor, of_rows: bool = False) -> Tensor:  # () fp32, or (R, 1)
    if not x.numel():
        return x.new_zeros((x.shape[0], 1) if of_rows else (), dtype=torch.float32)
    return (x.abs().amax(1, keepdim=True) if of_rows else x.abs().amax()).float()


def quantize_delayed(
    x: Tensor,  # (R, C)
    scale: Tensor,  # ()
    quantizer: Quantizer,
) -> Tensor:  # (R, pad(C))
    return _copy(x, scale, quantizer)


def quantize_rowcol_delayed(
    x: Tensor, scale: Tensor, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:  # data (R, pad(C)), data_t (C, pad(R))
    return quantize_delayed(x, scale, quantizer), quantize_delayed(x.t(), scale, quantizer)


def transpose(
    data: Tensor,  # (R, pad(C)), one byte an element
    columns: int | torch.SymInt,  # C
) -> Tensor:  # (C, pad(R))
    """The columnwise copy of what this is the rowwise copy of, where both have one scale."""
    made = data.view(torch.uint8)[:, :columns].t()
    missing = padded(made.shape[1]) - made.shape[1]
    made = F.pad(made, (0, missing)) if missing else made.contiguous()
    return made.view(data.dtype)


def current_scale(pieces: list[Tensor], quantizer: Quantizer) -> tuple[Tensor, Tensor]:  # scale (), scale_inv ()
    amaxes = [tensor_amax(piece) for piece in pieces]
    scale = encode_scale(torch.stack(amaxes).amax(), quantizer, pieces[0].dtype)
    return scale, arithmetic.decode_scale(TORCH, scale, quantizer)


def quantize_pieces_delayed(
    pieces: list[Tensor], dim: int, scale: Tensor, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:
    return quantize_rowcol_delayed(torch.cat(pieces, dim), scale, quantizer)


def dequantize(
    data: Tensor,  # (R, C), as stored
    scale_inv: Tensor,  # of the shape that the quantizer's scope stores
    quantizer: Quantizer,
    dtype: torch.dtype,
) -> Tensor:  # (R, C); of two-level scales in units of the tensor's factor
    return blocks.values(data, scale_inv, quantizer.format, quantizer.granularity).to(dtype).contiguous()


def scaled_mm(
    a: Tensor,  # (M, K), low precision
    a_scale: Tensor,  # (), (M, 1), or of the shape that gemm.scopes[0] stores
    b: Tensor,  # (N, K), low precision
    b_scale: Tensor,  # (), (N, 1), or of the shape that gemm.scopes[1] stores
    bias: Tensor | None,  # (N,)
    gemm: Gemm,
    out_dtype: torch.dtype,
    alpha: Tensor | None = None,  # (), (M, 1) or (1, N), factor of the product, of two-level scales
    added: Tensor | None = None,  # (M, N), of out_dtype
) -> Tensor:  # (M, N)
    if gemm.fixed_order:
        y = _fixed(a, a_scale, b, b_scale, gemm, out_dtype, alpha)
    elif gemm.is_high:
        with torch.autocast(a.device.type, enabled=False):  # as below
            y = high_product(a, b, out_dtype)
    elif gemm.microscaled:
        y = _emulated(a, a_scale, b, b_scale, gemm, alpha).to(out_dtype)
    elif a.device.type == "cuda" and (not gemm.blocked or (a.numel() and targets.of(a.device).block_scaled_mm)):
        y = (_cuda_blocks if gemm.blocked else _cuda)(a, a_scale, b, b_scale, gemm, out_dtype)
    else:
        with torch.autocast(a.device.type, enabled=False):  # the op may run inside the user's autocast region
            y = _exact(a, a_scale, b, b_scale, gemm).to(out_dtype)
    y = y if bias is None else y + bias.to(out_dtype)
    return (y if added is None else y + added).contiguous()


def accumulate_wgrad(
    totals: list[Written],  # fp32, (N, K) of each weight
    a: Tensor,  # dy columnwise, (all N, M)
    a_scale: Tensor,
    b: Tensor,  # x columnwise, (K, M)
    b_scale: Tensor,
    alpha: Tensor | None,  # ()
    gemm: Gemm,
) -> None:
    """Adds through `data`, so that autograd does not see the totals change: several microbatches' backwards hold
    them."""
    dw = scaled_mm(a, a_scale, b, b_scale, None, gemm, torch.float32, alpha)
    for total, gradient in zip(totals, dw.split([total.shape[0] for total in totals]), strict=True):
        total.data.add_(gradient)


def high_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The GEMM of tensors that are not cast, rounded to their dtype or not at all."""
    if a.dtype == out_dtype:
        return a @ b.t()
    if a.device.type == "cuda" and out_dtype == torch.float32:
        return torch.mm(a, b.t(), out_dtype=out_dtype)
    return (a.float() @ b.float().t()).to(out_dtype)


def _fixed(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm, out_dtype: torch.dtype, alpha: Tensor | None
) -> Tensor:
    """Note [One order of sums]"""
    multiply, is_cuda = torch.ops.te_inductor.fixed_mm.default, a.device.type == "cuda"
    if gemm.microscaled or (gemm.blocked and not is_cuda):
        operands = zip((a, b), (a_scale, b_scale), gemm.formats, gemm.granularities, strict=True)
        wide = [blocks.values(*operand).to(torch.bfloat16 if is_cuda else torch.float32)[None] for operand in operands]
        [y] = multiply(*wide, None, None, False, torch.float32)
        return (y if alpha is None else y * alpha).to(out_dtype)
    if gemm.blocked:
        scopes = zip((a_scale, b_scale), gemm.granularities, (a, b), strict=True)
        a_scale, b_scale = (blocks.spread_rows(scale, scope, x.shape) for scale, scope, x in scopes)
    [y] = multiply(a[None], b[None], a_scale, b_scale, gemm.blocked, out_dtype)
    return y  # type: ignore[no-any-return]


def _emulated(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm, alpha: Tensor | None) -> Tensor:
    """fp32 sums of the values that MXFP8 and NVFP4 stand for: Note [Emulated GEMMs] in microscaling.py."""
    operands = zip((a, b), (a_scale, b_scale), gemm.formats, gemm.granularities, strict=True)
    wide_a, wide_b = (blocks.values(*operand) for operand in operands)
    with torch.autocast(a.device.type, enabled=False):  # the op may run inside the user's autocast region
        if a.device.type == "cuda":
            y = torch.mm(wide_a.bfloat16(), wide_b.bfloat16().t(), out_dtype=torch.float32)
        else:
            y = wide_a @ wide_b.t()
    return y if alpha is None else y * alpha


def _exact(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm) -> Tensor:
    """Multiplies in fp32, in which the elements' values are exact."""
    if not gemm.blocked:
        return (a.float() @ b.float().t()) * (a_scale * b_scale.t())
    operands = zip((a, b), (a_scale, b_scale), gemm.formats, gemm.granularities, strict=True)
    wide_a, wide_b = (blocks.values(*operand) for operand in operands)
    return wide_a @ wide_b.t()


def _cuda(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    if a_scale.dim() and out_dtype != ROW_SCALED_OUTPUT:
        one = torch.ones((), dtype=torch.float32, device=a.device)
        return (_cuda(a, one, b, one, gemm, torch.float32) * (a_scale * b_scale.t())).to(out_dtype)
    rows = b.shape[0]
    b = _pad_rows(b, ALIGNMENT)  # cuBLASLt's N
    if b_scale.dim():
        b_scale = _pad_rows(b_scale, ALIGNMENT)
    y = torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=out_dtype, use_fast_accum=gemm.fast_accum
    )
    return y[:, :rows]


def _cuda_blocks(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    """cuBLASLt's GEMM of operands with scales of blocks, which PyTorch tells apart by their shapes."""
    m, n = a.shape[0], b.shape[0]
    a_scope, b_scope = gemm.granularities
    if a.shape[1] == a_scope.alignment:  # one block: scales of rows, which PyTorch would take these for
        a_scale = blocks.spread_rows(a_scale, a_scope, a.shape).reshape(-1, 1)
        b_scale = blocks.spread_rows(b_scale, b_scope, b.shape).reshape(-1, 1)
        return _cuda(a, a_scale, b, b_scale, gemm, out_dtype)
    a, a_scale = _block_operand(a, a_scale, a_scope, BLOCK_SCALES)
    b, b_scale = _block_operand(b, b_scale, b_scope, ALIGNMENT)
    y = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=out_dtype)
    return y[:m, :n]


def _block_operand(x: Tensor, scale: Tensor, scope: Scope, alignment: int) -> tuple[Tensor, Tensor]:
    """Rows padded to `alignment`, and scales as torch._scaled_mm wants them of the left operand: (R, K/128) with rows
    contiguous, or (R/128, K/128)."""
    whole = _pad_rows(x, alignment)
    matrix = scope.scale_matrix(*x.shape)
    # Where four do not divide K/128, PyTorch's versions disagree on the stride of square blocks' scales, and one is
    # wrong.
    if not scope.row_last and matrix[1] % BLOCK_SCALES == 0:
        return whole, scale.view(matrix)
    missing = whole.shape[0] - x.shape[0]
    scale = blocks.spread_rows(scale, scope, x.shape)
    return whole, (F.pad(scale, (0, missing)) if missing else scale).t()


def _pad_rows(x: Tensor, alignment: int) -> Tensor:
    """`x` (R, C) with zeros below, to a multiple of `alignment`. Bytes, as no pad kernel knows fp8."""
    missing = padded(x.shape[0], alignment) - x.shape[0]
    return F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype) if missing else x
