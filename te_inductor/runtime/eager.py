"""The op set on real tensors, in plain torch: what runs when a graph runs uncompiled, and when a lowering cannot.

Slower than a lowering (each step is a kernel of its own) and equal to it: casts bit for bit, GEMMs up to the order of
fp32 sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.recipes.quantizers import Gemm, Quantizer, padded

FP32_MAX = torch.finfo(torch.float32).max
# Clearing the mantissa of a positive fp32 value rounds it down to a power of two.
EXPONENT_MASK = 0x7F800000


def encode_scale(amax: Tensor, quantizer: Quantizer) -> Tensor:
    """The fp32 factor that maps `amax` (any shape, fp32) to the element's largest value."""
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


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def quantize(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    scale = encode_scale(_amax(x), quantizer)
    return cast(_pad_columns(x), scale, quantizer).contiguous(), 1.0 / scale


def quantize_rowcol(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = encode_scale(_amax(x), quantizer)
    data, data_t = (cast(_pad_columns(copy), scale, quantizer).contiguous() for copy in (x, x.t()))
    return data, 1.0 / scale, data_t, 1.0 / scale


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
        rows = b.shape[0]
        if rows % 16:
            b = F.pad(b.view(torch.uint8), (0, 0, 0, -rows % 16)).view(b.dtype)
        y = torch._scaled_mm(
            a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=gemm.fast_accum
        )[:, :rows]
    else:
        with torch.autocast(a.device.type, enabled=False):  # the op may run inside the user's autocast region
            y = ((a.float() @ b.float().t()) * (a_scale * b_scale)).to(out_dtype)
    y = y if bias is None else y + bias.to(out_dtype)
    return y.contiguous()
