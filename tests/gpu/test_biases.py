"""Bias gradients in the kernels that cast dy, ReLU's mask found again, and gradients through stored FP8 weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_inductor
from te_inductor.fused import column_sums
from te_inductor.recipes import Quantizer
from te_inductor.runtime.eager import dense

BF16 = torch.bfloat16


class Mlp(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": BF16}
        self.norm, self.function = nn.LayerNorm(1536, **made), function
        self.up, self.down = nn.Linear(1536, 6144, **made), nn.Linear(6144, 1536, **made)

    def forward(self, x):
        return x + self.down(self.function(self.up(self.norm(x))))


def gradients(model, x, dy, recipe) -> list[torch.Tensor]:
    torch._dynamo.reset()
    options = {"policy": {"*": recipe}, "fallback": "error"}
    run, found = torch.compile(model, backend="te", fullgraph=True, options=options), []
    for _ in range(3):  # the second and third under delayed scaling's own graph
        model.zero_grad(set_to_none=True)
        run(x).backward(dy)
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    if recipe == "current":  # bit for bit: no atomic adds
        assert all(torch.equal(one, other) for one, other in zip(*found[1:], strict=True))
    return found[-1]


@pytest.mark.parametrize("function", [F.gelu, F.relu], ids=["gelu", "relu"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("rows", [4096, 4112], ids=["tiles", "a tile cut off"])
def test_bias_gradients(rows, recipe, function, monkeypatch, no_caches):
    """The gradients are those of a kernel of its own, but for the order of sums; a rounding to bf16 behind each."""
    torch.manual_seed(0)
    model = Mlp(function)
    x, dy = (torch.randn(rows, 1536, device="cuda", dtype=BF16) for _ in range(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mine = gradients(model, x.requires_grad_(), dy, recipe)
    assert any("quantize" in event.key and "_sum" in event.key for event in profile.key_averages())
    monkeypatch.setattr(column_sums, "LEAST", 1 << 40)
    theirs = gradients(model, x, dy, recipe)
    for (name, _), one, other in zip(model.named_parameters(), mine, theirs, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 2.0**-8, (name, error)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["rowwise", "current"])
def test_gradient_through_a_stored_weight(recipe, compiled, no_caches):
    """The gradient is that of dy as it is cast, times the scales of the weight's rows, with what is stored; in fp32
    sums."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = te_inductor.quantize_(nn.Linear(1024, 2048, bias=False, device="cuda", dtype=BF16), recipe)
    run = torch.compile(layer, backend="te", options={"recipe": "none"}) if compiled else layer
    x = torch.randn(512, 1024, device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn(512, 2048, device="cuda", dtype=BF16)
    run(x).backward(dy)
    weight: Quantizer = layer.weight.recipe.slots().grad_output
    rows = layer.weight.scale_inv.t() if recipe == "rowwise" else torch.ones(1, 2048, device="cuda")
    data, scale_inv = dense.quantize(dy.float() * rows, weight)
    exact = data.double()[:, :2048] * scale_inv.double() / rows.double() @ layer.weight.dequantize().double()
    error = (x.grad.double() - exact).norm() / exact.norm()
    assert error < 2.0**-7, error
