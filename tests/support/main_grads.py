"""Parameters with main_grad, as training frameworks have them, and models whose weight gradients go elsewhere than into
`grad`, beside models where the backward leaves them there."""

import copy

import torch
from torch import nn

from tests.backend.delayed_programs import checkpointed
from tests.support.trained import Attention, mlp

SHAPE = (8, 32)
MODELS = {"mlp": (mlp, 2, SHAPE), "merged": (Attention, 2, (2, 4, 32)), "checkpoint": (checkpointed, 2, SHAPE)}


def te(model, **options):
    options = {"recipe": "current", "fallback": "error", **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


def with_totals(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        if p.dim() == 2:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
            p.grad_added_to_main_grad = False
    return model


class Pair:
    """A model with a value of option `wgrad`, and one whose backward computes its weight gradients for `grad`."""

    def __init__(self, model: nn.Module, wgrad: str, **options) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        if wgrad == "main_grad":
            with_totals(model)
        self.run, self.plain = te(self.model, wgrad=wgrad, **options), te(self.twin, **options)

    def forward(self, *shape: int) -> tuple:
        x = torch.randn(shape or SHAPE)
        xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        return xs, [self.run(xs[0]), self.plain(xs[1])]

    def backward(self, xs, ys, **options) -> None:
        """What is needed first is there at once."""
        dy = torch.randn_like(ys[0])
        for x, y in zip(xs, ys, strict=True):
            x.grad = None
            y.backward(dy, **options)
        assert torch.equal(*ys) and torch.equal(xs[0].grad, xs[1].grad)

    def check(self) -> None:
        for p, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            if hasattr(p, "main_grad"):
                assert p.grad is None and torch.equal(p.main_grad, other.grad)
                continue
            assert (p.grad is None) == (other.grad is None)
            assert p.grad is None or (p.grad.dtype == p.dtype and torch.equal(p.grad, other.grad))
