"""NVFP4's random bits in training programs: torch's seed decides them, and each step has others."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from te_inductor.recipes import NVFP4BlockScaling


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=False)


def gradients(run, model, x) -> list[torch.Tensor]:
    model.zero_grad()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def same(one, other) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(one, other, strict=True)]


@pytest.mark.thorough
@pytest.mark.codegen
@pytest.mark.parametrize("wrap", [nn.Identity, Checkpointed])
def test_the_seed_decides(wrap):
    body = nn.Linear(32, 48)
    model = Checkpointed(body) if wrap is Checkpointed else body
    compiled = torch.compile(model, backend="te", fullgraph=True, options={"recipe": "nvfp4", "fallback": "silent"})
    x = torch.randn(32, 32)
    compiled(x).sum().backward()  # the compile itself draws
    torch.manual_seed(1)
    first, second = (gradients(compiled, model, x) for _ in range(2))
    torch.manual_seed(1)
    again = gradients(compiled, model, x)
    assert all(same(first, again))
    # The forward and the bias' gradient, which is a sum of dy, are not rounded at random.
    assert same(first, second) == [True, False, True]


def test_without_it_nothing_is_random(without_tracing):
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    compiled = torch.compile(model, backend="te", options={"recipe": recipe, "fallback": "silent"})
    x, state = torch.randn(32, 64), torch.get_rng_state()
    first, second = (gradients(compiled, model, x) for _ in range(2))
    assert all(same(first, second)) and torch.equal(torch.get_rng_state(), state)


def test_the_mean_of_the_gradients_is_that_of_high_precision(without_tracing):
    """One layer, weights that NVFP4 holds exactly, no transform: dy alone is rounded, so that the mean of dx over n
    steps approaches dy w. Each step's error has a standard deviation of at most half a step of E2M1, so the norm of the
    mean's falls with the root of n; to nearest it does not fall at all."""
    layer = nn.Linear(64, 48, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-3, 4, (48, 64)).float())
        layer.weight[::16, ::16] = 6.0
    x, dy = torch.randn(16, 64, requires_grad=True), torch.randn(16, 48)
    exact, apart = dy.double() @ layer.weight.double(), {}
    for disabled in (False, True):
        torch._dynamo.reset()
        recipe = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=disabled)
        compiled = torch.compile(layer, backend="te", options={"recipe": recipe, "fallback": "silent"})
        steps = [torch.autograd.grad(compiled(x), x, dy)[0].double() for _ in range(100)]
        error = [(torch.stack(steps[:n]).mean(0) - exact).norm() / exact.norm() for n in (1, 100)]
        apart[disabled] = error
    assert apart[False][1] < 0.25 * apart[False][0]
    assert apart[True][1] > 0.99 * apart[True][0] > 0.01
