"""Programs under delayed scaling, for the tests of it: one layer beside its oracle, blocks, steps of training."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor.recipes import DelayedScaling
from tests.delayed import OracleLayer
from tests.support.trained import mlp

RECIPE = DelayedScaling(amax_history_len=4)


def te(model, **options):
    options = {"recipe": RECIPE, "fallback": "error", **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


def state(model: nn.Module) -> dict[str, Tensor]:
    return te_inductor.state_dict(model)


class Steps:
    """One layer, the oracle beside it: `forward` and `backward` in whatever order, checked after each."""

    def __init__(self, layer: nn.Linear, run) -> None:
        self.layer, self.run, self.oracle = layer, run, OracleLayer(RECIPE)

    def forward(self, x: Tensor) -> tuple:
        scales = self.oracle.scales()
        x = x.clone().requires_grad_()
        y = self.run(x)
        self.oracle.forward(x.detach(), self.layer.weight.detach())
        self.check_state()
        return scales, x, y

    def backward(self, scales, x, y, **options) -> None:
        dy = torch.randn_like(y)
        self.layer.zero_grad()
        x.grad = None
        y.backward(dy, **options)
        self.oracle.backward(dy)
        self.check_state()
        weight, bias = self.layer.weight, self.layer.bias
        grads = [x.grad, weight.grad, bias.grad]
        self.oracle.check_results(scales, x.detach(), weight.detach(), bias.detach(), dy, y.detach(), grads)

    def check_state(self) -> None:
        self.oracle.check_state(state(self.layer))


def steps(**options) -> Steps:
    layer = nn.Linear(32, 48)
    return Steps(layer, te(layer, **options))


def amax_scale(amax: Tensor, element: float = 448.0) -> float:
    return (torch.tensor(element) / amax.float().max()).item()


class Blocks(nn.Module):
    """Some blocks, plain or under a checkpoint."""

    def __init__(self, wrap=None, number: int = 2) -> None:
        super().__init__()
        self.blocks, self.wrap = nn.ModuleList(mlp() for _ in range(number)), wrap

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.wrap is None else self.wrap(block, x)
        return x


def checkpointed(number: int = 1) -> Blocks:
    """Blocks of which each is a checkpoint."""
    return Blocks(partial(checkpoint, use_reentrant=False), number)


def trained_steps(model: nn.Module, run, number: int = 3) -> list:
    torch.manual_seed(1)
    results = []
    for _ in range(number):
        model.zero_grad()
        x = torch.randn(8, 32, requires_grad=True)
        y = run(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters()), *state(model).values()])
    return results


def equal_steps(first: list, second: list) -> bool:
    return all(torch.equal(*pair) for a, b in zip(first, second, strict=True) for pair in zip(a, b, strict=True))
