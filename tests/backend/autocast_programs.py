"""Programs in regions of `te_inductor.autocast`, for the tests of it."""

import copy

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from te_inductor import autocast, explain

DIM = 128


def te(function, fullgraph=True, **options):
    return torch.compile(function, backend="te", fullgraph=fullgraph, options={"fallback": "error", **options})


def compiles() -> int:
    return counters["stats"]["unique_graphs"]


def chosen(model, *inputs, **options) -> list[str]:
    """The recipe of each layer, in the order of the calls."""
    return [site.recipe for site in explain(model, *inputs, options=options).sites if site.gemm == "fprop"]


def step(model, x: torch.Tensor, **options) -> list[torch.Tensor]:
    """A forward and a backward of a copy, which starts without state: the output and all gradients."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(0)
    y = te(model, **options)(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Within(nn.Module):
    """A module whose forward runs in a region of its own."""

    def __init__(self, module: nn.Module, **region) -> None:
        super().__init__()
        self.module, self.region = module, region

    def forward(self, x):
        with autocast(**self.region):
            return self.module(x)


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


def layer() -> nn.Linear:
    return nn.Linear(DIM, DIM)


X = (32, DIM)
