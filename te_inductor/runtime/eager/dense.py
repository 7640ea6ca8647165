"""Casts and GEMMs of matrices: slower than their lowerings (each step is a kernel of its own) and equal to them, casts bit
for bit, GEMMs up to the order of fp32 sums."""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import targets
from te_inductor.numerics import arithmetic, blocks, microscaling, scaled_products
from te_inductor.numerics.algebra import TORCH
from te_inductor.numerics.philox import random_bits
from te_inductor.numerics.scaled_products import TENSORS, ScaledProduct
from te_inductor.recipes.formats import ROW, padded
from te_inductor.recipes.quantizers import Gemm, Quantizer
from te_inductor.runtime.eager import Written


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
    product = ScaledProduct(a, a_scale, b, b_scale, gemm, out_dtype, alpha)
    if gemm.fixed_order:
        y = scaled_products.in_fixed_order(TENSORS, product)
    elif gemm.is_high:
        y = scaled_products.high(TENSORS, product)
    elif gemm.microscaled:
        y = scaled_products.emulated(TENSORS, product)
    elif a.device.type == "cuda" and (not gemm.blocked or (a.numel() and targets.of(a.device).multiplies(gemm))):
        y = scaled_products.by_library(TENSORS, product)
    else:
        y = scaled_products.exact(TENSORS, product)
    y = scaled_products.with_bias(TENSORS, y, bias, out_dtype)
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
