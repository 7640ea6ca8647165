"""scaled_mm, eager and compiled, against the exact product, within the error that fp32 accumulation may make."""

import pytest
import torch

from te_inductor import ops
from te_inductor.lowerings import install
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import SCOPES
from te_inductor.runtime import reference
from tests.bounds import assert_same_values, assert_within, gemm_error

GEMM = Gemm("fprop")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [  # M, N, K, element of a, element of b, dtype of the output, dtype of the bias
    (1, 1, 1, "e4m3", "e4m3", torch.float32, torch.float32),
    (3, 5, 17, "e4m3", "e4m3", torch.bfloat16, torch.bfloat16),
    (33, 70, 130, "e5m2", "e4m3", torch.float32, None),
    (33, 70, 130, "e5m2", "e4m3", torch.float16, torch.float32),
    (16, 64, 4096, "e4m3", "e4m3", torch.bfloat16, torch.float32),
    (16, 64, 4096, "e4m3", "e4m3", torch.float32, torch.bfloat16),
]


def operands(m, n, k, element_a, element_b, scope="tensor"):
    a, a_scale = ops.quantize(torch.randn(m, k), Quantizer(element_a, scope=scope))
    b, b_scale = ops.quantize(torch.randn(n, k) / 7, Quantizer(element_b, scope=scope))
    return a, a_scale, b, b_scale


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scope", SCOPES)
def test_scaled_mm(scope, case, how):
    install()
    m, n, k, element_a, element_b, dtype, bias_dtype = case

    def function(a, a_scale, b, b_scale, bias):
        return torch.ops.te_inductor.scaled_mm(a, a_scale, b, b_scale, bias, GEMM, dtype)

    if how == "compiled":
        function = torch.compile(function, backend="inductor", fullgraph=True)
    a, a_scale, b, b_scale = operands(m, n, k, element_a, element_b, scope)
    bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
    y = function(a, a_scale, b, b_scale, bias)
    assert y.dtype == dtype and y.shape == (m, n) and y.is_contiguous()
    expected = reference.scaled_mm(a.double(), a_scale, b.double(), b_scale, bias)
    error = gemm_error(a.double(), a_scale, b.double(), b_scale, bias, dtype)
    assert_within(y, expected, error, "y")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_where_nothing_rounds(dtype):
    """Small integers: every sum is exact, so the result is."""
    a = torch.randint(-4, 5, (16, 32)).float().to(torch.float8_e4m3fn)
    b = torch.randint(-2, 3, (48, 32)).float().to(torch.float8_e5m2)
    scales = torch.tensor(0.5), torch.tensor(0.25)
    y = ops.scaled_mm(a, scales[0], b, scales[1], None, GEMM, dtype)
    expected = reference.scaled_mm(a.double(), scales[0], b.double(), scales[1])
    assert_same_values(y, expected.to(dtype).double())


@pytest.mark.parametrize("scope", SCOPES)
def test_not_finite_operands_stay_in_their_rows(scope):
    a, a_scale, b, b_scale = operands(4, 5, 16, "e4m3", "e4m3", scope)
    clean = ops.scaled_mm(a, a_scale, b, b_scale, None, GEMM, torch.float32)
    a.view(torch.uint8)[2, 3] = 0x7F  # NaN
    y = ops.scaled_mm(a, a_scale, b, b_scale, None, GEMM, torch.float32)
    assert y[2].isnan().all()
    rest = [0, 1, 3]
    assert torch.equal(y[rest], clean[rest])


@pytest.mark.parametrize("scope", SCOPES)
def test_padding_contributes_nothing(scope):
    """K = 17 is stored as 32; the product is the one of the 17."""
    a, a_scale, b, b_scale = operands(3, 5, 17, "e4m3", "e4m3", scope)
    y = reference.scaled_mm(a.double(), a_scale, b.double(), b_scale)
    bare = reference.scaled_mm(a.double()[:, :17], a_scale, b.double()[:, :17], b_scale)
    assert torch.equal(y, bare)


def test_contraction_sizes_must_agree():
    a, a_scale, b, b_scale = operands(4, 5, 16, "e4m3", "e4m3")

    def function(a, b):
        return torch.ops.te_inductor.scaled_mm(a, a_scale, b, b_scale, None, GEMM, torch.float32)

    with pytest.raises(Exception, match="contraction sizes 16 and 32"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(a, torch.cat([b, b], 1))
