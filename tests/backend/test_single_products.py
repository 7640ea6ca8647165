"""`lower` on traced graphs whose layers are batched products of one matrix, as einsum decomposes them and autoparallel has
them: which views are followed, and which products of a backward belong to no layer."""

import contextlib
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from te_inductor import lower, recipes
from te_inductor.errors import FallbackError
from te_inductor.passes.graph.views import Chain, source
from tests.recipes import every_stateless_recipe, strict
from tests.support.traced_graphs import in_high_precision, joint_of, low


def einsum(x, weight, bias=None):
    y = torch.einsum("bsk,nk->bsn", x, weight)
    return y if bias is None else y + bias


class Attention(nn.Module):
    """Three layers of one input, heads, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.randn(128, 128) / 12 for name in ("first", "q", "k", "v", "o")})
        self.bias = nn.Parameter(torch.randn(128))

    def forward(self, x, linear):
        x = F.silu(linear(x, self.weights["first"], self.bias))
        q, k, v = (linear(x, self.weights[name]).unflatten(-1, (4, 32)).transpose(1, 2) for name in "qkv")
        attention = torch.softmax(q @ k.mT, -1) @ v
        return linear(attention.transpose(1, 2).flatten(-2), self.weights["o"]) + x


def step_of(model, linear):
    names = [name for name, _ in model.named_parameters()]

    def step(parameters, x):
        y = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x, linear))
        return torch.autograd.grad(y.square().mean(), parameters)

    return step


@pytest.mark.quick("current", "mxfp8")
@every_stateless_recipe
def test_a_step_is_the_same_bit_for_bit(name):
    model, x = Attention(), torch.randn(2, 24, 128)
    parameters, names = list(model.parameters()), [name for name, _ in model.named_parameters()]
    graph = make_fx(step_of(model, einsum), tracing_mode="fake")(parameters, x)
    assert len(in_high_precision(graph)) == 5 * 3 - 1 + 6  # x has no gradient; two products of attention
    made = lower(graph, {"recipe": name, "fallback": strict(name)}, parameters=names)
    assert len(in_high_precision(made)) == 6 and not any("unsqueeze" in str(node.target) for node in made.graph.nodes)
    torch.manual_seed(1)
    found = made(parameters, x)
    expected = step_of(model, low(name))(parameters, x)
    for one, other in zip(found, expected, strict=True):
        if recipes.resolve(name).slots().grad_output.stochastic:  # seeds are drawn in another order
            torch.testing.assert_close(one, other, rtol=0.5, atol=0.5 * float(other.abs().max()))
        else:
            assert torch.equal(one, other)


def test_a_batch_of_any_size():
    model, mode = Attention(), FakeTensorMode(shape_env=ShapeEnv())
    parameters, names = list(model.parameters()), [name for name, _ in model.named_parameters()]
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(2, 24, 128), symbolic_context=sizes)
    fakes = [
        mode.from_tensor(one, symbolic_context=StatelessSymbolicContext([DimDynamic.STATIC] * one.dim()))
        for one in parameters
    ]
    step = step_of(model, einsum)
    graph = make_fx(step)(fakes, x)
    assert isinstance(graph.graph.find_nodes(op="placeholder")[-1].meta["val"].shape[0], torch.SymInt)
    made = lower(graph, {"recipe": "rowwise", "fallback": "error"}, parameters=names)
    try:
        graph(parameters, torch.randn(5, 24, 128))
    except RuntimeError:
        pytest.skip("a torch (2.11) that writes the size into what `@` becomes")
    for rows in (2, 5):
        x = torch.randn(rows, 24, 128)
        for one, other in zip(made(parameters, x), step_of(model, low("rowwise"))(parameters, x), strict=True):
            assert torch.equal(one, other)


def test_a_tensor_that_is_written_between():
    """Its views have other values than the copy that is multiplied."""

    def step(w, x):
        kept = x.clone()
        copy = kept.reshape(4, 8, 64).transpose(0, 1).reshape(1, 32, 64)
        kept.zero_()
        return torch.bmm(copy, w.t().unsqueeze(0))

    w, x = torch.randn(64, 64), torch.randn(32, 64)
    made = lower(make_fx(step, tracing_mode="fake")(w, x), {"recipe": "rowwise", "fallback": "error"}, parameters=["w"])
    rows = x.reshape(4, 8, 64).transpose(0, 1).reshape(32, 64)
    assert torch.equal(made(w, x)[0], low("rowwise")(rows, w))


def test_bits_that_are_another_dtypes():
    """A view of another dtype is no reshape: what it is of has other values."""

    def step(w, x):
        return torch.bmm(x.view(torch.bfloat16).unsqueeze(0), w.t().unsqueeze(0))

    w, x = torch.randn(64, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    traced = make_fx(step, tracing_mode="fake")(w, x.view(torch.int16))
    made = lower(traced, {"recipe": "rowwise", "fallback": "error"}, parameters=["w"])
    assert torch.equal(made(w, x.view(torch.int16))[0], low("rowwise")(x, w))


@pytest.mark.parametrize("seed", range(40))
def test_a_chain_of_views_says_what_it_does(seed):
    """The chain is compared with the elements themselves."""
    pick = random.Random(seed).choice

    def steps(x):
        for _ in range(4):
            kind = pick(["permute", "view", "unsqueeze"])
            if kind == "permute":
                x = x.permute(pick(list(itertools.permutations(range(x.dim())))))
            elif kind == "unsqueeze":
                x = x.unsqueeze(pick(range(x.dim() + 1)))
            else:
                sizes = [2] * (x.numel().bit_length() - 1)
                while len(sizes) > 1 and pick([True, True, False]):
                    place = pick(range(len(sizes) - 1))
                    sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
                x = x.reshape(sizes)
        return x.reshape(pick([(1, 4, 8), (1, 8, 4)]))

    shape = pick([(4, 8), (2, 2, 8), (8, 4), (4, 2, 4)])
    graph = make_fx(steps, tracing_mode="fake")(torch.zeros(shape)).graph
    path = [graph.output_node().args[0]]
    while source(path[-1], copies=True) is not None:
        path.append(source(path[-1], copies=True))
    if path[-1].op != "placeholder":
        pytest.skip("the trace has another op")
    path.reverse()
    chain = Chain(path[0].meta["val"])
    assert all(chain.follow(b, b.meta["val"]) for b in path[1:])
    x = torch.arange(32).reshape(shape)
    end = torch.fx.GraphModule({}, graph)(x)
    _, rows, columns = end.shape
    same = torch.equal(end[0], x.reshape(rows, columns))
    turned = torch.equal(end[0], x.reshape(columns, rows).t())
    assert chain.is_matrix(2) == (False if same else True if turned else None)


class Redistributed(torch.autograd.Function):
    """A layer whose gradients multiply other tensors than its forward, as where ranks have gathered them anew."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy @ weight.view(-1).view(weight.shape), dy.t() @ (x + 0)


class Layer(nn.Linear):
    def forward(self, x):
        return Redistributed.apply(F.relu(x), self.weight)


def test_gradients_that_are_no_layers_are_named():
    model = nn.Sequential(nn.Linear(64, 64), Layer(64, 128, bias=False))
    with contextlib.ExitStack() as stack:
        _, joint = joint_of(model, torch.randn(32, 64), stack)
        lower(joint.graph_module, {"recipe": "current", "policy": {"1": "none"}, "fallback": "error"})
        with pytest.raises(FallbackError) as caught:
            lower(joint.graph_module, {"recipe": "current", "fallback": "error"})
    text = str(caught.value)
    assert "the weight gradient multiplies other tensors than the forward" in text
    assert "several products of the backward fit this layer, or it may be one of another's backward" in text
    assert "1 of 2" in text and ": 1 (" in text
