"""Every way to write a linear layer is found, under its module path, and computes what the oracle computes; products of
two activations are left alone.

The forms run through the passes, with eager kernels (`zoo.rewritten`); what AOTAutograd and generated code add is in
test_transformers.py and tests/numerics.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_inductor import state_dict
from te_inductor.errors import FallbackWarning
from tests.bounds import assert_within, gemm_error, sum_error
from tests.models import zoo
from tests.oracle import casts
from tests.support.forms import Form, K, N, explained, plus, x_of

FORMS = {  # how, whether the parameter is (K, N), the report's pattern, the x that it takes
    "F.linear": (F.linear, False, "linear", "1234"),
    "F.linear, keywords": (lambda x, p, b: F.linear(input=x, weight=p, bias=b), False, "linear", "3"),
    "x @ p": (lambda x, p, b: plus(x @ p, b), True, "matmul", "1234"),
    "x @ p.T": (lambda x, p, b: plus(x @ p.T, b), False, "matmul", "1234"),
    "x @ p.t()": (lambda x, p, b: plus(x @ p.t(), b), False, "matmul", "3"),
    "x @ p.mT": (lambda x, p, b: plus(x @ p.mT, b), False, "matmul", "3"),
    "x @ p.transpose": (lambda x, p, b: plus(x @ p.transpose(0, 1), b), False, "matmul", "3"),
    "x @ p.swapaxes": (lambda x, p, b: plus(x @ p.swapaxes(0, 1), b), False, "matmul", "3"),
    "x @ p.movedim": (lambda x, p, b: plus(x @ p.movedim(0, 1), b), False, "matmul", "3"),
    "x @ p.adjoint()": (lambda x, p, b: plus(x @ p.adjoint(), b), False, "matmul", "3"),
    "x @ p.flatten": (lambda x, p, b: plus(x @ p.unflatten(1, (4, -1)).flatten(1), b), True, "matmul", "3"),
    "torch.matmul": (lambda x, p, b: plus(torch.matmul(x, p), b), True, "matmul", "1234"),
    "x.matmul": (lambda x, p, b: plus(x.matmul(p), b), True, "matmul", "3"),
    "torch.mm": (lambda x, p, b: plus(torch.mm(x, p), b), True, "matmul", "2"),
    "x.mm": (lambda x, p, b: plus(x.mm(p), b), True, "matmul", "2"),
    "keywords": (lambda x, p, b: plus(torch.matmul(x, other=p), b), True, "matmul", "3"),
    "einsum": (lambda x, p, b: plus(torch.einsum("bsd,df->bsf", x, p), b), True, "matmul", "3"),
    "einsum, an ellipsis": (
        lambda x, p, b: plus(torch.einsum("... d, f d -> ... f", x, p), b),
        False,
        "linear",
        "1234",
    ),
    "einsum, the parameter first": (lambda x, p, b: plus(torch.einsum("fd,sd->sf", (p, x)), b), False, "linear", "2"),
    "tensordot": (lambda x, p, b: plus(torch.tensordot(x, p, 1), b), True, "matmul", "123"),
    "tensordot, dimensions": (
        lambda x, p, b: plus(torch.tensordot(x, p, dims=([-1], [1])), b),
        False,
        "linear",
        "1234",
    ),
    "torch.inner": (lambda x, p, b: plus(torch.inner(x, p), b), False, "linear", "1234"),
    "x.inner": (lambda x, p, b: plus(x.inner(other=p), b), False, "linear", "3"),
    "torch.inner, the parameter first": (lambda x, p, b: plus(torch.inner(p, x).mT, b), False, "linear", "2"),
    "torch.linalg.matmul": (lambda x, p, b: plus(torch.linalg.matmul(x, p), b), True, "matmul", "123"),
    "p @ x": (lambda x, p, b: plus((p @ x.mT).mT, b), False, "linear", "234"),
    "p.T @ x": (lambda x, p, b: plus(torch.matmul(p.t(), x.mT).mT, b), True, "linear", "23"),
    "p.mm(x)": (lambda x, p, b: plus(p.mm(x.t()).t(), b), False, "linear", "2"),
    "einsum of a view": (lambda x, p, b: plus(torch.einsum("sd,df->sf", x, p.T), b), False, "matmul", "2"),
}


def check(model: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor, transposed: bool = False) -> None:
    """One layer: y, dx, dw, db against the oracle. `weight` and `bias` are the model's own parameters."""
    x = x.requires_grad_()
    y = torch.compile(model, backend=zoo.rewritten, fullgraph=True)(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    flat, dy = x.detach().reshape(-1, K), dy.reshape(-1, y.shape[-1])
    w, dw = ((t.t() if transposed else t) for t in (weight.detach(), weight.grad))
    expected = casts.linear(flat, w, None if bias is None else bias.detach(), zoo.RECIPE, dy)
    slots = zoo.RECIPE.slots()
    x_row, x_scale, x_col, _ = casts.quantize_rowcol(flat, slots.input)
    w_row, w_scale, w_col, _ = casts.quantize_rowcol(w, slots.weight)
    g_row, g_scale, g_col, _ = casts.quantize_rowcol(dy, slots.grad_output)
    b = None if bias is None else bias.detach()
    assert_within(y.reshape(-1, w.shape[0]), expected[0], gemm_error(x_row, x_scale, w_row, w_scale, b, y.dtype), "y")
    dx_error = gemm_error(g_row, g_scale, w_col, w_scale, None, x.dtype)
    assert_within(x.grad.reshape(-1, K), expected[1], dx_error, "dx")
    assert_within(dw, expected[2], gemm_error(g_col, g_scale, x_col, x_scale, None, w.dtype), "dw")
    if bias is not None:
        assert_within(bias.grad, expected[3], sum_error(dy, bias.dtype), "db")


def of_dimensions(form: str) -> list:
    """Each form with each x that it takes; the quick round has the last, and of two forms all."""
    *others, last = map(int, FORMS[form][3])
    each = form in ("F.linear", "p @ x")
    marks = () if each else pytest.mark.thorough
    return [*(pytest.param(form, one, marks=marks) for one in others), (form, last)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("form", "dimension"), [case for form in FORMS for case in of_dimensions(form)])
def test_form(form, dimension, bias):
    function, transposed, pattern, _ = FORMS[form]
    model = Form(function, torch.randn((K, N) if transposed else (N, K)), bias)
    x = x_of(dimension)
    sites = explained(model, x)
    assert [(site.fqn, site.pattern, site.gemm, site.reason) for site in sites] == [
        ("inner", pattern, gemm, None) for gemm in ("fprop", "wgrad")
    ]
    of_wgrad = (K, N) if transposed else (N, K)
    assert sites[0].shapes == (x.numel() // K, N, K) and sites[1].shapes == (*of_wgrad, x.numel() // K)
    check(model, model.inner.weight, model.inner.bias, x, transposed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dimension", [1, 3])
def test_module(dimension, bias):
    model = nn.Sequential(nn.Linear(K, N, bias=bias))
    check(model, model[0].weight, model[0].bias, x_of(dimension))
    assert {site.fqn for site in explained(model, x_of(dimension))} == {"0"}


ADDMM = {
    "positional": lambda x, p, b: torch.addmm(b, x, p),
    "keywords": lambda x, p, b: torch.addmm(input=b, mat1=x, mat2=p, alpha=1, beta=1),
    "method": lambda x, p, b: b.addmm(x, p),
}


@pytest.mark.parametrize("form", ADDMM)
def test_addmm(form):
    model = Form(ADDMM[form], torch.randn(K, N), True)
    assert {(site.fqn, site.pattern, site.reason) for site in explained(model, x_of(2))} == {("inner", "linear", None)}
    check(model, model.inner.weight, model.inner.bias, x_of(2), transposed=True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, p, b: torch.addmm(b, x, p, alpha=2), "alpha=2"),
        (lambda x, p, b: torch.addmm(b, x, p, beta=0.5), "beta=0.5"),
        (lambda x, p, b: torch.addmm(b.expand(x.shape[0], -1), x, p), "not a bias"),
        (lambda x, p, b: F.linear(x, p.t(), b.expand(x.shape[0], -1)), "not a bias"),
        (lambda x, p, b: F.linear(x, p.t(), b[None]), "not a bias"),
        (lambda x, p, b: F.linear(x, p.t(), b[0]), "not a bias"),
    ],
)
def test_what_is_no_linear_layer(function, reason):
    model = Form(function, torch.randn(K, N), True)
    sites = explained(model, x_of(2))
    assert sites and all(reason in site.reason and site.kernel == "high_precision" for site in sites)


@pytest.mark.usefixtures("without_tracing")
@pytest.mark.parametrize("shape", [(1, N), (5, N), (1,)])
def test_linear_that_adds_no_bias(shape):
    """`F.linear` adds what `addmm` does. Such a layer is named, and takes no other one with it."""
    model = Form(F.linear, torch.randn(N, K), True)
    model.inner.bias = nn.Parameter(torch.randn(shape))
    model = nn.Sequential(nn.Linear(K, K), model)
    sites = {site.fqn: site.reason for site in explained(model, torch.randn(5, K))}
    assert sites == {"0": None, "1.inner": f"adds a tensor of shape {shape}, not a bias of N elements"}
    with pytest.warns(FallbackWarning, match="1 of 2 linear sites stay in high precision"):
        torch.compile(model, backend="te", fullgraph=True, options={"recipe": "current"})(torch.randn(5, K))


@pytest.mark.parametrize("function", [torch.bmm, torch.matmul, lambda x, p: x @ p, lambda x, p: x.bmm(p)])
def test_batched(function):
    """Experts: one parameter, a linear layer a slice, each with its own scales."""
    model = Form(
        lambda x, p, b: function(x, p), torch.randn(3, K, N) * torch.tensor([1.0, 100.0, 0.01])[:, None, None], False
    )
    x = torch.randn(3, 5, K, requires_grad=True)
    assert {(site.fqn, site.reason) for site in explained(model, x)} == {("inner", None)}
    y = torch.compile(model, backend=zoo.rewritten, fullgraph=True)(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    weight, slots = model.inner.weight, zoo.RECIPE.slots()
    for index in range(3):
        xi, w, g = x[index].detach(), weight[index].detach().t(), dy[index]
        expected = casts.linear(xi, w, None, zoo.RECIPE, g)
        x_row, x_scale, x_col, _ = casts.quantize_rowcol(xi, slots.input)
        w_row, w_scale, w_col, _ = casts.quantize_rowcol(w, slots.weight)
        g_row, g_scale, g_col, _ = casts.quantize_rowcol(g, slots.grad_output)
        assert_within(y[index], expected[0], gemm_error(x_row, x_scale, w_row, w_scale, None, y.dtype), "y")
        assert_within(x.grad[index], expected[1], gemm_error(g_row, g_scale, w_col, w_scale, None, y.dtype), "dx")
        dw_error = gemm_error(g_col, g_scale, x_col, x_scale, None, y.dtype)
        assert_within(weight.grad[index].t(), expected[2], dw_error, "dw")


PIECES = {
    "chunk": lambda p: p.chunk(2, 1),
    "split": lambda p: torch.split(p, N // 2, dim=1),
    "tensor_split": lambda p: p.tensor_split(2, 1),
    "unbind": lambda p: p.unflatten(1, (2, -1)).unbind(1),
    "narrow": lambda p: [p.narrow(1, 0, N // 2), p.narrow(1, N // 2, N // 2)],
    "slices": lambda p: [p[:, : N // 2], p[:, N // 2 :]],
}


@pytest.mark.parametrize(
    "pieces",
    [one if one in ("chunk", "unbind", "slices") else pytest.param(one, marks=pytest.mark.thorough) for one in PIECES],
)
@pytest.mark.usefixtures("without_tracing")
def test_pieces_of_a_parameter(pieces):
    """Each is a layer of its own, under delayed scaling with a quantizer of its own."""
    weight = torch.randn(K, N) * torch.tensor([1.0, 64.0]).repeat_interleave(N // 2)
    model = Form(lambda x, p, b: torch.cat([x @ w for w in PIECES[pieces](p)], -1), weight, False)
    x = x_of(3)
    assert [(site.fqn, site.shapes) for site in explained(model, x) if site.gemm == "fprop"] == [
        ("inner", (6, N // 2, K)) for _ in range(2)
    ]
    run = torch.compile(model, backend="te", fullgraph=True, options={"recipe": "delayed", "fallback": "error"})
    for _ in range(2):
        y = run(x)
        y.backward(torch.ones_like(y))
    amaxes = {value.max().item() for key, value in state_dict(model).items() if key.endswith("].weight.amax_history")}
    assert amaxes == {weight[:, : N // 2].abs().max().item(), weight[:, N // 2 :].abs().max().item()}
    half, expected = run(x).detach()[..., : N // 2], x @ weight[:, : N // 2]
    assert (half - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("alone", [lambda p: p.detach(), lambda p: p.data])
def test_parameter_without_a_gradient(alone):
    model, x = Form(lambda x, p, b: x @ alone(p), torch.randn(K, N), False), x_of(3).requires_grad_()
    assert [(site.gemm, site.reason) for site in explained(model, x)] == [("fprop", None), ("dgrad", None)]


def test_checkpoint():
    """The body of a checkpoint is a graph of its own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(K, N))

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    model = Model()
    assert {site.fqn for site in explained(model, x_of(3))} == {"block.0"}
    check(model, model.block[0].weight, model.block[0].bias, x_of(3))


def test_autocast():
    """The output has autocast's dtype; the operands are quantized from what the model holds."""
    model = nn.Sequential(nn.Linear(K, N))

    def autocast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    assert {(site.fqn, site.reason) for site in explained(autocast, x_of(3))} == {("0", None)}
    x = x_of(3).requires_grad_()
    y = torch.compile(autocast, backend=zoo.rewritten, fullgraph=True)(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and model[0].weight.grad.dtype == torch.float32
    flat = x.detach().reshape(-1, K)
    w, b = model[0].weight.detach(), model[0].bias.detach()
    slots = zoo.RECIPE.slots()
    error = gemm_error(*casts.quantize(flat, slots.input), *casts.quantize(w, slots.weight), b, y.dtype)
    assert_within(y.reshape(-1, N), casts.linear_forward(flat, w, b, zoo.RECIPE), error, "y")


@pytest.mark.parametrize("function", [lambda x, p: x @ p.to(x.dtype), lambda x, p: F.linear(x, p.t().type_as(x))])
def test_cast_parameter(function):
    model = Form(lambda x, p, b: function(x, p), torch.randn(K, N), False)
    assert {site.reason for site in explained(model, x_of(2).bfloat16())} == {None}


def test_layers_back_to_back():
    """The input of one site is the node of another."""
    p, middle, q = nn.Parameter(torch.randn(K, 64)), nn.Linear(64, 64), nn.Parameter(torch.randn(64, N))

    def function(x):
        return middle(x @ p) @ q

    x = x_of(3)
    assert len([site for site in explained(function, x) if site.gemm == "fprop"]) == 3
    y = torch.compile(function, backend=zoo.rewritten, fullgraph=True)(x)
    hidden = casts.linear_forward(x.reshape(-1, K), p.detach().t(), None, zoo.RECIPE)
    hidden = casts.linear_forward(hidden, middle.weight.detach(), middle.bias.detach(), zoo.RECIPE)
    expected = casts.linear_forward(hidden, q.detach().t(), None, zoo.RECIPE)
    # Where fp32 sums flip no rounding, the two agree to fp32; each flip moves one of 64 products by a step of 2**-3.
    assert (y.reshape(-1, N) - expected).norm() < 2**-3 / 64**0.5 * expected.norm()


class Attention(nn.Module):
    """Two linear layers and two products of activations."""

    def __init__(self):
        super().__init__()
        self.qk, self.v = nn.Linear(K, 2 * K), nn.Linear(K, K)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        scores = torch.matmul(q, k.transpose(-1, -2)).softmax(-1)
        return torch.bmm(scores, self.v(x)) + scores @ x + torch.einsum("bij,bjk->bik", scores, x)


def test_products_of_activations_are_left_alone():
    assert {site.fqn for site in explained(Attention(), x_of(3))} == {"qk", "v"}


@pytest.mark.parametrize("train", [True, False])
def test_encoder_layer(train):
    """The layer is in training, and in evaluation, where torch has a fused path that Dynamo does not take."""
    model = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True).train(train)
    x = torch.randn(2, 16, 64)
    fprops = sorted((site.fqn, site.shapes) for site in explained(model, x) if site.gemm == "fprop")
    assert fprops == [
        ("linear1", (32, 96, 64)),
        ("linear2", (32, 64, 96)),
        ("self_attn", (32, 192, 64)),
        ("self_attn.out_proj", (32, 64, 64)),
    ]
    y = torch.compile(model, backend=zoo.rewritten, fullgraph=True)(x)
    assert (y - model(x)).norm() < 0.2 * model(x).norm()


def test_multihead_attention():
    """The packed projection and the output projection are F.linear calls inside the module itself."""
    model = nn.Sequential(nn.MultiheadAttention(64, 4, batch_first=True))
    x = torch.randn(2, 16, 64)

    def attend(x):
        return model[0](x, x, x, need_weights=False)[0]

    sites = explained(attend, x)
    fprops = [site.shapes for site in sites if site.gemm == "fprop"]
    assert sorted(fprops) == sorted([(32, 192, 64), (32, 64, 64)])
    assert all(site.reason is None and site.fqn.startswith("0") for site in sites)
