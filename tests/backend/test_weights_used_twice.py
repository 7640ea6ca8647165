"""One parameter that a program uses in several ways, where weight gradients do not go to autograd: each use has its
own way, none is lost or added in another's place, and what autograd has all the same is named."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor import backward_dw, explain
from tests.support.main_grads import te

pytestmark = pytest.mark.usefixtures("without_tracing")
TRANSPOSED = "the parameter holds the transpose of what the GEMM computes"
COMPUTED = "the weight is computed in the graph, or one of several in a parameter"
HIGH = "the layer stays in high precision, so that its weight gradient goes to autograd"


class Program(nn.Module):
    """A layer whose weight is (N, K), and, where `tied`, a second one with the same weight."""

    def __init__(self, use, n=32, tied=False) -> None:
        super().__init__()
        self.use, self.first = use, nn.Linear(32, n, bias=False)
        self.second = nn.Linear(32, 32, bias=False) if tied else None
        if self.second is not None:
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.use(self, x, self.first.weight)


def disabled(model, x, w):
    y = model.first(x)
    with te_inductor.autocast(enabled=False):
        return model.second(y)


def embedded(model, x, w):
    return model.first(F.embedding(x.detach().abs().argmax(1), w) + x)


def both_checkpointed(model, x, w):
    return checkpoint(lambda x: model.first(x) @ w, x, use_reentrant=False)


def other_checkpointed(model, x, w):
    return checkpoint(lambda x: x * w.mean(), model.first(x), use_reentrant=False)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum() * torch.ones_like(w)


def other(function):
    return f"{function} reads the parameter too, and autograd has that part of its gradient"


# What each is: the program, and why gradients go to autograd, all of `first` but of a second layer.
PROGRAMS = {
    "transposed": (Program(lambda model, x, w: model.first(x) @ w), [TRANSPOSED]),
    "not square": (Program(lambda model, x, w: model.first(x) @ w, n=48), [TRANSPOSED]),
    "view": (Program(lambda model, x, w: model.first(x) @ w.t()), [COMPUTED]),
    "computed": (Program(lambda model, x, w: F.linear(model.first(x), w * 2)), [COMPUTED, other("mul")]),
    "embedding": (Program(embedded), [other("embedding")]),
    "penalty": (Program(lambda model, x, w: model.first(x) + w.t().square().mean()), [other("square")]),
    "activation": (Program(lambda model, x, w: model.first(x) + F.linear(w, w).mean()), [other("linear")]),
    "region": (Program(disabled, tied=True), [HIGH]),
    "policy": (Program(lambda model, x, w: model.second(model.first(x)), tied=True), [HIGH]),
    "checkpoint": (Program(both_checkpointed), [TRANSPOSED]),
    "in a checkpoint": (Program(other_checkpointed), [other("mean")]),
    "function": (
        Program(lambda model, x, w: Scaled.apply(model.first(x), w.mean()) + Scaled.apply(x, w[0, 0])),
        [other("mean"), other("autograd_function_apply")],
    ),
    "twice": (Program(lambda model, x, w: model.first(model.first(x))), []),
    "not learning": (Program(lambda model, x, w: model.first(x) * w.detach().mean() * w.shape[0]), []),
}
RECIPES = {"current": {}, "delayed": {"recipe": "delayed", "weights": "once"}}


@pytest.mark.quick(
    "current-main_grad-transposed",
    "delayed-deferred-not square",
    "current-deferred-embedding",
    "delayed-main_grad-region",
    "current-main_grad-policy",
    "current-main_grad-in a checkpoint",
)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("wgrad", ["main_grad", "deferred"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_use_has_its_own_way(recipe, wgrad, name):
    model, said = copy.deepcopy(PROGRAMS[name][0]), PROGRAMS[name][1]
    twin = copy.deepcopy(model)
    options = {"recipe": "current", **RECIPES[recipe], "policy": {"second": "none"} if name == "policy" else {}}
    weight = model.first.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    found = explain(model, torch.randn(8, 32), options={**options, "wgrad": wgrad}).unmet
    assert {unmet.reason for unmet in found} == set(said)
    assert {unmet.fqn for unmet in found} <= {"second" if model.second else "first"}
    run, plain = te(model, wgrad=wgrad, fallback="silent", **options), te(twin, fallback="silent", **options)
    x = torch.randn(8, 32)
    ys = run(x), plain(x)
    assert torch.equal(*ys)
    assert weight.grad_added_to_main_grad == (wgrad == "main_grad" and not said)  # as the forward knows it
    dy = torch.randn_like(ys[0])
    for y in ys:
        y.backward(dy)
    backward_dw(model)
    assert (weight.grad is not None) == bool(said) and weight.grad_added_to_main_grad != bool(said)
    total = weight.main_grad if weight.grad is None else weight.main_grad + weight.grad
    scale = twin.first.weight.grad.abs().max()  # sums of a few terms in other orders
    assert torch.allclose(total, twin.first.weight.grad, rtol=0, atol=8 * 2.0**-24 * scale)
    assert weight.main_grad.any()
