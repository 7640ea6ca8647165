"""The op set on real tensors, in plain torch: what runs when a graph runs uncompiled, and when a lowering cannot.

Slower than a lowering (each step is a kernel of its own) and equal to it: casts bit for bit, GEMMs up to the order of
fp32 sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.recipes.quantizers import ALIGNMENT, Gemm, Quantizer, padded

FP32_MAX = torch.finfo(torch.float32).max
# Clearing the mantissa of a positive fp32 value rounds it down to a power of two.
EXPONENT_MASK = 0x7F800000
# The only output that torch._scaled_mm gives of operands with a scale a row, on every device (aten/.../ScaledBlas.cpp, torch
# 2.11 to 2.13: fp32 and fp16 depend on the release, cuBLAS and the GPU). For another, the GEMM runs with scales of 1 into
# fp32 and the scales are multiplied there: one more pass over the output, which Inductor fuses with its reader, and no
# rounding to bf16 on the way.
ROW_SCALED_OUTPUT = torch.bfloat16


def encode_scale(amax: Tensor, quantizer: Quantizer) -> Tensor:
    """The fp32 factors that map `amax` (any shape, fp32) to the element's largest value."""
    amax = amax.clamp(min=quantizer.amax_epsilon)
    # Tensor by tensor: torch evaluates `number / tensor` as a product with the reciprocal, which rounds twice.
    scale = torch.full_like(amax, quantizer.format.max) / amax
    scale = torch.where((amax > 0) & (amax < torch.inf), scale, 1.0).clamp(max=FP32_MAX)
    if quantizer.power_2_scale:
        scale = (scale.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
    return scale


def cast(x: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    """Round ``x * scale`` to the element, to nearest even; saturate; keep NaN."""
    limit = quantizer.format.max
    return (x.float() * scale).clamp(-limit, limit).to(quantizer.format.dtype)


def _pad_columns(x: Tensor) -> Tensor:
    missing = padded(x.shape[1]) - x.shape[1]
    return F.pad(x, (0, missing)) if missing else x


def _scale(x: Tensor, quantizer: Quantizer) -> Tensor:
    scope = quantizer.granularity
    if x.numel():
        amax = x.abs().amax(scope.reduced, keepdim=scope.keepdim).float()
    else:
        amax = x.new_zeros(scope.scale_shape(x.shape[0]), dtype=torch.float32)
    return encode_scale(amax, quantizer)


def _quantized(x: Tensor, scale: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return quantize_delayed(x, scale, quantizer), 1.0 / scale


def quantize(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return _quantized(x, _scale(x, quantizer), quantizer)


def quantize_rowcol(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = _scale(x, quantizer)
    scale_t = scale if quantizer.granularity.transposes else _scale(x.t(), quantizer)
    return *_quantized(x, scale, quantizer), *_quantized(x.t(), scale_t, quantizer)


def quantize_delayed(x: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    return cast(_pad_columns(x), scale, quantizer).contiguous()


def quantize_rowcol_delayed(x: Tensor, scale: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return quantize_delayed(x, scale, quantizer), quantize_delayed(x.t(), scale, quantizer)


def current_scale(pieces: list[Tensor], quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    amaxes = [
        piece.abs().amax().float() if piece.numel() else piece.new_zeros((), dtype=torch.float32) for piece in pieces
    ]
    scale = encode_scale(torch.stack(amaxes).amax(), quantizer)
    return scale, 1.0 / scale


def quantize_pieces_delayed(
    pieces: list[Tensor], dim: int, scale: Tensor, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:
    return quantize_rowcol_delayed(torch.cat(pieces, dim), scale, quantizer)


def dequantize(data: Tensor, scale_inv: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Tensor:
    return (data.float() * scale_inv).to(dtype).contiguous()


def scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> Tensor:
    if a.device.type == "cuda":
        y = _cuda(a, a_scale, b, b_scale, gemm, out_dtype)
    else:
        with torch.autocast(a.device.type, enabled=False):  # the op may run inside the user's autocast region
            y = ((a.float() @ b.float().t()) * (a_scale * b_scale.t())).to(out_dtype)
    y = y if bias is None else y + bias.to(out_dtype)
    return y.contiguous()


def _cuda(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, gemm: Gemm, out_dtype: torch.dtype) -> Tensor:
    if a_scale.dim() and out_dtype != ROW_SCALED_OUTPUT:
        one = torch.ones((), device=a.device)
        return (_cuda(a, one, b, one, gemm, torch.float32) * (a_scale * b_scale.t())).to(out_dtype)
    rows = b.shape[0]
    if rows % ALIGNMENT:  # cuBLASLt's N
        b, b_scale = _pad_rows(b), _pad_rows(b_scale)
    y = torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=out_dtype, use_fast_accum=gemm.fast_accum
    )
    return y[:, :rows]


def _pad_rows(x: Tensor) -> Tensor:
    """`x` (R, C) with zeros below, to a multiple of ALIGNMENT; a scalar as it is. Bytes, as no pad kernel knows fp8."""
    if x.dim() == 0:
        return x
    return F.pad(x.view(torch.uint8), (0, 0, 0, padded(x.shape[0]) - x.shape[0])).view(x.dtype)
