"""MXFP8 and NVFP4 in plain torch: scales of E8M0 and of two levels, E2M1 values two a byte. Mirrored by
`lowerings/casts/microscaling.py`.

# Note [Emulated GEMMs]
Where no tensor core multiplies MXFP8 or NVFP4, a GEMM multiplies what the operands stand for, in bf16 on CUDA and in
fp32 on CPU, and sums in fp32. That is the format's own product but for the order of the sum: an E2M1 value times an
E4M3 scale has at most 6 significant bits, an FP8 value times a power of two at most 4, and bf16 holds 8. Its range ends
at 2**-133 and 2**128: what of MXFP8 lies below is rounded there (blocks with an amax below 2**-102 may hold some), and
a value that the cast rounded up to 2**128 is infinite. The fp32 factors of two-level scales stay out of the operands:
`alpha` multiplies the sum.

Source: TransformerEngine, common/util/ptx.cuh (float_to_e8m0, exp2f_rcp), common/cast/nvfp4/core_nvfp4.cuh.
"""

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.recipes.formats import E2M1, E4M3, E8M0, HADAMARD, HADAMARD_SIGNS
from te_inductor.recipes.quantizers import Quantizer
from te_inductor.runtime.philox import BITS

Pair = tuple[Tensor, Tensor]  # of blocks: the factors that values are multiplied with before the cast, and scale_inv
FP32_MAX = torch.finfo(torch.float32).max
NAN_CODE, INFINITY_CODE = 0xFF, 0xFE  # E8M0 has no infinity: its largest value stands for one
# Of 2**-127 as fp32, a subnormal: the value of code 0, and the reciprocal of that of code 0xFE.
SMALLEST_BITS = 0x00400000
# What two-level scales map the tensor's amax to: the largest element times the largest scale of a block.
TWO_LEVEL_MAX = E2M1.max * E4M3.max


def reciprocal(value: float) -> float:
    """1 / value as fp32 has it."""
    (rounded,) = struct.unpack("f", struct.pack("f", 1.0 / value))
    return float(rounded)


def encode(amax: Tensor, quantizer: Quantizer, tensor_amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of blocks with these amaxes (fp32): the factors that values are multiplied with before the cast, and
    scale_inv."""
    if quantizer.granularity.scale is E8M0:
        code = e8m0_code(amax * reciprocal(quantizer.format.max))
        return _e8m0_reciprocal(code), code.to(torch.uint8)
    assert tensor_amax is not None
    return _two_level(amax, tensor_amax)


def e8m0_code(value: Tensor) -> Tensor:
    """The smallest power of two that is no smaller than each value (fp32, not negative), as int32 codes; NaN and
    infinity have theirs."""
    bits = value.view(torch.int32)
    up = ((bits & 0x7FFFFF) != 0) & (bits > SMALLEST_BITS)
    code = (bits >> 23) + up.to(torch.int32)
    code = torch.where(value.isinf(), INFINITY_CODE, code)
    return torch.where(value.isnan(), NAN_CODE, code)


def _e8m0_reciprocal(code: Tensor) -> Tensor:
    bits = torch.where(code == INFINITY_CODE, SMALLEST_BITS, (254 - code) << 23)
    return torch.where(code == NAN_CODE, torch.nan, bits.to(torch.int32).view(torch.float32))


def e8m0_value(code: Tensor) -> Tensor:
    """fp32 values of uint8 codes."""
    wide = code.to(torch.int32)
    bits = torch.where(wide == 0, SMALLEST_BITS, wide << 23)
    return torch.where(wide == NAN_CODE, torch.nan, bits.to(torch.int32).view(torch.float32))


def tensor_encode_scale(tensor_amax: Tensor, largest: float = TWO_LEVEL_MAX) -> Tensor:
    """The fp32 factor of the first of two levels, which maps the tensor's amax to `largest`."""
    scale = torch.full_like(tensor_amax, largest) / tensor_amax
    return torch.where((tensor_amax > 0) & (tensor_amax < torch.inf), scale.clamp(max=FP32_MAX), 1.0)


def _two_level(amax: Tensor, tensor_amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = tensor_encode_scale(tensor_amax)
    return _factor(amax * (scale * reciprocal(E2M1.max)), scale)


def candidates(amax: Tensor, quantizer: Quantizer, tensor_amax: Tensor) -> list[Pair]:
    """What `encode` finds, where a block's amax goes to each of the quantizer's candidates."""
    scale, first = tensor_encode_scale(tensor_amax, quantizer.two_level_max), quantizer.candidates[0]
    base = amax / torch.full_like(amax, first) * scale
    return [_factor(base * (first / candidate), scale) for candidate in quantizer.candidates]


def error(
    x: Tensor,
    factor: Tensor,  # what `encode` finds, for each element
    scale_inv: Tensor,
    quantizer: Quantizer,
    tensor_amax: Tensor,
) -> Tensor:  # fp32
    """How far each value comes to lie from x, which TransformerEngine computes with the tensor's amax, and not with the
    factor that it is encoded with. Of magnitudes: the sign is the same."""
    x = x.float().abs()
    back = _magnitude(_nearest(x * factor)) * scale_inv.float() * tensor_amax
    off = (back / torch.full_like(back, quantizer.two_level_max) - x).abs()
    return off if quantizer.error_metric == "MAE" else off * off


def _factor(scale_inv: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scale_inv = scale_inv.clamp(max=E4M3.max).to(E4M3.dtype)
    decode = scale_inv.float() * (1.0 / scale)
    factor = torch.ones_like(decode) / decode
    return torch.where(factor < FP32_MAX, factor, FP32_MAX), scale_inv  # a NaN too, as CUDA's fminf has it


def cast_e2m1(value: Tensor, bits: Tensor | None = None) -> Tensor:
    """Codes (uint8, one a byte) of fp32 values, rounded to nearest, ties to even, or as random `bits` say; saturates;
    NaN becomes 6, as CUDA's cvt.rn.satfinite.e2m1x2 has it."""
    magnitude = value.abs()
    code = _nearest(magnitude) if bits is None else _stochastic(magnitude, bits)
    sign = value.signbit() & ~value.isnan()
    return code | (sign.to(torch.uint8) << 3)


def _nearest(magnitude: Tensor) -> Tensor:
    code = torch.full_like(magnitude, 7, dtype=torch.uint8)
    for threshold, tie_is_below in THRESHOLDS:
        below = magnitude <= threshold if tie_is_below else magnitude < threshold
        code -= below.to(torch.uint8)
    return code


def _stochastic(magnitude: Tensor, bits: Tensor) -> Tensor:
    """Up with a probability of the distance from the lower neighbour, in units of their distance, rounded up to
    2**-24."""
    magnitude = torch.where(magnitude <= E2M1.max, magnitude, E2M1.max)  # NaN too
    base = 2 * ((magnitude >= 2).to(torch.uint8) + (magnitude >= 4).to(torch.uint8))
    steps = torch.where(magnitude < 2, 2 * magnitude, torch.where(magnitude < 4, magnitude, magnitude / 2))
    low = steps.floor()
    up = bits.float() < (steps - low) * 2.0**BITS
    return low.to(torch.uint8) + base + up.to(torch.uint8)


# E2M1's magnitudes by their codes; midway between neighbours, and whether the lower one has the even mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
THRESHOLDS = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))


def hadamard(
    x: Tensor,  # (R, C)
) -> Tensor:  # (R, C padded to 16) bf16
    """The random Hadamard transform of each 16 values of a row: fp32 sums in the order of a butterfly, first
    neighbours."""
    rows, missing = x.shape[0], -x.shape[1] % HADAMARD
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=x.device)
    y = F.pad(x, (0, missing)).float().view(rows, (x.shape[1] + missing) // HADAMARD, HADAMARD) * signs
    shape, apart = y.shape, 1
    while apart < HADAMARD:
        a, b = y.reshape(*shape[:2], HADAMARD // (2 * apart), 2, apart).unbind(3)
        y = torch.stack([a + b, a - b], 3)
        apart *= 2
    return (y.reshape(rows, shape[1] * HADAMARD) * HADAMARD**-0.5).bfloat16()


def exact_hadamard(x: Tensor) -> Tensor:
    """The transform without its rounding to bf16, by its matrix, for comparisons."""
    places = torch.arange(HADAMARD, device=x.device)
    common = places[:, None] & places
    odd = sum((common >> bit) & 1 for bit in range(HADAMARD.bit_length() - 1)) % 2
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=x.device)
    matrix = signs[:, None] * (1 - 2 * odd) * HADAMARD**-0.5
    return (F.pad(x, (0, -x.shape[1] % HADAMARD)).float().reshape(-1, HADAMARD) @ matrix).view(x.shape[0], -1)


def pack(codes: Tensor) -> Tensor:
    """(R, C) codes of four bits -> (R, C/2) bytes."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_e2m1(data: Tensor) -> Tensor:
    """(R, C/2) bytes -> (R, C) values, fp32."""
    return e2m1_values(torch.stack([data & 15, data >> 4], -1).flatten(1))


def e2m1_values(codes: Tensor) -> Tensor:  # fp32
    """What codes of four bits stand for."""
    magnitude = _magnitude(codes & 7)
    return torch.where(codes > 7, -magnitude, magnitude)


def _magnitude(code: Tensor) -> Tensor:
    """Steps of 1/2 up to 2, of 1 up to 4, of 2 above."""
    code = code.float()
    return torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
