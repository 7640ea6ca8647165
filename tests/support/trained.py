"""Small models that train by delayed scaling."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def train(run, steps: int = 1, x: torch.Tensor | None = None) -> torch.Tensor:
    for _ in range(steps):
        y = run(torch.randn(8, 32) if x is None else x)
        y.square().sum().backward()
    return y.detach()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
