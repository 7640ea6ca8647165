"""The eager runtime's operations by hand: against plain autograd and compiled layers, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor.eager_layers import (
    GELU,
    Bias,
    ConstantScale,
    Dropout,
    GeGLU,
    Identity,
    L2Normalization,
    LayerNorm,
    Linear,
    Operation,
    Quantize,
    ReLU,
    Reshape,
    RMSNorm,
    SiLU,
    SquaredReLU,
    SwiGLU,
)
from te_inductor.errors import DoubleBackwardError, RecipeError
from te_inductor.ops.differentiable import PARTS
from te_inductor.recipes import NVFP4BlockScaling, Quantizer
from tests.bounds import assert_same_values
from tests.oracle import casts
from tests.ranks import ranks

R, C = 21, 128
X, GAIN = (R, C), (C,)
# An operation, the same in plain PyTorch, and the shapes of the inputs.
PLAIN = {
    "identity": (Identity(), lambda x: x.clone(), [X]),
    "reshape": (Reshape((3, 7, C)), lambda x: x.reshape(3, 7, C), [X]),
    "constant scale": (ConstantScale(0.3), lambda x: x * 0.3, [X]),
    "relu": (ReLU(), F.relu, [X]),
    "squared relu": (SquaredReLU(), lambda x: F.relu(x).square(), [X]),
    "silu": (SiLU(), F.silu, [X]),
    "gelu": (GELU(), F.gelu, [X]),
    "gelu tanh": (GELU("tanh"), lambda x: F.gelu(x, approximate="tanh"), [X]),
    "swiglu": (SwiGLU(), lambda gate, up: F.silu(gate) * up, [X, X]),
    "geglu": (GeGLU("tanh"), lambda gate, up: F.gelu(gate, approximate="tanh") * up, [X, X]),
    "layer norm": (LayerNorm(1e-5), lambda x, g, b: F.layer_norm(x, GAIN, g, b, 1e-5), [X, GAIN, GAIN]),
    "layer norm, no bias": (LayerNorm(1e-5), lambda x, g: F.layer_norm(x, GAIN, g, None, 1e-5), [X, GAIN]),
    "layer norm, bare": (LayerNorm(1e-5), lambda x: F.layer_norm(x, GAIN), [X]),
    "rms norm": (RMSNorm(1e-6), lambda x, g: F.rms_norm(x, GAIN, g, 1e-6), [X, GAIN]),
    "rms norm, bare": (RMSNorm(), lambda x: F.rms_norm(x, GAIN), [X]),
}


def gradients(function, inputs, dy):
    """The output and the gradients of all inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    y.backward(dy.view(y.shape))
    return [y.detach(), *(x.grad for x in inputs)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_high_precision_is_what_autograd_makes_of_plain_pytorch(name, dtype):
    operation, plain, shapes = PLAIN[name]
    inputs, dy = [torch.randn(shape).to(dtype) for shape in shapes], torch.randn(X).to(dtype)
    inputs[0].view(-1)[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1e-30, -1e30])
    for mine, theirs in zip(gradients(operation, inputs, dy), gradients(plain, inputs, dy), strict=True):
        assert mine.dtype == theirs.dtype
        assert_same_values(mine.double(), theirs.double())
    with torch.no_grad():
        y = operation(*inputs)
        assert_same_values(y.double(), plain(*inputs).double())
        assert y.untyped_storage().data_ptr() != inputs[0].untyped_storage().data_ptr()


def test_a_bias_gathers_its_gradient_in_fp32():
    x, bias, dy = (torch.randn(*shape).bfloat16() for shape in ((4000, 8), (8,), (4000, 8)))
    y, dx, db = gradients(Bias(), (x, bias), dy)
    assert (
        torch.equal(y, x + bias) and torch.equal(dx, dy) and torch.equal(db, dy.sum(0, dtype=torch.float32).bfloat16())
    )


def test_dropout_drops_in_the_backward_what_it_dropped_in_the_forward():
    x, dy = torch.ones(400, 100), torch.randn(400, 100)
    torch.manual_seed(7)
    y, dx = gradients(Dropout(0.25), (x,), dy)
    torch.manual_seed(7)
    assert torch.equal(Dropout(0.25)(x), y)  # torch's seed decides
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((y == 0).float().mean() - 0.25) < 5 * (0.25 * 0.75 / y.numel()) ** 0.5
    assert torch.equal(dx, dy * y)


def test_l2_normalization_is_that_of_float64():
    x, dy = torch.randn(X) * torch.logspace(-8, 8, R)[:, None], torch.randn(X)

    def exact(x):
        return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    ours, theirs = gradients(L2Normalization(), (x,), dy), gradients(exact, (x.double(),), dy.double())
    for mine, other in zip(ours, theirs, strict=True):
        # Sums of C terms, a root and two products, each rounded to fp32; the gradient is a difference of two such.
        assert ((mine - other).abs() <= 2 * C * 2.0**-23 * other.abs().amax(-1, keepdim=True)).all()


FORMATS = {
    "tensor": Quantizer("e4m3"),
    "row": Quantizer("e5m2", scope="row"),
    "block": Quantizer("e4m3", scope="1x128"),
    "mxfp8": Quantizer("e4m3", scope="1x32"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_values_are_the_oracle_s(name):
    x, dy = torch.randn(X) * torch.logspace(-4, 4, R)[:, None], torch.randn(X)
    y, dx = gradients(Quantize(FORMATS[name], FORMATS[name]), (x,), dy)
    for found, of in ((y, x), (dx, dy)):
        data, scale_inv = casts.quantize(of, FORMATS[name])
        expected = casts.dequantize(data, scale_inv, FORMATS[name].scope)[:, :C]
        assert_same_values(found.double(), expected.float().double())
    assert torch.equal(gradients(Quantize(None), (x,), dy)[1], dy)


RECIPES = ["current", "rowwise", "block", "mxfp8", NVFP4BlockScaling(disable_stochastic_rounding=True)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: getattr(recipe, "name", recipe))
@pytest.mark.parametrize("before", ["rms norm", "layer norm", "gelu tanh", "swiglu"])
def test_a_sequence_by_hand_is_the_compiled_one(recipe, before, without_codegen):
    """norm or activation, cast, GEMM, bias: forward and all gradients, bit for bit."""
    operation, plain, shapes = PLAIN[before]
    layer = nn.Linear(C, 256)
    inputs, dy = [torch.randn(shape) for shape in shapes], torch.randn(R, 256)
    by_hand = Linear(recipe)

    def plainly(*inputs):
        return F.linear(plain(*inputs[:-2]), *inputs[-2:])

    options = {"recipe": recipe, "fallback": "silent"}
    compiled = torch.compile(plainly, backend="te", fullgraph=True, options=options)
    inputs += [layer.weight, layer.bias]
    ours = gradients(lambda *inputs: by_hand(operation(*inputs[:-2]), *inputs[-2:]), inputs, dy)
    theirs = gradients(compiled, inputs, dy)
    assert not torch.equal(ours[0], plainly(*inputs))  # in low precision
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("defined", [PARTS[:1], PARTS[1:], PARTS[:2], PARTS[2:]], ids=str)
@pytest.mark.parametrize("base", [Operation, SiLU], ids=lambda base: base.__name__)
def test_half_an_operation_is_a_type_error(base, defined):
    with pytest.raises(TypeError, match=f"Half defines {' and '.join(defined)} without"):
        type("Half", (base,), {part: lambda self, *_: None for part in defined})
    assert issubclass(type("Whole", (base,), {part: lambda self, *_: None for part in PARTS}), Operation)
    assert issubclass(type("Named", (base,), {"name": "inherits all"}), Operation)


def test_recipes_of_no_low_precision_or_with_state_are_refused():
    for recipe in ("none", "delayed", "nvfp4_weight_only"):
        with pytest.raises(RecipeError):
            Linear(recipe)


LAYERS = {name: (Linear(name), None, [X, (64, C), (64,)]) for name in ("current", "block", "nvfp4")}


@pytest.mark.parametrize("name", [*PLAIN, *LAYERS])
def test_a_gradient_of_a_gradient_is_refused(name):
    """It is refused of a sum too, whose own gradient is a constant: the operation's still hangs on its inputs."""
    operation, _, shapes = (PLAIN | LAYERS)[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for loss in (torch.Tensor.sum, lambda y: y.square().sum()):
        with pytest.raises(DoubleBackwardError):
            torch.autograd.grad(loss(operation(*inputs)), inputs, create_graph=True)
    plain = [x.detach() for x in inputs]

    def gradient(x, *others):
        return torch.func.grad(lambda x: operation(x, *others).square().sum())(x)

    with pytest.raises(DoubleBackwardError):
        torch.func.grad(lambda x: gradient(x, *plain[1:]).sum())(plain[0])
    with pytest.raises(DoubleBackwardError):
        gradient(*inputs)
    with torch.no_grad():
        assert not gradient(*inputs).requires_grad


@pytest.mark.parametrize("name", [*PLAIN, *LAYERS])
def test_gradients_of_torch_func(name, monkeypatch):
    monkeypatch.setattr("te_inductor.ops.casts.new_seed", lambda device: torch.zeros((), dtype=torch.int64))
    operation, _, shapes = (PLAIN | LAYERS)[name]
    inputs = [torch.randn(shape) for shape in shapes]
    y, pull = torch.func.vjp(operation, *inputs)
    dy = torch.randn(y.shape)
    found = [y, *pull(dy)]
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(operation, inputs, dy), strict=True))


def test_collectives_on_two_ranks():
    for told in ranks("tests.numerics.collective_ranks", 2, "right")["right"]:
        assert told == {"AllReduce": True, "AllGather": True, "ReduceScatter": True}
