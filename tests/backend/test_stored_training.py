"""Training with a weight as `quantize_` is going to store it: the numbers before are those after, bit for bit."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import te_inductor
from te_inductor import explain, ops
from te_inductor.errors import RecipeError
from te_inductor.numerics import nvfp4
from te_inductor.ops.stored_weight import StoredWeight, store
from te_inductor.recipes import NVFP4WeightOnly

pytestmark = pytest.mark.usefixtures("without_tracing")

# The recipe of training, its backward, and the recipe that stores the weights.
WAYS = {
    "nvfp4_weight_only": ("nvfp4_weight_only", None, "nvfp4_weight_only"),
    "exact": (NVFP4WeightOnly(prefill="exact"), None, NVFP4WeightOnly(prefill="exact")),
    "rowwise": ("rowwise", "high_precision", "rowwise"),
    "block": ("block", "dequantized", "block"),
}


class Model(nn.Module):
    """Log-probabilities of words behind a norm, an activation and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(128, 128), nn.RMSNorm(128)
        self.gate_proj, self.up_proj = nn.Linear(128, 256), nn.Linear(128, 256)  # which have one scale of the tensor
        self.down_proj, self.head = nn.Linear(256, 128, bias=False), nn.Linear(128, 128)

    def forward(self, ids):
        x = self.words(ids)
        h = self.norm(x)
        return self.head(x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))).log_softmax(-1)


class Layers(nn.Module):
    """Layers, and between them what rounds alike in any code."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(128, 256), nn.Linear(128, 256)
        self.down_proj = nn.Linear(256, 128, bias=False)

    def forward(self, x):
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))


def compiled(model: nn.Module, recipe: object, backward: object = None):
    options = {"policy": {"*": recipe}, "backward": backward, "fallback": "silent"}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


def check(way: str, make: type[nn.Module], ids: torch.Tensor, dtype: torch.dtype, eager_too: bool = True) -> None:
    recipe, backward, stored = WAYS[way]
    torch.manual_seed(0)
    model = make().to(dtype)
    run, optimizer = compiled(model, recipe, backward), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        run(ids).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    before = run(ids)
    with torch.no_grad():
        evaluated = run(ids)
    te_inductor.quantize_(model, stored, fallback="error")
    assert isinstance(model.up_proj.weight, StoredWeight)
    with torch.no_grad():
        eager, after = model(ids), compiled(model, stored)(ids)
    assert torch.equal(before, evaluated) and torch.equal(before, after)
    assert not eager_too or torch.equal(before, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_stay(way, dtype):
    check(way, Model, torch.randint(128, (4, 8)), dtype)


@pytest.mark.codegen
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("nvfp4_weight_only", torch.float32),
        pytest.param("nvfp4_weight_only", torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param("rowwise", torch.float32, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_the_numbers_stay_in_generated_code(way, dtype):
    """Generated code keeps in fp32 what eager code rounds to bf16 between two operators."""
    check(way, Layers, torch.randn(32, 128).to(dtype), dtype, eager_too=dtype is torch.float32)


def test_gradients_pass_the_cast():
    """dx is that of the stored values, dw that of the product's other operand."""
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((24, 64), (48, 64), (48,)))
    y = ops.nvfp4_trained(x, weight, bias, "fp8", torch.float32)
    y.backward(dy := torch.randn_like(y))
    values = store(weight.detach(), NVFP4WeightOnly()).dequantize()
    expected = [one.detach().clone().requires_grad_() for one in (x, values, bias)]
    F.linear(*expected).backward(dy)
    for one, other in zip((x, weight, bias), expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert torch.equal(weight.grad, dy.t() @ x)


def test_what_each_forward_stores_is_what_quantize_stores():
    for shape in ((48, 64), (3, 40), (1, 16)):
        weight = torch.randn(shape)
        weight[0, 0] = 0.0
        codes, block_scale, tensor_scale = nvfp4.quantize(weight)
        expected = nvfp4.store(codes), block_scale, tensor_scale
        for one, other in zip(ops.nvfp4_store(weight, None), expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one.float(), other.float())


@pytest.mark.thorough
def test_a_process_that_trains_has_the_kernels_of_stored_weights():
    """Its generated code may come from a cache, without a lowering that would bring them."""
    lines = (
        "import sys, torch",
        "m = torch.nn.Linear(64, 48)",
        "run = torch.compile(m, backend='te', options={'policy': {'*': 'nvfp4_weight_only'}})",
        "run(torch.randn(4, 64)).sum().backward()",
        "assert 'te_inductor.templates.triton.stored_ops' in sys.modules",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_trace_keeps_no_tensor_for_later_calls():
    """What is traced with fake tensors, as by an export, leaves none in the place of a constant."""
    weight = torch.randn(4, 32)
    nvfp4._kept_tables.cache_clear()
    expected = [one.clone() for one in nvfp4.stored(weight, None)]
    nvfp4._kept_tables.cache_clear()
    traced = make_fx(lambda weight: nvfp4.stored(weight, None), tracing_mode="fake")(weight)
    for found in (traced(weight), nvfp4.stored(weight, None)):
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, expected, strict=True))


def test_reports_and_refusals():
    x = torch.randn(4, 64)
    report = explain(nn.Linear(64, 48), x, options={"recipe": "nvfp4_weight_only", "backward": "dequantized"})
    assert report.sites[0].recipe == "nvfp4_weight_only" and report.sites[0].kernel != "high_precision"
    assert "each forward stores the weight" in str(report) and "goes straight through the cast" in str(report)
    more = {"wgrad": "main_grad", "weights": "once"}
    unmet = explain(nn.Linear(64, 48), x, options={"recipe": "nvfp4_weight_only", **more}).unmet
    assert {one.option for one in unmet} == set(more)
    frozen = nn.Linear(64, 48).requires_grad_(False)
    [site] = explain(frozen, x, options={"recipe": "nvfp4_weight_only", "fallback": "silent"}).sites
    assert site.kernel == "high_precision" and "does not learn; te_inductor.quantize_(model" in site.reason

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 48))

        def forward(self, x):
            return x @ self.weight

    [site, *_] = explain(Product(), x, options={"recipe": "nvfp4_weight_only", "fallback": "silent"}).sites
    assert "F.linear alone trains" in site.reason
    with pytest.raises(RecipeError):
        te_inductor.quantize_(nn.Linear(64, 48), NVFP4WeightOnly(backward="dequantized"))
