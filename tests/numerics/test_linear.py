"""Layers of one weight and their gradients against the oracle, which quantizes the same inputs by itself."""

import pytest
import torch
import torch.nn.functional as F

from te_inductor import explain, ops
from te_inductor.errors import DoubleBackwardError
from tests.oracle import casts as reference
from tests.support.layers import linears
from tests.support.oracle_layers import RECIPES, Calls, check, check_against_oracle, linear, through

pytestmark = pytest.mark.usefixtures("known_seeds")


thorough = pytest.mark.thorough


@pytest.mark.quick(
    "(33, 64, 48)-torch.float32-True-hybrid-aot_eager",
    "(140, 250, 256)-torch.bfloat16-True-block-te",
)
@pytest.mark.parametrize("backend", ["aot_eager", "te"])
@pytest.mark.parametrize(
    ("size", "dtype", "with_bias", "recipe"),
    [
        ((33, 64, 48), torch.float32, True, "hybrid"),
        pytest.param(*((64, 48, 128), torch.bfloat16, True, "options"), marks=thorough),
        pytest.param(*((16, 77, 130), torch.float32, False, "e4m3"), marks=thorough),
        ((33, 77, 48), torch.bfloat16, True, "rowwise"),
        pytest.param(*((17, 48, 130), torch.float32, False, "rowwise options"), marks=thorough),
        ((140, 250, 256), torch.bfloat16, True, "block"),
        pytest.param(*((130, 128, 240), torch.float32, False, "block options"), marks=thorough),
        ((70, 80, 144), torch.bfloat16, True, "mxfp8"),
        pytest.param(*((33, 96, 80), torch.float32, False, "mxfp8 options"), marks=thorough),
        ((70, 80, 144), torch.bfloat16, True, "nvfp4"),
        ((33, 96, 80), torch.bfloat16, True, "mxfp4"),
        pytest.param(*((33, 96, 80), torch.float32, True, "nvfp4 rows, 4 over 6"), marks=thorough),
        pytest.param(*((70, 80, 144), torch.bfloat16, False, "nvfp4 rows"), marks=thorough),
        pytest.param(*((70, 80, 144), torch.bfloat16, False, "nvfp4 4 over 6 options"), marks=thorough),
        pytest.param(*((33, 96, 80), torch.float32, False, "nvfp4 options"), marks=thorough),
    ],
    ids=str,
)
def test_compiled(backend, size, dtype, with_bias, recipe):
    check(through(backend), *size, dtype, with_bias, RECIPES[recipe])


def test_the_oracle_is_a_linear_layer():
    """The reference is autograd in float64: the oracle's gradients are those of its forward, up to quantization noise,
    which is at most 2**-4 (E4M3) and 2**-3 (E5M2) of each element that is no subnormal."""
    recipe = RECIPES["hybrid"]
    x, w, b = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(33, 70), (20, 70), (20,)])
    dy = torch.randn(33, 20, dtype=torch.float64)
    y = F.linear(x, w, b)
    y.backward(dy)
    with torch.no_grad():
        oracle = reference.linear(x, w, b, recipe, dy)
        total = (x.abs() @ w.abs().t(), dy.abs() @ w.abs(), dy.abs().t() @ x.abs())
    for expected, got, magnitude, relative in zip(
        (y, x.grad, w.grad), oracle[:3], total, (2**-4, 2**-3, 2**-3), strict=True
    ):
        bound = magnitude * ((1 + relative) * (1 + 2**-4) - 1) * (1 + 2**-6)
        assert ((got - expected).abs() <= bound + 1e-3).all()
        assert (got - expected).abs().max() > 0
    torch.testing.assert_close(oracle[3], b.grad)


ONE, BOTH = "quantize_delayed", "quantize_rowcol_delayed"  # casts of one copy and of both


def calls(x_grad: bool, weight_grad: bool, bias_grad: bool) -> tuple[list[str], list[str]]:
    x, weight, bias = torch.randn(33, 48), torch.randn(32, 48), torch.randn(32)
    for tensor, needs in ((x, x_grad), (weight, weight_grad), (bias, bias_grad)):
        tensor.requires_grad_(needs)
    with Calls() as forward:
        y = linear(x, weight, bias, RECIPES["hybrid"].slots())
    with Calls() as backward:
        if y.requires_grad:
            y.sum().backward()
    for tensor, needs in ((x, x_grad), (weight, weight_grad), (bias, bias_grad)):
        assert (tensor.grad is not None) == needs
    return sorted(forward.names), sorted(backward.names)


@pytest.mark.parametrize(
    ("grads", "forward", "backward"),
    [
        ((True, True, True), [BOTH, BOTH], [BOTH, "scaled_mm", "scaled_mm"]),
        ((False, True, True), [ONE, BOTH], [ONE, "scaled_mm"]),
        ((True, False, False), [ONE, BOTH], [ONE, "scaled_mm"]),
        ((False, False, True), [ONE, ONE], []),
        ((False, False, False), [ONE, ONE], []),
    ],
    ids=str,
)
def test_only_what_is_needed_is_quantized(grads, forward, backward):
    """A frozen weight needs no transposed x, an input without gradient no transposed weight; inference needs
    neither."""
    found = calls(*grads)
    for names, expected in zip(found, ([*forward, "scaled_mm"], backward), strict=True):
        casts = sum(name in (ONE, BOTH) for name in expected)
        assert names == ["current_scale"] * casts + expected  # each tensor's scale is found once


def test_no_grad_quantizes_no_transposes():
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    with torch.no_grad(), Calls() as seen:
        linear(x, weight, None, RECIPES["hybrid"].slots())
    assert sorted(seen.names) == ["current_scale"] * 2 + [ONE, ONE, "scaled_mm"]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 5), (1, 1)], ids=str)
def test_leading_dimensions(shape):
    """Leading dimensions are one long M: the result is the flat one, reshaped, bit for bit."""
    x = torch.randn(*shape, 48, requires_grad=True)
    weight, bias = torch.randn(32, 48, requires_grad=True), torch.randn(32)
    y = linear(x, weight, bias, RECIPES["hybrid"].slots())
    assert y.shape == (*shape, 32)
    dy = torch.randn_like(y)
    y.backward(dy)
    flat = x.detach().reshape(-1, 48).requires_grad_()
    y_flat = linear(flat, weight.detach(), bias, RECIPES["hybrid"].slots())
    y_flat.backward(dy.reshape(-1, 32))
    assert torch.equal(y.reshape(-1, 32), y_flat) and torch.equal(x.grad.reshape(-1, 48), flat.grad)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 16), (4, 16, 0), (4, 0, 16)])
def test_empty_stays_in_high_precision(m, n, k):
    x, weight, bias = torch.randn(m, k, requires_grad=True), torch.randn(n, k), torch.randn(n)
    report = explain(F.linear, x, weight, bias)
    assert {site.kernel for site in report.sites} == {"high_precision"}
    assert all("empty" in site.reason for site in report.sites)


def test_empty_batch_called():
    """A graph whose batch size is symbolic may meet an empty batch."""
    x = torch.randn(2, 0, 48, requires_grad=True)
    weight, bias = torch.randn(32, 48, requires_grad=True), torch.randn(32, requires_grad=True)
    y = linear(x, weight, bias, RECIPES["hybrid"].slots())
    y.sum().backward()
    assert y.shape == (2, 0, 32) and x.grad.shape == x.shape
    assert not weight.grad.any() and not bias.grad.any()


def test_strided_inputs():
    """A transposed weight and a strided x give what their contiguous copies give."""
    x, weight, dy = torch.randn(48, 33).t(), torch.randn(48, 64).t()[::2], torch.randn(32, 33).t()
    results = []
    for prepare in (lambda t: t, lambda t: t.contiguous()):
        a, b = (prepare(t).detach().requires_grad_() for t in (x, weight))
        y = linear(a, b, None, RECIPES["hybrid"].slots())
        y.backward(prepare(dy))
        results.append((y, a.grad, b.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_mixed_dtypes():
    """An fp32 weight under bf16 activations, as torch.autocast has it: gradients come in the dtype of their tensor."""
    x = torch.randn(16, 48, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.randn(32, 48, requires_grad=True), torch.randn(32, requires_grad=True)
    y = linear(x, weight, bias, RECIPES["hybrid"].slots())
    dy = torch.randn(16, 32).bfloat16()
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (torch.bfloat16,) * 2 + (torch.float32,) * 2
    check_against_oracle(x, weight, bias, RECIPES["hybrid"], dy, y)


def test_a_wider_input():
    """fp32 under torch.autocast: its gradient is rounded to the layer's dtype, as autocast's own, and comes in its
    own."""
    x, weight = torch.randn(16, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    [y] = linears(x, [weight], [], RECIPES["hybrid"].slots(), torch.bfloat16)
    y.backward(torch.randn(16, 32).bfloat16())
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert torch.equal(x.grad, x.grad.bfloat16().float()) and not torch.equal(
        weight.grad, weight.grad.bfloat16().float()
    )


def test_backward_twice():
    """retain_graph keeps what backward needs."""
    x, weight = torch.randn(16, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    y = linear(x, weight, None, RECIPES["hybrid"].slots()).square().sum()
    first = torch.autograd.grad(y, (x, weight), retain_graph=True)
    second = torch.autograd.grad(y, (x, weight))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_double_backward_is_refused():
    x, weight = torch.randn(16, 48, requires_grad=True), torch.randn(32, 48, requires_grad=True)
    y = linear(x, weight, None, RECIPES["hybrid"].slots()).square().sum()
    with pytest.raises(DoubleBackwardError, match="first-order"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("what", ["weight scale", "input scale", "gradient scale", "no wgrad", "no dgrad", "no bias"])
def test_the_bounds_catch(what, monkeypatch, no_caches):
    """Mutations of the layer: a scale that is off by one step of E4M3 (2**-4), and parts left out. Each must fail."""
    real = ops.scaled_mm

    def mutant(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha):
        if what == "weight scale" and gemm.name == "fprop":
            b_scale = b_scale * (1 + 2**-4)
        if what == "input scale" and gemm.name == "wgrad":
            b_scale = b_scale * (1 + 2**-4)
        if what == "gradient scale" and gemm.name == "dgrad":
            a_scale = a_scale * (1 + 2**-4)
        y = real(a, a_scale, b, b_scale, None if what == "no bias" else bias, gemm, out_dtype, alpha)
        return torch.zeros_like(y) if what == f"no {gemm.name}" else y

    monkeypatch.setattr("te_inductor.ops.gemm.scaled_mm", mutant)
    with pytest.raises(AssertionError, match="of the derived bound"):
        check(through("aot_eager"), 33, 64, 48, torch.bfloat16, True, RECIPES["hybrid"])
