"""How far a right answer may be from the float64 oracle, derived from the arithmetic. No constant here is tuned."""

import torch
from torch import Tensor

from te_inductor.recipes import Gemm
from tests.oracle import casts

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a step, relative
TINY = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}  # half a subnormal step


def gemm_error(
    a: Tensor,  # (M, K) values of an element
    a_scale_inv: Tensor,  # () or (M, 1), or of gemm.scopes[0]
    b: Tensor,  # (N, K) values of an element
    b_scale_inv: Tensor,  # () or (N, 1), or of gemm.scopes[1]
    bias: Tensor | None,
    out_dtype: torch.dtype,
    gemm: Gemm = Gemm("any"),  # noqa: B008 (a frozen constant)
    alpha: float | Tensor | None = None,
) -> Tensor:  # (M, N)
    """The largest error of an fp32 GEMM of low-precision operands.

    A product of two fp8 values (4 bits each) is exact in fp32. Summing K of them in any order rounds at most K - 1
    times, each by a relative 2**-24 of a partial sum that is at most S = sum |a||b| [Higham, Accuracy and Stability,
    eq. 4.4]. The scales cost two more roundings; their product may round as a subnormal. Then the result is rounded to
    `out_dtype`, the bias is, and their sum is.

    With scales of blocks, applied to operands or to partial sums, each product is rounded at most three times: its two
    operands (or its partial sum twice) and itself. An operand that is scaled may round as a subnormal, which its
    partner in the product multiplies. `alpha` multiplies the sum, and rounds once more."""
    u, out = UNIT[torch.float32], UNIT[out_dtype]
    magnitudes, total = magnitudes_of(a, a_scale_inv, b, b_scale_inv, gemm)
    error = (a.shape[1] + 2) * u * total + TINY[torch.float32] * (magnitudes + 1)
    if alpha is not None:
        error = (error + u * (total + error)) * alpha + TINY[torch.float32]
    result = casts.scaled_mm(a, a_scale_inv, b, b_scale_inv, None, gemm, alpha).abs()
    error = (error + out * (result + error) + TINY[out_dtype]) * (1 + 2**-10)  # second order of K u, K <= 4096
    if bias is None:
        return error
    bias = bias.double().abs()
    error = error + out * bias
    return error + out * (result + bias + error)


def magnitudes_of(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    gemm: Gemm = Gemm("any"),  # noqa: B008
) -> tuple[Tensor, Tensor]:  # both (M, N)
    """What an absolute error in each scale is multiplied by, and the sum of magnitudes of the scaled products."""
    a, b = a.double().abs(), b.double().abs()
    total = casts.scaled_mm(a, a_scale_inv, b, b_scale_inv, None, gemm)
    if not gemm.blocked:
        return a @ b.t(), total
    wide_a = casts.dequantize(a, a_scale_inv, gemm.scopes[0]).sum(1)
    wide_b = casts.dequantize(b, b_scale_inv, gemm.scopes[1]).sum(1)
    return wide_a[:, None] + wide_b[None, :] + a.shape[1], total


# The values of codes, from OCP's Microscaling Formats Specification, revision 1.0: an exponent of 0 has no leading bit.
FP6 = {"e3m2": (2, -2), "e2m3": (3, 0)}  # bits of the mantissa, exponent of the smallest normal value


def values_of(data: Tensor, element: str = "e2m1") -> Tensor:
    """The values of a stored copy as float64; bytes are two of E2M1 each, the first in the low bits, or one of FP6."""
    if data.dtype != torch.uint8:
        return data.double()
    if element in FP6:
        bits, smallest = FP6[element]
        pairs = [divmod(code, 2**bits) for code in range(32)]
        found = [((e > 0) + m / 2**bits) * 2.0 ** (smallest + max(e - 1, 0)) for e, m in pairs]
        magnitudes = torch.tensor(found, dtype=torch.float64)
        return torch.cat([magnitudes, -magnitudes])[data.long()]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    table = torch.cat([magnitudes, -magnitudes])
    return table[torch.stack([data & 15, data >> 4], -1).flatten(1).long()]


def scales_of(scale_inv: Tensor) -> Tensor:
    """The values of stored scales as float64; bytes are E8M0."""
    if scale_inv.dtype != torch.uint8:
        return scale_inv.double()
    table = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [torch.nan], dtype=torch.float64)
    return table[scale_inv.long()]


def sum_error(x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The largest error of an fp32 sum over the rows of x, rounded to `out_dtype`."""
    total = x.double().abs().sum(0)
    error = x.shape[0] * UNIT[torch.float32] * total
    return error + UNIT[out_dtype] * (x.double().sum(0).abs() + error)


def assert_within(actual: Tensor, expected: Tensor, error: Tensor, what: str) -> None:
    difference = (actual.double() - expected).abs()
    worst = (difference - error).max()
    assert worst <= 0, f"{what}: off by {(difference / error).max():.3g} of the derived bound"


def assert_same_values(data: Tensor, expected: Tensor) -> None:
    """Bit for bit, except that any NaN is as good as another. `expected` is float64."""
    actual = data.double()
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in different places"
    actual, expected = actual.nan_to_num(0.0), expected.nan_to_num(0.0)
    assert torch.equal(actual, expected), f"{int((actual != expected).sum())} of {expected.numel()} values differ"
    assert torch.equal(actual.signbit(), expected.signbit()), "zeros of different sign"
