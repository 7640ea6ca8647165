"""Models of one linear layer that is written in some way, for tests of forms."""

import torch
from torch import Tensor, nn

from te_inductor import explain

K, N = 48, 32


class Form(nn.Module):
    """`inner` is the module whose path a site should have; `p` is stored as (K, N) unless a form says otherwise."""

    def __init__(self, function, weight: Tensor, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(weight)
        self.inner.bias = nn.Parameter(torch.randn(N)) if bias else None
        self.inner.forward = lambda x: function(x, self.inner.weight, self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def plus(y: Tensor, b: Tensor | None) -> Tensor:
    return y if b is None else y + b


def x_of(dimensions: int) -> Tensor:
    return torch.randn(*(2, 3, 5)[: dimensions - 1], K)


def explained(model: nn.Module, x: Tensor) -> list:
    report = explain(model, x)
    assert report.failure is None
    return report.sites
