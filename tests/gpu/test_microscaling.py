"""MXFP8, MXFP4 and NVFP4 with its variants on the GPU, where they are emulated: casts bit for bit, random bits too;
products; layers, CUDA graphs."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from te_inductor import explain, ops
from te_inductor.lowerings import install
from te_inductor.recipes import Format, MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Quantizer
from te_inductor.recipes.formats import SCOPES
from tests.bounds import assert_same_values, assert_within, gemm_error, magnitudes_of, scales_of, values_of
from tests.oracle import casts, microscaling
from tests.support.contents import CONTENTS
from tests.support.gpu_ops import SIZES, check_linear
from tests.support.microscaled_casts import PAIRS, QUANTIZERS, STOCHASTIC, amaxes, check, check_both, gemm_of
from tests.support.nvfp4_casts import QUANTIZERS as CHOSEN
from tests.support.nvfp4_casts import check_rows, copies_of_rows, factors_of_rows

pytestmark = pytest.mark.usefixtures("compile_every_size")

SEED = 77
RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 options": MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "nvfp4 4 over 6": NVFP4BlockScaling(
        nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="none", nvfp4_4over6_err_mode="MSE"
    ),
    "nvfp4 rows": NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
    "nvfp4 rows, 4 over 6": NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, nvfp4_4over6="all"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
runs = pytest.mark.parametrize("run", ["eager", "compiled"])


def function_of(op, run):
    install()
    return torch.compile(lambda *arguments: op(*arguments), backend="te", dynamic=False) if run == "compiled" else op


def on_gpu(function):
    """Runs on poisoned memory: what the kernel does not write stays NaN."""

    def call(x, quantizer, *tensors):
        poison = torch.full((4 * x.numel() + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
        del poison
        moved = (tensor if tensor is None else tensor.cuda() for tensor in tensors)
        return tuple(result.cpu() for result in function(x.cuda(), quantizer, *moved))

    return call


@runs
@pytest.mark.parametrize("quantizer", QUANTIZERS + CHOSEN, ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_casts(content, quantizer, run):
    both = [on_gpu(function_of(op, run)) for op in (ops.quantize, ops.quantize_rowcol)]
    for size in SIZES:
        check_both(CONTENTS[content](*size).bfloat16(), quantizer, *both)


@runs
@factors_of_rows
@pytest.mark.parametrize("content", CONTENTS)
def test_casts_of_rows(content, quantizer, run):
    def made(x, quantizer):
        return [tensor for copy in copies_of_rows(x, quantizer) for tensor in copy]

    def copies(x, quantizer):
        results = function(x, quantizer)
        return results[:3], results[3:]

    function = on_gpu(function_of(made, run))
    for size in SIZES:
        check_rows(CONTENTS[content](*size).bfloat16(), quantizer, copies)


@runs
@pytest.mark.parametrize("content", CONTENTS)
def test_random_bits_and_the_transform(content, run):
    quantize, hadamard = on_gpu(function_of(ops.quantize, run)), function_of(ops.hadamard, run)
    for size in [(33, 70), (64, 96)]:
        for x in (made := CONTENTS[content](*size).bfloat16(), made.t()):
            amax, number = amaxes(x, STOCHASTIC)
            found = quantize(x, STOCHASTIC, amax, torch.tensor(SEED))
            check(x, STOCHASTIC, found, casts.quantize(x, STOCHASTIC, number, SEED))
            assert_same_values(hadamard(x.cuda()).cpu(), microscaling.hadamard(x))


@runs
@pytest.mark.parametrize("scopes", PAIRS, ids=" by ".join)
def test_products(scopes, run):
    """bf16 products are exact; a tensor core may truncate where it adds, which is twice the error of rounding."""
    gemm = gemm_of(scopes)
    two_level = gemm.granularities[0].two_level
    alpha = torch.tensor(0.3, device="cuda") if two_level else None
    function = function_of(lambda *arguments: ops.scaled_mm(*arguments[:-1], gemm, torch.float32, arguments[-1]), run)
    for m, n, k in [(1, 16, 16), (17, 48, 64), (129, 50, 96), (256, 512, 4096)]:
        operands = []
        for rows, scope in zip((m, n), scopes, strict=True):
            quantizer, x = Quantizer(SCOPES[scope].elements[0], scope=scope), torch.randn(rows, k)
            operands += ops.quantize(x, quantizer, ops.tensor_amax(x) if two_level else None)
        exact = [values_of(operands[0]), scales_of(operands[1]), values_of(operands[2]), scales_of(operands[3])]
        y = function(*(operand.cuda() for operand in operands), None, alpha).cpu()
        factor = None if alpha is None else alpha.item()
        _, magnitudes = magnitudes_of(*exact, gemm)
        error = gemm_error(*exact, None, torch.float32, gemm, factor) + 2 * k * 2.0**-23 * magnitudes * (factor or 1.0)
        assert_within(y, casts.scaled_mm(*exact, None, gemm, factor), error, f"{m} x {n} x {k}")


@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune-no-cudagraphs"])
@recipes
def test_a_linear_layer_and_its_gradients(recipe, mode, one_seed):
    options = {"recipe": recipe, "fallback": "silent"} | ({"mode": mode} if mode else {})
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if mode is None else (torch.bfloat16,):
        check_linear(70, 80, 144, dtype, recipe, options, 0.01, (5, 5))


@recipes
def test_what_runs(recipe):
    layer = nn.Linear(256, 128, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": recipe, "fallback": "silent"}
    compiled = torch.compile(layer, backend="te", options=options)
    compiled(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(x).sum().backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::mm", 0) == 3 and "aten::_scaled_mm" not in calls, calls
    sites = explain(layer, x, options=options).sites
    assert {site.kernel for site in sites} == {"emulated"} and "compute capability" in sites[0].reason


@recipes
def test_cuda_graphs_replay_with_other_random_bits(recipe):
    """No skips; gradients differ from step to step where they are rounded at random, and torch's seed decides them."""
    counters.clear()
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda().bfloat16()
    options = {"mode": "reduce-overhead", "recipe": recipe, "fallback": "silent"}
    compiled = torch.compile(model, backend="te", options=options)
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        compiled(x).float().square().sum().backward()
        return model[0].weight.grad.clone()

    for _ in range(3):
        step()
    torch.manual_seed(1)
    first, second = step(), step()
    torch.manual_seed(1)
    assert torch.equal(step(), first)
    assert torch.equal(first, second) == (not recipe.slots().grad_output.stochastic)
    assert counters["inductor"]["cudagraph_skips"] == 0
