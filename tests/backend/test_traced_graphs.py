"""`lower` on graphs of forward, loss and backward that make_fx or AOTAutograd has traced: which products are a layer's,
and that the lowered graph computes what the same layers compute under autograd."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from te_inductor import lower, recipes
from te_inductor.errors import FallbackError, FallbackWarning, OptionError, RecipeError
from tests.recipes import every_stateless_recipe, strict
from tests.support.traced_graphs import in_high_precision, joint_of, low


class Model(nn.Module):
    """Two layers of one input; a tied weight, used both ways round; a weight without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.q, self.k = nn.Linear(128, 128), nn.Linear(128, 128, bias=False)
        self.tied = nn.Parameter(torch.randn(256, 128) / 16)
        self.frozen = nn.Linear(128, 256).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(256, 128) / 16)

    def forward(self, x, linear=F.linear):
        h = F.silu(linear(x, self.first.weight, self.first.bias))
        h = F.silu(linear(h, self.q.weight, self.q.bias)) * linear(h, self.k.weight)
        h = F.gelu(linear(h, self.tied))
        h = linear(h, self.tied.t())
        h = F.relu(linear(h, self.frozen.weight, self.frozen.bias))
        return linear(h, self.down.t())


def step_of(model, forward):
    """A function of parameters, their names, and inputs."""
    names = [name for name, _ in model.named_parameters()]

    def step(parameters, *inputs):
        loss = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), inputs, {"linear": forward})
        loss = loss.float().square().mean()
        return loss, *torch.autograd.grad(loss, [one for one in parameters if one.requires_grad])

    return step, list(model.parameters()), names


@pytest.mark.quick("rowwise", "block", "nvfp4")
@every_stateless_recipe
def test_a_step_is_the_same_bit_for_bit(name):
    model, x = Model(), torch.randn(2, 24, 128)
    step, parameters, names = step_of(model, F.linear)
    graph = make_fx(step, tracing_mode="fake")(parameters, x)
    assert len(in_high_precision(graph)) == 19  # seven layers, of which one has no dgrad and one no wgrad
    made = lower(graph, {"recipe": name, "fallback": strict(name)}, parameters=names)
    assert not in_high_precision(made) and len(in_high_precision(graph)) == 19
    casts = [(node.target, node.args) for node in made.graph.nodes if "te_inductor.quantize" in str(node.target)]
    assert all(one not in casts[:place] for place, one in enumerate(casts))  # q and k share theirs
    torch.manual_seed(1)
    found = made(parameters, x)
    torch.manual_seed(1)
    expected = step_of(model, low(name))[0](parameters, x)
    stochastic = recipes.resolve(name).slots().grad_output.stochastic  # seeds are drawn in another order
    for one, other in zip(found[:1] if stochastic else found, expected, strict=not stochastic):
        assert torch.equal(one, other)


def test_where_the_operands_do_not_tell():
    """Layers of one input that wants no gradient: only a trace that knows autograd's numbers tells them apart."""
    model, x = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "ab"}), torch.randn(32, 64)
    names = [name for name, _ in model.named_parameters()]

    def step(parameters, x):
        a, b = parameters
        loss = (F.silu(F.linear(x, a)) * F.linear(x, b)).sum()
        return torch.autograd.grad(loss, parameters)

    graph = make_fx(step, tracing_mode="fake")(list(model.parameters()), x)
    with pytest.raises(FallbackError, match=r"several products of the backward fit this layer.*: a, b"):
        lower(graph, {"recipe": "current", "fallback": "error"}, parameters=names)
    for node in graph.graph.nodes:
        node.meta["seq_nr"] = {"mm": 1, "mm_1": 2, "mm_2": 2, "mm_3": 1}.get(node.name, 0)
    made = lower(graph, {"recipe": "current", "fallback": "error"}, parameters=names)
    assert not in_high_precision(made)
    a, b = (one.detach().requires_grad_() for one in model.parameters())
    linear = low("current")
    expected = torch.autograd.grad((F.silu(linear(x, a)) * linear(x, b)).sum(), (a, b))
    for one, other in zip(made(list(model.parameters()), x), expected, strict=True):
        assert torch.equal(one, other)


def test_autocast_and_a_policy():
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(32, 64)
    names = [name for name, _ in model.named_parameters()]

    def step(parameters, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
        return torch.autograd.grad(y.float().square().mean(), parameters)

    parameters = list(model.parameters())
    graph = make_fx(step, tracing_mode="fake")(parameters, x)
    made = lower(graph, {"recipe": "rowwise", "policy": {"2": "none"}}, parameters=names)
    assert len(in_high_precision(made)) == 3
    for one, other in zip(made(parameters, x), graph(parameters, x), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0.2, atol=0.2 * float(other.abs().max()))


def test_a_gradient_that_is_viewed():
    """It is that of a weight (K, N), which the graph reads by a view of its memory."""

    def step(w, x):
        w = w.detach().requires_grad_()
        return torch.autograd.grad((x @ w).square().sum(), w)[0].view(-1)

    inputs = torch.randn(64, 128), torch.randn(32, 64)
    made = lower(make_fx(step, tracing_mode="fake")(*inputs), {"recipe": "rowwise"}, parameters=["w"])
    w = inputs[0].clone().requires_grad_()
    expected = torch.autograd.grad(low("rowwise")(inputs[1], w.t()).square().sum(), w)
    assert torch.equal(made(*inputs), expected[0].reshape(-1))


def test_a_joint_graph_of_aot_autograd():
    """The graph is as autoparallel has it: parameters by AOTAutograd's descriptors, backward by seq_nr."""
    model, x = Model(), torch.randn(48, 128)
    with contextlib.ExitStack() as stack:
        aot_autograd, joint = joint_of(model, x, stack)
        joint.graph_module = lower(joint.graph_module, {"recipe": "current", "fallback": "error"})
        assert not in_high_precision(joint.graph_module)
        run = aot_autograd.aot_compile_joint_with_descriptors(joint)
    parameters = list(model.parameters())
    run(*parameters, x).square().mean().backward()
    found = [one.grad for one in parameters]
    step, parameters, _ = step_of(model, low("current"))
    expected = step(parameters, x)[1:]
    for one, other in zip((one for one in found if one is not None), expected, strict=True):
        assert torch.equal(one, other)


def test_what_is_refused():
    weights = {"w": torch.randn(64, 64), "experts": torch.randn(4, 64, 64)}

    def step(w, experts, x):
        w, experts = w.detach().requires_grad_(), experts.detach().requires_grad_()
        loss = F.silu(x @ w).reshape(4, 8, 64).bmm(experts).square().sum()
        return torch.autograd.grad(loss, (w, experts))

    graph = make_fx(step, tracing_mode="fake")(*weights.values(), torch.randn(32, 64))
    with pytest.warns(FallbackWarning) as caught:
        made = lower(graph, {"recipe": "current", "policy": {"w": "delayed"}}, parameters=list(weights))
    text = str(caught[0].message)
    assert "delayed scaling keeps scales from step to step, for which this graph has no inputs" in text
    assert "not mm, addmm or a grouped product" in text
    assert len(in_high_precision(made)) == len(in_high_precision(graph))
    with pytest.raises(OptionError, match="was not told which of the graph's inputs are parameters"):
        lower(graph, {"recipe": "current"})
    with pytest.raises(OptionError, match="name 'nothing', expected placeholders"):
        lower(graph, parameters={"nothing": "w"})
    with pytest.raises(OptionError, match="parameters is a str"):
        lower(graph, parameters="w")
    opened = copy.deepcopy(graph)
    next(iter(opened.graph.nodes)).meta["val"] = object()  # as a DTensor's mesh
    with pytest.raises(OptionError, match="name 'w' at input 'w_1', which is no tensor: the trace has opened DTensors"):
        lower(opened, parameters=list(weights))
    with pytest.raises(OptionError, match=r"option 'wgrad' has no effect.*weight gradients are outputs"):
        lower(graph, {"wgrad": "main_grad"}, parameters=list(weights))
    with pytest.raises(RecipeError, match="unknown recipe"):
        lower(graph, {"recipe": "nope"}, parameters=list(weights))
    with pytest.raises(OptionError, match="lower's program is a Linear"):
        lower(nn.Linear(2, 2))
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(OptionError, match="nodes have no values, expected fake tensors"):
        lower(graph, parameters=list(weights))


def test_a_forward_alone():
    model, x = Model().requires_grad_(False), torch.randn(32, 128)
    graph = make_fx(model)(x)  # whose weights are attributes
    made = lower(graph, {"recipe": "rowwise", "fallback": "error"})
    assert not in_high_precision(made)
    assert torch.equal(made(x), model(x, low("rowwise")))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_gathered():
    """The gather is as SimpleFSDP writes it: the shard is cast and gathered, its gradient reduced and scattered."""
    from torch.distributed import _functional_collectives as collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def step(shard, x):
        shard = shard.detach().requires_grad_()
        weight = collectives.all_gather_tensor_autograd(shard.bfloat16(), 0, torch.distributed.group.WORLD)
        return torch.autograd.grad(F.linear(x, weight).float().square().mean(), shard)

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        graph = make_fx(step, tracing_mode="fake")(torch.randn(64, 128), torch.randn(32, 128, dtype=torch.bfloat16))
        made = lower(graph, {"policy": {"layer": "rowwise"}, "fallback": "error"}, parameters=["layer.weight"])
        assert len(in_high_precision(graph)) == 2 and not in_high_precision(made)
    finally:
        torch.distributed.destroy_process_group()
