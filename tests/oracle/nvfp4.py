"""The float64 oracle of NVFP4, written from docs/numerics.md apart from the kernels; values as in casts.py.

Source of the arithmetic: TransformerEngine, common/cast/nvfp4/core_nvfp4.cuh. Here a NaN or an infinity is not lost: it
makes its block's scale NaN, and the tensor's scale is that of the other blocks.
"""

import math

import torch
from torch import Tensor

from te_inductor.recipes.formats import E2M1, E4M3, NV_1X16
from tests.oracle.elements import FP32_MAX, amaxes, fp32, padded, round_to_element

_LARGEST = E2M1.max * E4M3.max
_SIXTH = fp32(1 / E2M1.max)


def tensor_encode_scale(amax: float) -> float:
    """The fp32 factor that maps the tensor's amax to the largest product of a value and a block scale, 6 * 448; 1 where
    the amax is 0, inf or NaN."""
    if not (math.isfinite(amax) and amax > 0):
        return 1.0
    return min(fp32(_LARGEST / amax), FP32_MAX)


def block_scales(
    block_amaxes: Tensor,  # (...) float64
    encode_scale: float,
) -> tuple[Tensor, Tensor]:  # block scales, values of E4M3, and the fp32 factors that encode each block; float64
    """Rounded to fp32 after each product and quotient."""
    factor = fp32(encode_scale * _SIXTH)
    scales = round_to_element((block_amaxes * factor).float().double(), E4M3)
    decode = (scales * fp32(1 / encode_scale)).float().double()
    return scales, (1 / decode).float().double().clamp(max=FP32_MAX)


def quantize(
    x: Tensor,  # (R, C)
    block: tuple[int, int] = NV_1X16.block,  # (16, 16): as training stores weights
) -> tuple[Tensor, Tensor, float]:  # data (R, C), block scales (R/rows, C/columns), both float64, tensor scale
    """``x ~= data * expand(block_scale) * tensor_scale``. Blocks that are cut off at an edge are blocks with zeros."""
    rows, columns = block
    whole = padded(x.float().double(), rows, columns)
    down, across = whole.shape[0] // rows, whole.shape[1] // columns
    blocks = whole.view(down, rows, across, columns).transpose(1, 2).reshape(down * across, rows * columns)
    found = torch.tensor(amaxes(blocks), dtype=torch.float64)
    found = torch.where(found.isinf(), math.nan, found)
    encode_scale = tensor_encode_scale(max((amax for amax in found.tolist() if math.isfinite(amax)), default=0.0))
    scales, encode = block_scales(found, encode_scale)
    product = (blocks * encode[:, None]).float().double()
    data = round_to_element(torch.where(product.isnan(), math.inf, product), E2M1)
    data = data.view(down, across, rows, columns).transpose(1, 2).reshape(whole.shape)
    return data[: x.shape[0], : x.shape[1]], scales.view(down, across), fp32(1 / encode_scale)


def dequantize(
    data: Tensor,  # (R, C) values of E2M1
    scales: Tensor,  # (R/rows, C/columns) values of E4M3
    tensor_scale: float,
    block: tuple[int, int] = NV_1X16.block,
) -> Tensor:  # (R, C) float64
    """Exact: 6 bits times 24."""
    spread = scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return data.double() * spread[: data.shape[0], : data.shape[1]] * tensor_scale


def pack(
    data: Tensor,  # (R, C) values of E2M1, C even
) -> Tensor:  # (R, C/2) uint8
    """Two values a byte, the first in the low nibble; a zero keeps its sign."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    codes = (data.double().abs()[..., None] == magnitudes).int().argmax(-1) + 8 * data.double().signbit().int()
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
