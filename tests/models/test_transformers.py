"""Whole models: every linear layer is found, each computes what the oracle computes, and so does the model.

Two comparisons, since a whole model has no tight elementwise bound: a sum that fp32 rounds the other way moves an
activation by 1e-7, that now and then flips the rounding of a value of the next layer, by a whole step of the format,
and two layers on the two runs round independently.

**Layer by layer (tight).** `zoo.tap` records what each layer of the compiled model saw: x, y, dy, dx. On the same x and
dy the oracle makes the same low-precision operands, bit for bit, so y, dx, dw and db may differ by the accumulation
error of an fp32 GEMM (`bounds.gemm_error`) and nothing else. A wrong scale or a missing GEMM is off by 1e5 of these.

**End to end (statistical).** Let e = oracle - exact, where `exact` is the model in float64 and `oracle` the same with
quantized layers, and e' = te - exact. The oracle and te are one algorithm whose roundings are decided by inputs that
differ in the last fp32 bits, so e and e' are draws from one distribution, between identical (no rounding flipped) and
independent (all did). By the triangle inequality ||te - oracle|| = ||e' - e|| <= ||e'|| + ||e||, about 2 ||e|| in the worst
case, sqrt(2) ||e|| for independent draws. SLACK is for the fluctuation of a norm from draw to draw: the norm of n
independent terms fluctuates by 1 / sqrt(2n), and n, the number of independent roundings behind any of these tensors, is at
least one row of 64 values: 9%, and three of those.

**Absolute.** Rounding to nearest with m mantissa bits moves v, 1 <= |v| < 2, by a uniform error within 2**-(m+1), rms
2**-(m+1) / sqrt(3). With the density of mantissas proportional to 1/v, E[v**-2] = (1 - 1/4) / (2 ln 2) = 0.541, so
the relative rms is q = 2**-(m+1) / sqrt(3) * 0.735: 2.7% for E4M3, 5.3% for E5M2. A GEMM of two such operands with
independent errors has relative noise sqrt(qa**2 + qb**2): 3.8% forward, 5.9% backward. Subnormals add a little, zeros
and power-of-two values take some away. Upstream of each tensor are at most three GEMMs of each layer; normalization
and residual connections pass relative noise on with a factor of at most about 1, and independent noises add in
squares, so ||e|| / ||exact|| <= sqrt(3 * layers) * 5.9%. The output comes out of a GEMM, so its noise is at least
3.8%, and the gradient of a linear layer's weight out of a wgrad: at least 5.9%. (Other tensors may lack noise: db =
sum dy of the last layer.)
"""

import itertools
import math

import pytest
import torch

from te_inductor import explain, ops
from tests.bounds import assert_within, gemm_error, sum_error
from tests.models import zoo
from tests.oracle import casts
from tests.support.format_errors import BACKWARD, FORWARD, SLACK

# Llama alone in make test: it has every kind of layer but biases.
thorough = pytest.mark.thorough
every_model = pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=thorough) for name in zoo.MODELS]
)


def compile_te(model):
    options = {"recipe": zoo.RECIPE, "fallback": "error"}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


def check_layers(layers: dict[str, torch.nn.Module]) -> None:
    for path, module in layers.items():
        n, k = module.tap_y.shape[-1], module.tap_x.shape[-1]
        weight, dw = zoo.weight_of(module, module.weight.detach()), zoo.weight_of(module, module.weight.grad)
        bias = None if module.bias is None else module.bias.detach()
        x, y = module.seen_x.reshape(-1, k), module.seen_y.reshape(-1, n)
        dx, dy = module.tap_x.grad.reshape(-1, k), module.tap_y.grad.reshape(-1, n)
        expected = casts.linear(x, weight, bias, zoo.RECIPE, dy)
        slots = zoo.RECIPE.slots()
        x_row, x_scale, x_col, _ = casts.quantize_rowcol(x, slots.input)
        w_row, w_scale, w_col, _ = casts.quantize_rowcol(weight, slots.weight)
        g_row, g_scale, g_col, _ = casts.quantize_rowcol(dy, slots.grad_output)
        assert_within(y, expected[0], gemm_error(x_row, x_scale, w_row, w_scale, bias, y.dtype), f"y of {path}")
        assert_within(dx, expected[1], gemm_error(g_row, g_scale, w_col, w_scale, None, dx.dtype), f"dx of {path}")
        assert_within(dw, expected[2], gemm_error(g_col, g_scale, x_col, x_scale, None, dw.dtype), f"dw of {path}")
        if bias is not None:
            assert_within(module.bias.grad, expected[3], sum_error(dy, torch.float32), f"db of {path}")


def check_model(model, inputs, te: zoo.Run, high: zoo.Run | None = None) -> None:
    """End to end and absolute. `high` is the model's own run without te, where its dtype is coarser than fp32: that
    run's distance from `exact` is noise that te has as well."""
    exact, oracle = (zoo.run(copy, inputs, torch.float64).tensors() for copy in (zoo.exact(model), zoo.oracle(model)))
    layers = zoo.linears(model)
    least = {f"gradient of {path}.weight": BACKWARD for path in layers} | {"output": FORWARD}
    assert te.tensors().keys() == exact.keys() == oracle.keys()
    largest = max(grad.norm() for what, grad in exact.items() if what != "output")
    for what, got in te.tensors().items():
        noise, size = (oracle[what] - exact[what]).norm(), exact[what].norm()
        assert got.isfinite().all(), what
        if size < 1e-12 * largest:  # zero by construction: softmax does not see a key's bias
            assert max(got.norm(), oracle[what].norm()) < 1e-5 * largest, what
            continue
        floor = 1e-5 * size if high is None else (high.tensors()[what] - exact[what]).norm()
        distance = (got - oracle[what]).norm()
        assert distance <= 2 * SLACK * noise + floor, f"{what}: {distance / noise:.3g} of the quantization noise away"
        relative = noise / size
        assert relative <= math.sqrt(3 * len(layers)) * BACKWARD, f"{what}: oracle's noise is {relative:.2%}"
        assert relative >= least.get(what, 0.0) / SLACK, f"{what}: oracle's noise is {relative:.2%}"
        if relative > 1e-6:
            assert (got - exact[what]).norm() >= noise / 2 / SLACK, (
                f"{what}: nearer to the exact result than FP8 can be"
            )


@every_model
def test_every_linear_is_found(name):
    model, inputs = zoo.build(name)
    inputs = {key: value.requires_grad_() for key, value in inputs.items()}
    report = explain(model, **inputs)
    assert report.failure is None and not report.fallbacks
    found = sorted((site.fqn, site.gemm) for site in report.sites)
    assert found == sorted((path, gemm) for path in zoo.linears(model) for gemm in ("fprop", "dgrad", "wgrad"))
    assert {site.recipe for site in report.sites} == {"current"}


@thorough
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert"])
def test_compiled(name):
    """One layer, as a second one is the same C++ once more; ViT's layers are BERT's, and T5's are Llama's with ReLU.
    `test_traced` has all of it."""
    model, inputs = zoo.build(name, layers=1)
    tapped = zoo.exact(model).float()
    layers = zoo.tap(tapped, inputs)
    te = zoo.run(tapped, inputs, torch.float32, compile_te(tapped))
    check_layers(layers)
    check_model(model, inputs, te)


@every_model
def test_traced(name):
    """The model as it is, without taps, and with the eager kernels in place of generated code."""
    model, inputs = zoo.build(name)
    te = zoo.run(model, inputs, torch.float32, torch.compile(model, backend=zoo.uncompiled, fullgraph=True))
    check_model(model, inputs, te)


@thorough
def test_compiled_bf16():
    """The model as it is, in bf16; generated code keeps fused values in fp32 where eager code rounds them to bf16."""
    model, inputs = zoo.build("llama", layers=1)
    model = model.bfloat16()
    inputs = {name: value.bfloat16() for name, value in inputs.items()}
    te = zoo.run(model, inputs, torch.bfloat16, compile_te(model))
    check_model(model, inputs, te, zoo.run(model, inputs, torch.bfloat16))


STEP = 2.0**-4  # the smallest error of a scale that E4M3's own rounding could hide: half its step of 2**-3


@thorough
@pytest.mark.parametrize(("how", "what"), list(itertools.product(("scale", "dropped"), ("fprop", "dgrad", "wgrad"))))
def test_the_layer_bounds_catch(how, what, monkeypatch, no_caches):
    """One GEMM of one layer of the model with a scale that is 6% wrong, or with its result dropped."""
    real, seen = ops.scaled_mm, []

    def mutant(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha=None):
        seen.append(gemm.name)
        if gemm.name != what or seen.count(what) % len(layers) != 5:  # AOTAutograd traces the forward twice
            return real(a, a_scale, b, b_scale, bias, gemm, out_dtype, alpha)
        y = real(a, a_scale, b, b_scale * (1 + STEP), bias, gemm, out_dtype, alpha)
        return torch.zeros_like(y) if how == "dropped" else y

    monkeypatch.setattr("te_inductor.ops.gemm.scaled_mm", mutant)
    model, inputs = zoo.build("llama")
    layers = zoo.tap(model, inputs)
    zoo.run(model, inputs, torch.float32, torch.compile(model, backend=zoo.uncompiled, fullgraph=True))
    with pytest.raises(AssertionError, match="of the derived bound"):
        check_layers(layers)


@pytest.mark.thorough
def test_the_model_bounds_catch(monkeypatch, no_caches):
    """A dropped wgrad is a distance of size / noise, and a model in high precision has no noise."""
    model, inputs = zoo.build("llama")
    with pytest.raises(AssertionError, match="than FP8 can be"):
        check_model(model, inputs, zoo.run(model, inputs, torch.float32))
    te = zoo.run(model, inputs, torch.float32, torch.compile(model, backend=zoo.uncompiled, fullgraph=True))
    check_model(model, inputs, te)
    te.parameter_grads["model.layers.0.mlp.up_proj.weight"].zero_()
    with pytest.raises(AssertionError, match="of the quantization noise away"):
        check_model(model, inputs, te)
