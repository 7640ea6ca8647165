"""Whole layers and models on the GPU: gradients, odd shapes, dtypes, modes, compile counts, CUDA graphs.

Recipes come by policy: these layers are small, and the size rule would leave them alone.
"""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from te_inductor import explain, targets
from te_inductor.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    QParams,
)
from tests.support.gpu_ops import check_linear, relative

RECIPES = {
    "current": Float8CurrentScaling(),
    "rowwise": Float8RowwiseScaling(),
    "rowwise hybrid": Float8RowwiseScaling(fp8_format=Format.HYBRID, power_2_scale=False),
    "block": Float8BlockScaling(),
    "block hybrid": Float8BlockScaling(fp8_format=Format.HYBRID, fp8_quant_fwd_inp=QParams(), w_block_scaling_dim=1),
    "block x": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
}


@pytest.fixture(autouse=True)
def only_where_the_library_takes_it(request):
    recipe = getattr(request.node, "callspec", None) and request.node.callspec.params.get("recipe")
    if (
        isinstance(recipe, Float8BlockScaling)
        and targets.Ability.BLOCK_SCALES not in targets.of(torch.device("cuda")).can
    ):
        pytest.skip("no GEMM with scales of blocks here")


recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


MODES = [(None, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
MODES += [("reduce-overhead", torch.bfloat16), ("max-autotune-no-cudagraphs", torch.bfloat16)]
SHAPES = [(64, 128, 256), (17, 48, 80), (100, 120, 136), (1, 32, 64)]
# K/128 of 1 to 8, padded or not; M that is no multiple of 4, that is one block of wgrad or several; one square of N or
# more.
BLOCK_SHAPES = [(64, 128, 256), (17, 240, 368), (130, 504, 768), (1, 128, 128), (512, 1024, 512)]


@pytest.mark.parametrize(("mode", "dtype"), MODES, ids=str)
@recipes
def test_a_linear_layer_and_its_gradients(recipe, mode, dtype):
    """What is left is the GEMM's own error, a rounding to `dtype` and, in fprop, fast accumulation; 2% of the norm would
    be a third of one rounding to E4M3."""
    options = {"policy": {"*": recipe}, "fallback": "error"} | ({"mode": mode} if mode else {})
    shapes = BLOCK_SHAPES if isinstance(recipe, Float8BlockScaling) else SHAPES
    for shape in shapes[:1] if mode == "max-autotune-no-cudagraphs" else shapes:  # autotuning takes 10 s a GEMM
        check_linear(*shape, dtype, recipe, options, 0.02)


@recipes
def test_an_fp8_gemm_runs(recipe):
    layer = nn.Linear(256, 128, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="te", options={"fallback": "error", "policy": {"*": recipe}})
    # more rows than the kernel for few rows takes
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(x).sum().backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::_scaled_mm", 0) == 3, calls
    assert {site.kernel for site in explain(layer, x, options={"policy": {"*": recipe}}).sites} == {"cublaslt"}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "recipe", [*RECIPES.values(), "delayed", "mxfp8", "nvfp4"], ids=[*RECIPES, "delayed", "mxfp8", "nvfp4"]
)
def test_any_number_of_rows_compiles_at_most_twice(recipe, train):
    """The rows are up to one block of wgrad's contraction and more, sizes that no block divides, and one graph for all
    but the first."""
    from te_inductor.backend import te

    compiles = []

    def backend(gm, inputs):
        compiles.append(gm)
        return te(gm, inputs, options={"fallback": "silent", "policy": {"*": recipe}})

    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda().bfloat16()
    exact = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rows in (20, 36, 128, 129, 300, 1024, 31, 33):
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        results = []
        for run, parameters in ((compiled, model), (exact, exact)):
            given = x.clone().requires_grad_(train)
            parameters.zero_grad()
            with torch.set_grad_enabled(train):
                y = run(given)
            if train:
                y.backward(dy)
                results.append([y, given.grad, *(parameter.grad for parameter in parameters.parameters())])
            else:
                results.append([y])
        # NVFP4 is off by 0.1 an operand; delayed scaling's first scales are those of no tensor.
        most = {"nvfp4": 0.4, "delayed": 0.4}.get(recipe, 0.2) if isinstance(recipe, str) else 0.2
        for actual, wanted in zip(*results, strict=True):
            assert relative(actual.detach(), wanted.detach().double().cpu()) < most, rows
    assert len(compiles) <= 2


@recipes
def test_cuda_graphs_skip_nothing(recipe):
    counters.clear()
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda().bfloat16()
    compiled = torch.compile(model, backend="te", options={"mode": "reduce-overhead", "policy": {"*": recipe}})
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()  # gradients lie in the graph's memory: none may live into the next step
        x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = compiled(x)
        assert relative(y.detach(), model(x).detach().double().cpu()) < 0.1
        y.sum().backward()
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
            assert relative(compiled(x), model(x).double().cpu()) < 0.1
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_small_sites_stay_in_high_precision():
    layer = nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16)
    [site, *_] = explain(layer, torch.randn(8192, 512, device="cuda").bfloat16()).sites
    assert site.kernel == "high_precision" and "too small for FP8 to pay: M=8192, N=512, K=512" in site.reason
    wide = nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
    kernels = {site.kernel for site in explain(wide, torch.randn(8192, 4096, device="cuda").bfloat16()).sites}
    assert kernels and all(kernel.startswith(("cublaslt", "cutlass:")) for kernel in kernels)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@recipes
def test_transformers_models(recipe, name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 128}
    if name == "llama":
        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **sizes, num_key_value_heads=2))
    elif name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, n_embd=128, n_layer=2, n_head=4)).eval()
    else:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**small, **sizes)).eval()
    model = model.cuda().bfloat16()
    ids = torch.randint(128, (2, 48), device="cuda")

    def loss_of(run):  # outside the model: transformers logs from some models' own losses, which breaks the graph
        return nn.functional.cross_entropy(run(ids).logits.float().flatten(0, 1), ids.flatten())

    high = loss_of(model)
    high.backward()
    expected = {key: p.grad.double().cpu() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    options = {"fallback": "error", "policy": {"*": recipe}}
    loss = loss_of(torch.compile(model, backend="te", options=options, fullgraph=True))
    loss.backward()
    assert abs(loss.item() / high.item() - 1) < 0.02
    for key, parameter in model.named_parameters():
        if key in expected and parameter.dim() == 2 and "embed" not in key and "wte" not in key:
            cosine = nn.functional.cosine_similarity(
                parameter.grad.double().cpu().flatten(), expected[key].flatten(), dim=0
            )
            assert cosine > 0.95, (key, cosine)
