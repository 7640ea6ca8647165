"""Note [A first step] in passes/pre_grad/rewrite/first_step.py, on the GPU and under CUDA graphs."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.support.first_steps import Residual, errors


def gradients(run, model, x):
    torch.compiler.cudagraph_mark_step_begin()
    model.zero_grad()
    (run(x).float().square().mean() * 2.0**-20).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_first_gradients_are_as_good_as_those_of_current_scaling(mode):
    model = Residual(width=256).to("cuda", torch.bfloat16)
    x = torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16)
    exact = gradients(model, model, x)
    found = {}
    for recipe in ("current", "delayed"):
        torch._dynamo.reset()
        counters.clear()
        options = {"recipe": recipe, "mode": mode, "policy": {"*": recipe}, "fallback": "error"}
        run = torch.compile(model, backend="te", options=options, fullgraph=True)
        found[recipe] = [max(errors(gradients(run, model, x), exact)) for _ in range(6)]
        assert counters["inductor"]["cudagraph_skips"] == 0 and counters["stats"]["unique_graphs"] == 1
    assert max(found["delayed"]) <= 1.5 * max(found["current"]) + 0.01


def test_losses_of_the_first_steps_are_those_of_current_scaling():
    def losses(recipe):
        torch.manual_seed(3)
        torch._dynamo.reset()
        model = nn.Sequential(Residual(width=256, layers=3)).to("cuda", torch.bfloat16)
        x, target = (torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        run = torch.compile(model, backend="te", options={"recipe": recipe, "policy": {"*": recipe}}, fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for _ in range(21):
            optimizer.zero_grad()
            loss = (run(x).float() - target.float()).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    current, delayed = losses("current"), losses("delayed")
    assert current[-1] < 0.9 * current[0]
    assert abs(delayed[-1] - current[-1]) < 0.05 * (current[0] - current[-1])
