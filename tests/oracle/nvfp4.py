"""The float64 oracle of NVFP4, written from docs/numerics.md apart from the kernels; values as in casts.py.

Source of the arithmetic: TransformerEngine, common/cast/nvfp4/core_nvfp4.cuh. Here a NaN or an infinity is not lost: it
makes its block's scale NaN, and the tensor's scale is that of the other blocks.
"""

import functools
import math

import torch
from torch import Tensor

from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import E2M1, E4M3, NV_1X16
from tests.oracle.elements import FP32_MAX, amaxes, fp32, padded, round_to_element

_LARGEST = E2M1.max * E4M3.max
_SIXTH = fp32(1 / E2M1.max)


@functools.cache
def tensor_encode_scale(amax: float, largest: float = _LARGEST) -> float:
    """The fp32 factor that maps the tensor's amax to the largest product of a value and a block scale, 6 * 448; 1 where
    the amax is 0, inf or NaN."""
    if not (math.isfinite(amax) and amax > 0):
        return 1.0
    return min(fp32(largest / amax), FP32_MAX)


def block_scales(
    block_amaxes: Tensor,  # (...) float64
    encode_scale: float,
) -> tuple[Tensor, Tensor]:  # block scales, values of E4M3, and the fp32 factors that encode each block; float64
    """Rounded to fp32 after each product and quotient."""
    factor = fp32(encode_scale * _SIXTH)
    scales = round_to_element((block_amaxes * factor).float().double(), E4M3)
    decode = (scales * fp32(1 / encode_scale)).float().double()
    return scales, (1 / decode).float().double().clamp(max=FP32_MAX)


def chosen_scales(
    blocks: Tensor,  # (blocks, rows, 16) float64
    amaxes: list[float],  # of the blocks
    tensor_amaxes: list[float],  # of what has the first of both factors, for each block
    quantizer: Quantizer,
) -> tuple[Tensor, Tensor]:  # what each block is multiplied with, and its scale, a value of E4M3; (blocks,) float64
    """A block's amax goes to 6 or, with a scale 3/2 as large, to 4, whichever of both leaves the smaller error; to 6
    where they are equal; likewise to the first of any other candidates with the least error. The error is of each value
    times amax over ``6 * scale_max``: its magnitude or its square, added from left to right, then the sums of rows that
    are 8, 4, 2 and 1 apart. Each operation is rounded to fp32.

    Source: TransformerEngine, common/cast/nvfp4/quantize_4over6_nvfp4.cuh.
    """
    largest = E2M1.max * quantizer.scale_max
    amax, whole = (torch.tensor(each, dtype=torch.float64) for each in (amaxes, tensor_amaxes))
    encode = torch.tensor([tensor_encode_scale(each, largest) for each in tensor_amaxes], dtype=torch.float64)
    base = _fp32(_fp32(amax / E2M1.max) * encode)
    found = []
    for candidate in quantizer.candidates:
        scale = round_to_element(_fp32(base * fp32(E2M1.max / candidate)), E4M3)
        factor = _fp32(1 / _fp32(scale * _fp32(1 / encode)))
        factor = torch.where(factor < FP32_MAX, factor, FP32_MAX)
        value = round_to_element(_fp32(blocks * factor[:, None, None]), E2M1)
        value = torch.where(value.isnan(), E2M1.max, value)
        back = _fp32(_fp32(value * scale[:, None, None] * whole[:, None, None]) / largest)
        difference = _fp32(back - blocks)
        each = difference.abs() if quantizer.error_metric == "MAE" else _fp32(difference * difference)
        found.append((_sum(each), factor, scale))
    best = list(found[0])
    for one in found[1:]:
        less = one[0] < best[0]
        best = [torch.where(less, new, old) for new, old in zip(one, best, strict=True)]
    return best[1], best[2]


def _sum(errors: Tensor) -> Tensor:  # (blocks, rows, 16) -> (blocks,)
    total = torch.zeros(errors.shape[:2], dtype=torch.float64)
    for column in errors.unbind(2):
        total = _fp32(total + column)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = _fp32(total[:, :half] + total[:, half:])
    return total[:, 0]


def _fp32(x: Tensor) -> Tensor:
    return x.float().double()


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
