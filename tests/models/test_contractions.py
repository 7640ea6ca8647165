"""Linear layers that are written as contractions of more dimensions, as einsums, and with the parameter on the left."""

import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor import ops
from te_inductor.backend import parse, run_passes
from te_inductor.passes.pre_grad.plan import Plan
from tests.models import zoo
from tests.support.forms import Form, K, N, explained, x_of
from tests.uncompiled import run_rewritten


def spread(t, dims, size):
    return t.unflatten(dims, size)


# An einsum, and the same with F.linear; the sizes of x and of the parameter.
EINSUMS = {
    "heads": ("bsd,dhe->bshe", lambda x, p: spread(F.linear(x, p.flatten(1).t()), -1, (4, 8)), (2, 3, K), (K, 4, 8)),
    "heads in front": (
        "bsd,hed->bhse",
        lambda x, p: spread(F.linear(x, p.flatten(0, 1)), -1, (4, 8)).transpose(1, 2),
        (2, 3, K),
        (4, 8, K),
    ),
    "of heads": ("bshe,hed->bsd", lambda x, p: F.linear(x.flatten(2), p.flatten(0, 1).t()), (2, 3, 4, 12), (4, 12, N)),
    "of heads, behind": (
        "bhse,dhe->bsd",
        lambda x, p: F.linear(x.transpose(1, 2).flatten(2), p.flatten(1)),
        (2, 4, 3, 12),
        (N, 4, 12),
    ),
    "rows behind": (
        "dbs,df->fbs",
        lambda x, p: F.linear(x.permute(1, 2, 0), p.t()).permute(2, 0, 1),
        (K, 2, 3),
        (K, N),
    ),
}


def same_as(function, linear, weight, x, gemms, autocast=None):
    """Checks every bit of a product, and of its gradients, to be that of the linear layer that it is; `gemms` are those
    of both, with their shapes where these are the same."""
    results, dy = [], torch.randn(function(x, weight).shape)
    for product in (function, linear):
        torch._dynamo.reset()
        model, given = Form(lambda x, p, b: product(x, p), weight.clone(), False), x.clone().requires_grad_()  # noqa: B023
        for site, (gemm, shapes) in zip(explained(model, given) if gemms else [], gemms.items(), strict=True):
            assert (site.fqn, site.gemm, site.reason) == ("inner", gemm, None) and shapes in (None, site.shapes)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            y = torch.compile(model, backend=zoo.rewritten, fullgraph=True)(given)
        assert y.dtype == (autocast or x.dtype)
        y.backward(dy.to(y.dtype))
        results.append((y, given.grad, model.inner.weight.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum(name):
    equation, linear, of_x, of_p = EINSUMS[name]
    gemms = {"fprop": (6, N, K), "dgrad": None, "wgrad": None}
    same_as(partial(torch.einsum, equation), linear, torch.randn(of_p), torch.randn(of_x), gemms)


@pytest.mark.parametrize(
    "equation", [*(equation for equation, *_ in EINSUMS.values()), "fd,bsd->bfs", "fd,bsd->sbf", "dbs,df->fsb"]
)
def test_einsum_has_torchs_layout(equation):
    """A program may look at it behind a graph break, as `view` does."""
    names = equation.partition("->")[0].split(",")
    sizes = dict(zip("bsdehf", (2, 3, K, 4, 4, N), strict=True))
    tensors = [torch.randn([sizes[letter] for letter in name]) for name in names]
    first = names[0] == "fd"  # the parameter
    p, x = tensors if first else tensors[::-1]
    model = Form(lambda x, p, b: torch.einsum(equation, *((p, x) if first else (x, p))), p, False)
    assert explained(model, x)
    y = torch.compile(model, backend=zoo.rewritten, fullgraph=True)(x)
    assert y.stride() == torch.einsum(equation, *tensors).stride()


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum_of_symbolic_sizes(name):
    """The size that is summed over is a symbol for Dynamo too, until the parameter's is found to be the same."""
    equation, _, of_x, of_p = EINSUMS[name]
    model, x = Form(lambda x, p, b: torch.einsum(equation, x, p), torch.randn(of_p), False), torch.randn(of_x)
    with torch._dynamo.config.patch(assume_static_by_default=False):
        assert [site.reason for site in explained(model, x)] == [None, None]


LEFT = {
    "a letter in all three": ("bhs,hsd->bhd", (2, 4, 48), (4, 48, 32)),
    "a diagonal": ("bss,sd->bd", (2, 48, 48), (48, 32)),
    "a sum of one operand": ("bsd,df->bf", (2, 3, 48), (48, 32)),
    "a vector": ("bsd,d->bs", (2, 3, 48), (48,)),
    "inner dimensions apart": ("bhe,hde->bd", (2, 4, 12), (4, 32, 12)),
    "an outer product": ("bs,df->bsdf", (2, 3), (4, 8)),
    "no output named": ("ab,bc", (2, 48), (48, 32)),
    "one value spread": ("ab,bc->ac", (2, 1), (48, 32)),
}


@pytest.mark.parametrize("name", LEFT)
def test_einsums_that_are_no_linear_layer_are_left_alone(name):
    equation, of_x, of_p = LEFT[name]
    model, x = Form(lambda x, p, b: torch.einsum(equation, x, p), torch.randn(of_p), False), torch.randn(of_x)
    sites = [(site.fqn, site.gemm, site.kernel) for site in explained(model, x)]
    assert sites == ([] if name == "an outer product" else [("inner", "fprop", "high_precision")])

    def backend(gm, inputs):
        assert run_passes(Plan(gm, parse(None, {"recipe": zoo.RECIPE}))).failure is None
        return run_rewritten(gm)

    assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))


@pytest.mark.parametrize("product", [lambda a, b: a @ b, lambda a, b: torch.einsum("ij,jk->ik", a, b)])
def test_products_of_parameters_are_left_alone(product):
    """An adapter's, which are added to a weight: the sum is a layer's, in its own precision."""
    a, b = nn.Parameter(torch.randn(N, 16)), nn.Parameter(torch.randn(16, K))
    model = Form(lambda x, p, _: F.linear(x, p + product(a, b)), torch.randn(N, K), False)
    assert {(site.fqn, site.shapes) for site in explained(model, x_of(2)) if site.gemm == "fprop"} == {
        ("inner", (2, N, K))
    }


def test_a_parameter_on_the_left_mixes_rows():
    """Rows of each matrix of a batch are mixed, as in a gated MLP over positions: it is the layer over the transpose."""
    weight, x = torch.randn(N, K), torch.randn(3, K, 16)
    gemms = {"fprop": (48, N, K), "dgrad": (48, K, N), "wgrad": (N, K, 48)}
    same_as(lambda x, p: p @ x, lambda x, p: F.linear(x.mT, p).mT, weight, x, gemms)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, p: p @ x,
        lambda x, p: torch.tensordot(p, x, ([1], [1])),
        lambda x, p: torch.mm(p, x[0]),
        lambda x, p: torch.inner(p, x.mT),
    ],
)
def test_products_are_contiguous_as_torch_writes_them(function):
    """What follows may take a view of them."""
    model = Form(lambda x, p, b: function(x, p).view(-1), torch.randn(N, K), False)
    assert all(site.reason is None for site in explained(model, torch.randn(3, K, 16)))
    x = torch.randn(3, K, 16)
    y = torch.compile(model, backend=zoo.rewritten, fullgraph=True)(x)
    assert (y - model(x)).norm() < 0.1 * y.norm()
    whole = torch.compile(lambda x: function(x, model.inner.weight), backend=zoo.rewritten, fullgraph=True)(x)
    assert whole.stride() == function(x, model.inner.weight).stride()


class Contractions(nn.Module):
    """One behind the other, each written in another way."""

    def __init__(self):
        super().__init__()
        ways = (
            lambda x, p, b: torch.einsum("kbn,mk->mbn", x, p),
            lambda x, p, b: torch.tensordot(p, x, ([1], [0])).transpose(0, 1),
            lambda x, p, b: (p @ x).transpose(0, 1),
        )
        self.layers = nn.ModuleList(Form(way, torch.randn(48, 48), False) for way in ways)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "high", [(0,), (1, 2), (0, 1, 2), *(pytest.param(one, marks=pytest.mark.thorough) for one in ((1,), (2,), (0, 1)))]
)
def test_what_stays_in_high_precision_is_as_it_was_written(high):
    """The linear layer that stood in its place while that was decided is gone."""
    model, x, seen = Contractions(), torch.randn(48, 3, 16), []
    policy = {**{f"layers.{place}.inner": "none" for place in high}, "*": zoo.RECIPE}

    def backend(gm, inputs):
        def calls():
            return [node.target for node in gm.graph.nodes if node.op == "call_function"]

        before = calls()
        report = run_passes(Plan(gm, parse(None, {"policy": policy, "weights": "each_call"})))
        assert report.failure is None
        seen.append((before, calls()))
        gm.graph.lint()
        return run_rewritten(gm)

    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    [(before, after)] = seen
    assert before == [torch.functional.einsum, torch.functional.tensordot, operator.matmul]
    assert [target for target in after if target in before] == [before[place] for place in high]
    assert after.count(ops.layers) == 3 - len(high)
    exact = model(x)
    assert torch.equal(y, exact) if len(high) == 3 else (y - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_einsum_under_autocast(dtype):
    """Its output is autocast's, and the gradients those of the same linear layer."""
    weight, x = torch.randn(K, 4, 8), torch.randn(2, 3, K)
    same_as(partial(torch.einsum, "bsd,dhe->bshe"), EINSUMS["heads"][1], weight, x, {}, dtype)
