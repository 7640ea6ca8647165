"""Overflow stays visible on the GPU: Note [Overflow stays visible] in lowerings/casts/values.py."""

import functools

import pytest
import torch
from torch import nn

from te_inductor import recipes
from tests.loss_scaling import of_high_precision, scales
from tests.recipes import every_recipe


class GatedMLP(nn.Module):
    """Wide enough that its casts are the tiled kernels, and with CUTLASS its down projection's dgrad the gated one."""

    def __init__(self, width=1024, inner=2816):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def run(forward, module, x, dy):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in module.named_parameters()}


@every_recipe
@pytest.mark.parametrize("weights", ["each_call", "once"])
def test_infinity_and_nan_reach_what_they_reach_in_high_precision(name, weights):
    module = GatedMLP().to("cuda", torch.bfloat16)
    options = {"recipe": name, "fallback": "silent", "policy": {"*": name}, "weights": weights}
    compiled = torch.compile(module, backend="te", options=options, fullgraph=True)
    reference = torch.compile(module, backend="inductor", fullgraph=True)
    x, dy = (torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(2):  # delayed scaling knows its scales
        clean = run(compiled, module, x, dy)
    assert all(tensor.isfinite().all() for tensor in clean.values())
    state = {key: value.clone() for key, value in module.state_dict().items()}
    for what, value in [
        (what, value) for what in ("x", "dy", "gate", "down") for value in (float("inf"), float("nan"))
    ]:
        inputs = {"x": x.clone(), "dy": dy.clone(), "gate": module.gate.weight.data, "down": module.down.weight.data}
        inputs[what][3, 5] = value
        found, expected = (run(forward, module, inputs["x"], inputs["dy"]) for forward in (compiled, reference))
        module.load_state_dict(state)
        for key, theirs in expected.items():
            hidden = ~theirs.isfinite() & found[key].isfinite()
            assert not hidden.any(), (what, value, key, int(hidden.sum()))
            if not recipes.resolve(name).slots().fprop.microscaled:
                more = theirs.isfinite() & ~found[key].isfinite()
                assert not more.any(), (what, value, key, int(more.sum()))


@functools.cache
def in_high_precision():
    torch.manual_seed(0)
    module, x = GatedMLP(512, 1024).cuda(), torch.randn(1024, 512, device="cuda")
    return module, x, *of_high_precision(module, x)


@every_recipe
def test_grad_scaler_skips_the_same_steps(name):
    module, x, unit, expected = in_high_precision()
    assert scales(module, x, unit, "te", {"recipe": name, "fallback": "silent", "policy": {"*": name}}) == expected
