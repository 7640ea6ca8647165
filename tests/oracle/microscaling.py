"""The oracle of MXFP8 and NVFP4; see `casts.py`. Blocks are taken with their padding: a NaN in a block is in all of it.

Source: OCP Microscaling Formats Specification, revision 1.0; TransformerEngine, common/util/ptx.cuh,
common/cast/nvfp4/core_nvfp4.cuh, common/recipe/nvfp4.cu.
"""

import functools
import math

import torch
from torch import Tensor

from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import E2M1, HADAMARD_SIGNS, SCOPES
from tests.oracle.elements import FP32_MAX, amaxes, fp32, padded, round_to_element
from tests.oracle.nvfp4 import block_scales, chosen_scales, tensor_encode_scale

_BLOCKS = {"1x32": (1, 32), "32x32": (32, 32), "1x16": (1, 16), "16x16": (16, 16)}
_ALIGNMENT = 32


def quantize(
    x: Tensor,  # (R, C)
    quantizer: Quantizer,
    amax: float | Tensor | None = None,  # of the tensor, or (R, 1) of its rows, where scales have two levels
    seed: int | None = None,  # of stochastic rounding
) -> tuple[Tensor, Tensor]:  # data (R, C padded to 32) float64, scale_inv (scales,) float64, row by row of blocks
    """``x ~= data * spread(scale_inv)``, times ``amax / (6 * 448)`` where scales have two levels."""
    high, wide = _BLOCKS[quantizer.scope]
    whole = padded(x.float(), 1 if high == 1 else _ALIGNMENT, _ALIGNMENT)
    down, across = whole.shape[0] // high, whole.shape[1] // wide
    blocks = whole.reshape(down, high, across, wide).transpose(1, 2).reshape(down * across, high * wide)
    found = amaxes(blocks)
    # What has the first of both factors, of each block: the tensor, or the block's row.
    whole_amaxes = amax.expand(-1, across).flatten().tolist() if isinstance(amax, Tensor) else [amax] * len(found)
    if quantizer.candidates and amax is not None:
        factor, scale_inv = chosen_scales(blocks.view(-1, high, wide).double(), found, whole_amaxes, quantizer)
    else:
        pairs = [
            e8m0_scale(each, quantizer.format.max) if of_all is None else two_level_scale(each, of_all)
            for each, of_all in zip(found, whole_amaxes, strict=True)
        ]
        factor, scale_inv = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).t()
    product = (whole.double() * spread(factor, quantizer.scope, *whole.shape)).to(torch.float32).double()
    data = round_to_element(product, quantizer.format) if seed is None else round_stochastically(product, seed)
    if quantizer.format.coded:
        data = torch.where(data.isnan(), quantizer.format.max, data)  # it has no NaN
    else:
        data = torch.where(whole.isinf(), math.nan, data)
    return data[: x.shape[0]], scale_inv


def round_stochastically(
    x: Tensor,  # (R, C) float64
    seed: int,
) -> Tensor:  # (R, C) values of E2M1
    """Rounds to one of the two neighbours: to the upper one where 24 random bits, as a fraction, are below the distance
    from the lower one over their distance. Bits are those of the element's index."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    size = torch.where(x.isnan(), E2M1.max, x.abs().clamp(max=E2M1.max))
    low = (torch.searchsorted(magnitudes, size, right=True) - 1).clamp(max=6)
    below, above = magnitudes[low], magnitudes[low + 1]
    fractions = [(philox(seed, index) % 2**24) / 2**24 for index in range(x.numel())]
    up = torch.tensor(fractions, dtype=torch.float64).view(x.shape) < (size - below) / (above - below)
    return torch.where(up, above, below).copysign(torch.where(x.isnan(), 1.0, x))


@functools.cache
def philox(seed: int, counter: int) -> int:
    """The first word of Philox4x32-10. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011."""
    c, k = [counter & 0xFFFFFFFF, 0, 0, 0], [seed, 0]
    for turn in range(10):
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * c[0], 2**32), divmod(0xCD9E8D57 * c[2], 2**32)
        key = [(k[0] + turn * 0x9E3779B9) % 2**32, (k[1] + turn * 0xBB67AE85) % 2**32]
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
    return c[0]


def hadamard(
    x: Tensor,  # (R, C)
) -> Tensor:  # (R, C padded to 16) float64, values of bf16
    """``x diag(s) H / 4`` for each 16 values of a row, H Sylvester's: row i and column j hold -1 where i and j have an
    odd number of bits in common. Sums are of neighbours, then of neighbouring sums, and so on, each rounded to fp32;
    column j's bits say, lowest first, whether the second of two is subtracted."""
    size = len(HADAMARD_SIGNS)
    whole = padded(x.float(), 1, size).double().reshape(x.shape[0], -1, 1, size) * torch.tensor(HADAMARD_SIGNS)
    columns = torch.arange(size)[:, None]
    for bit in range(size.bit_length() - 1):
        sign = 1.0 - 2.0 * ((columns >> bit) & 1)
        whole = (whole[..., ::2] + sign * whole[..., 1::2]).float().double()
    return (whole.flatten(1) / 4).float().bfloat16().double()


def e8m0_scale(amax: float, largest: float) -> tuple[float, float]:
    """What a block is multiplied with, and its scale_inv: the smallest power of two, from 2**-127 on, that is no
    smaller than ``amax / largest`` as fp32 has it; 2**127 for infinity."""
    quotient = fp32(amax * fp32(1 / largest))
    if math.isnan(quotient):
        return math.nan, math.nan
    if math.isinf(quotient):
        return 2.0**-127, 2.0**127
    mantissa, exponent = math.frexp(quotient)  # quotient = mantissa * 2**exponent, 1/2 <= mantissa < 1
    power = max(exponent - 1 if mantissa == 0.5 else exponent, -127) if quotient > 0 else -127
    return 2.0**-power, 2.0**power


def two_level_scale(amax: float, tensor_amax: float) -> tuple[float, float]:
    """What a block is multiplied with, and its scale_inv, a value of E4M3."""
    scale_inv, factor = (
        each.item() for each in block_scales(torch.tensor(amax, dtype=torch.float64), tensor_encode_scale(tensor_amax))
    )
    return (factor if factor < FP32_MAX else FP32_MAX), scale_inv  # of a NaN too, as CUDA's fminf has it


def spread(
    scale: Tensor,  # (scales,), row by row of blocks
    scope: str,
    rows: int,
    columns: int,
) -> Tensor:  # (R, C)
    """The scale of each element."""
    high, wide = _BLOCKS[scope]
    across = -(-columns // _ALIGNMENT) * (_ALIGNMENT // wide)
    return scale[torch.arange(rows)[:, None] // high * across + torch.arange(columns)[None, :] // wide]


def alpha(
    a_amax: float | Tensor,  # or (M, 1)
    b_amax: float | Tensor,  # or (N, 1)
    scale_maxima: tuple[float, float],
) -> float | Tensor:  # or of a shape that broadcasts to (M, N)
    """What multiplies the product of two operands with two-level scales."""
    a_max, b_max = scale_maxima
    a, b = (torch.as_tensor(each, dtype=torch.float64) for each in (a_amax, b_amax))
    factor = ((a * b.t()).float().double() * fp32(1 / (E2M1.max**2 * a_max * b_max))).float().double()
    return factor if factor.dim() else factor.item()


def is_microscaled(scope: str) -> bool:
    return scope in _BLOCKS


def is_two_level(scope: str) -> bool:
    return SCOPES[scope].elements == ("e2m1",)
