"""scaled_mm, eager and compiled, against the exact product, within the error that fp32 accumulation may make."""

import pytest
import torch

from te_inductor import ops
from te_inductor.lowerings import install
from te_inductor.recipes import Gemm, Quantizer
from tests.bounds import assert_same_values, assert_within, gemm_error
from tests.oracle import casts
from tests.support.contents import PAIRS

GEMM = Gemm("fprop")
pairs = pytest.mark.parametrize("scopes", PAIRS, ids=" by ".join)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [  # M, N, K, element of a, element of b, dtype of the output, dtype of the bias
    (1, 1, 1, "e4m3", "e4m3", torch.float32, torch.float32),
    (3, 5, 17, "e4m3", "e4m3", torch.bfloat16, torch.bfloat16),
    (33, 70, 130, "e5m2", "e4m3", torch.float32, None),
    (33, 70, 130, "e5m2", "e4m3", torch.float16, torch.float32),
    (16, 64, 4096, "e4m3", "e4m3", torch.bfloat16, torch.float32),
    (16, 64, 4096, "e4m3", "e4m3", torch.float32, torch.bfloat16),
]


def operands(m, n, k, element_a, element_b, scopes=("tensor", "tensor")):
    a, a_scale = ops.quantize(torch.randn(m, k), Quantizer(element_a, scope=scopes[0]))
    b, b_scale = ops.quantize(torch.randn(n, k) / 7, Quantizer(element_b, scope=scopes[1]))
    return a, a_scale, b, b_scale


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pairs
def test_scaled_mm(scopes, case, how):
    install()
    gemm = Gemm("fprop", scopes=scopes)
    m, n, k, element_a, element_b, dtype, bias_dtype = case

    def function(a, a_scale, b, b_scale, bias):
        return torch.ops.te_inductor.scaled_mm(a, a_scale, b, b_scale, bias, gemm, dtype)

    if how == "compiled":
        function = torch.compile(function, backend="inductor", fullgraph=True)
    a, a_scale, b, b_scale = operands(m, n, k, element_a, element_b, scopes)
    bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
    y = function(a, a_scale, b, b_scale, bias)
    assert y.dtype == dtype and y.shape == (m, n) and y.is_contiguous()
    expected = casts.scaled_mm(a.double(), a_scale, b.double(), b_scale, bias, gemm)
    error = gemm_error(a.double(), a_scale, b.double(), b_scale, bias, dtype, gemm)
    assert_within(y, expected, error, "y")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_where_nothing_rounds(dtype):
    """Small integers: every sum is exact, so the result is."""
    a = torch.randint(-4, 5, (16, 32)).float().to(torch.float8_e4m3fn)
    b = torch.randint(-2, 3, (48, 32)).float().to(torch.float8_e5m2)
    scales = torch.tensor(0.5), torch.tensor(0.25)
    y = ops.scaled_mm(a, scales[0], b, scales[1], None, GEMM, dtype)
    expected = casts.scaled_mm(a.double(), scales[0], b.double(), scales[1])
    assert_same_values(y, expected.to(dtype).double())


@pairs
def test_not_finite_operands_stay_in_their_rows(scopes):
    a, a_scale, b, b_scale = operands(4, 5, 16, "e4m3", "e4m3", scopes)
    gemm = Gemm("fprop", scopes=scopes)
    clean = ops.scaled_mm(a, a_scale, b, b_scale, None, gemm, torch.float32)
    a.view(torch.uint8)[2, 3] = 0x7F  # NaN
    y = ops.scaled_mm(a, a_scale, b, b_scale, None, gemm, torch.float32)
    assert y[2].isnan().all()
    rest = [0, 1, 3]
    assert torch.equal(y[rest], clean[rest])


@pairs
def test_padding_contributes_nothing(scopes):
    """K = 17 is stored as 32, or 128; the product is the one of the 17."""
    a, a_scale, b, b_scale = operands(3, 5, 17, "e4m3", "e4m3", scopes)
    gemm = Gemm("fprop", scopes=scopes)
    assert a.shape[1] == b.shape[1] == (128 if gemm.blocked else 32)
    y = casts.scaled_mm(a.double(), a_scale, b.double(), b_scale, None, gemm)
    bare = casts.scaled_mm(a.double()[:, :17], a_scale, b.double()[:, :17], b_scale, None, gemm)
    torch.testing.assert_close(y, bare, rtol=17 * 2**-52, atol=0)  # the order of float64 sums


def test_each_block_has_its_scale():
    """Blocks of K, and squares of N, that are 2**20 apart: one scale used for another would be off by that."""
    a, b = torch.randn(5, 300), torch.randn(260, 300)
    for block in (a[:, :128], a[:, 256:], b[:128, 128:256], b[256:, :128]):
        block *= 2**20
    for scopes in PAIRS[2:]:
        quantizers = [Quantizer("e4m3", power_2_scale=True, scope=scope) for scope in scopes]
        (low_a, a_scale), (low_b, b_scale) = ops.quantize(a, quantizers[0]), ops.quantize(b, quantizers[1])
        y = ops.scaled_mm(low_a, a_scale, low_b, b_scale, None, Gemm("fprop", scopes=scopes), torch.float32)
        relative = (y.double() - a.double() @ b.double().t()).abs() / (a.double().abs() @ b.double().abs().t())
        assert relative.max() < 2 * 2**-4 * (1 + 2**-3)  # each operand is off by half a step of E4M3, 2**-4, at most


def test_contraction_sizes_must_agree():
    a, a_scale, b, b_scale = operands(4, 5, 16, "e4m3", "e4m3")

    def function(a, b):
        return torch.ops.te_inductor.scaled_mm(a, a_scale, b, b_scale, None, GEMM, torch.float32)

    with pytest.raises(Exception, match="contraction sizes 16 and 32"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(a, torch.cat([b, b], 1))
