"""What the eager runtime hands to torch._scaled_mm for scales of blocks, where a stand-in checks the library's rules.

Rules: cuBLAS documentation, "128-element 1D and 128x128 2D Block Scaling For FP8 Data Types"; PyTorch, ScaledBlas.cpp.
"""

import pytest
import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.numerics.scaled_products import TENSORS, ScaledProduct, by_library
from te_inductor.recipes import Gemm, Quantizer
from tests.bounds import assert_within, gemm_error
from tests.oracle import casts
from tests.support.contents import PAIRS

SIZES = [(1, 16, 16), (17, 48, 64), (256, 512, 1024), (130, 504, 768), (5, 300, 256), (384, 384, 512), (64, 7, 520)]


def each(x: Tensor, scale: Tensor) -> Tensor:
    """A scale for each element of x (R, K), from (R, K/128) contiguous along R, or (R/128, K/128) with rows of 16
    bytes."""
    rows, across = x.shape[0], -(-x.shape[1] // 128)
    if scale.shape[0] == rows:
        assert scale.shape[1] == across and scale.stride() == (1, rows)
        return scale.repeat_interleave(128, 1)
    assert scale.shape == (-(-rows // 128), across) and scale.is_contiguous() and across % 4 == 0
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)


def library(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool = False
):
    assert a.is_contiguous() and b.t().is_contiguous() and not use_fast_accum
    assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
    if a.shape[1] <= 128:  # one block: scales of rows, or 1
        if scale_a.dim():
            assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1]) and out_dtype == torch.bfloat16
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)
    assert a.shape[0] % 4 == 0
    wide_a, wide_b = (x.float() * each(x, scale) for x, scale in ((a, scale_a), (b.t(), scale_b.t())))
    return (wide_a @ wide_b.t()).to(out_dtype)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scopes", PAIRS[2:], ids=" by ".join)
def test_operands(scopes, out_dtype, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", library)
    gemm = Gemm("fprop", scopes=scopes)
    for m, n, k in SIZES:
        a, a_scale = ops.quantize(torch.randn(m, k), Quantizer("e4m3", scope=scopes[0]))
        b, b_scale = ops.quantize(torch.randn(n, k), Quantizer("e4m3", scope=scopes[1]))
        y = by_library(TENSORS, ScaledProduct(a, a_scale, b, b_scale, gemm, out_dtype))
        expected = casts.scaled_mm(a, a_scale, b, b_scale, None, gemm)
        assert y.shape == (m, n) and y.dtype == out_dtype
        assert_within(y, expected, gemm_error(a, a_scale, b, b_scale, None, out_dtype, gemm), f"{m} x {n} x {k}")
