"""autograd.Functions whose backward multiplies: their products are of gradients, stay as they are, and are named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from te_inductor import explain
from te_inductor.backend import Plan, parse, run_passes
from tests.recipes import quick

pytestmark = pytest.mark.usefixtures("without_tracing")
M, N, K = 64, 128, 256
REASON = "in the backward of an autograd.Function, which says itself what it multiplies in which precision"


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Views(torch.autograd.Function):
    """Saves a view, keeps a tensor on its context, and writes its products otherwise."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w.t())
        ctx.x = x
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, g):
        [wt] = ctx.saved_tensors
        return F.linear(g, wt), torch.einsum("mn,mk->nk", g, ctx.x).contiguous()


class Inner(torch.autograd.Function):
    """Its backward calls another one."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return Plain.apply(g, w.t()), torch.mm(g.t(), x)


class Model(nn.Module):
    def __init__(self, function, checkpointed=False) -> None:
        super().__init__()
        self.inner, self.function, self.checkpointed = nn.Linear(K, N, bias=False), function, checkpointed

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.function.apply, x, self.inner.weight, use_reentrant=False)
        return self.function.apply(x, self.inner.weight)


MODELS = {
    "plain": lambda: Model(Plain),
    "views": lambda: Model(Views),
    "a function in the backward": lambda: Model(Inner),
    "checkpoint": lambda: Model(Plain, checkpointed=True),
}


@pytest.mark.sample(1)
@quick("current", "nvfp4")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_the_backward_is_as_it_is_written(make, name):
    model, x, dy = make(), torch.randn(M, K, requires_grad=True), torch.randn(M, N)
    options = {"recipe": name, "policy": {"*": name}, "fallback": "silent"}
    sites = explain(model, x, options=options).sites
    assert [(site.fqn, site.gemm, site.shapes) for site in sites] == [
        ("inner", "fprop", (M, N, K)),
        ("inner", "dgrad", (M, K, N)),
        ("inner", "wgrad", (N, K, M)),
    ]
    assert all(site.reason == REASON and site.kernel == "high_precision" for site in sites[1:])
    y = torch.compile(model, backend="te", fullgraph=True, options=options)(x)
    y.backward(dy)
    assert torch.equal(x.grad, dy @ model.inner.weight) and torch.equal(model.inner.weight.grad, dy.t() @ x)
    assert name == "delayed" or not torch.equal(y, F.linear(x, model.inner.weight))  # whose state reaches no body


def test_products_of_activations_alone_are_not_named():
    """No more than they are in a forward."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k):
            ctx.save_for_backward(q, k)
            return q @ k.mT

        @staticmethod
        def backward(ctx, g):
            q, k = ctx.saved_tensors
            return g @ k, g.mT @ q

    layer = nn.Linear(K, 2 * K)
    sites = explain(lambda x: Attention.apply(*layer(x).chunk(2, -1)), torch.randn(M, K, requires_grad=True)).sites
    assert {(site.fqn, site.reason) for site in sites} == {("", None)}


def test_compiled_autograd():
    """Runs such a backward in a graph of its own, in which nothing else tells gradients from activations."""
    model, x, found = Model(Plain), torch.randn(M, K, requires_grad=True), []

    def backend(gm, inputs):
        plan = Plan(gm, parse(None, {"recipe": "current"}), inputs)
        found.extend((site.gemm, site.reason) for site in run_passes(plan).sites)
        return gm.forward

    y = model(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        y.backward(dy := torch.randn_like(y))
    assert found == [("dgrad", REASON)] and torch.equal(x.grad, dy @ model.inner.weight)
