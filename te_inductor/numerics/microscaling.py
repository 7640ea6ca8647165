"""MXFP8, MXFP4 and NVFP4 on matrices, in plain torch: codes of E2M1, two of them a byte, and the random Hadamard
transform. Their arithmetic is that of `arithmetic.py`; the transform is here and, for one value at a time, in
`lowerings/casts/microscaling.py`: here all 16 sums of a block are made at once, which one value of a kernel does not
want.

# Note [Emulated GEMMs]
Where no tensor core multiplies MXFP8 or NVFP4, a GEMM multiplies what the operands stand for, in bf16 on CUDA and in
fp32 on CPU, and sums in fp32. That is the format's own product but for the order of the sum: an E2M1 value times an
E4M3 scale has at most 6 significant bits, an FP8 value times a power of two at most 4, and bf16 holds 8. Its range ends
at 2**-133 and 2**128: what of MXFP8 lies below is rounded there (blocks with an amax below 2**-102 may hold some), and
a value that the cast rounded up to 2**128 is infinite. The fp32 factors of two-level scales stay out of the operands:
`alpha` multiplies the sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.numerics import arithmetic
from te_inductor.numerics.algebra import TORCH
from te_inductor.recipes.formats import HADAMARD, HADAMARD_SIGNS, Element


def cast_e2m1(value: Tensor, bits: Tensor | None = None) -> Tensor:
    """Codes (uint8, one a byte) of fp32 values, rounded to nearest, or as random `bits` say."""
    return arithmetic.cast_e2m1(TORCH, value, bits).to(torch.uint8)  # type: ignore[no-any-return]


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
    """(R, C) codes of four bits -> (R, C/2) bytes, the first in the low bits."""
    return arithmetic.pack(TORCH, codes[:, 0::2], codes[:, 1::2])  # type: ignore[no-any-return]


def stored(value: Tensor, element: Element, bits: Tensor | None = None) -> Tensor:
    """(R, C) fp32 values -> bytes of codes, one or two in each; rounded to nearest, or as random `bits` say."""
    codes = arithmetic.encode_value(TORCH, value, element, bits).to(torch.uint8)
    return pack(codes) if element.packed == 2 else codes


def values(data: Tensor, element: Element) -> Tensor:
    """Bytes of codes -> (R, C) values, fp32."""
    codes = torch.stack([data & 15, data >> 4], -1).flatten(1) if element.packed == 2 else data
    return arithmetic.decode_value(TORCH, codes, element)  # type: ignore[no-any-return]
