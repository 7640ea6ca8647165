"""What training code does with autograd, under every recipe: against the eager reference (tests/eager.py), bit for
bit."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad

import te_inductor
from te_inductor import explain
from tests.eager import quantized
from tests.recipes import STATELESS, every_recipe, quick
from tests.support.autograd import DIM, X, check, loss_of, mlp, results, same, te
from tests.support.main_grads import with_totals

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")


@every_recipe
def test_a_model(name):
    check(mlp(), name, torch.randn(X, requires_grad=True))


@quick("current", "nvfp4", of=STATELESS)
def test_retain_graph_twice(name):
    model = mlp()
    loss = loss_of(te(model, name), torch.randn(X))
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert same([parameter.grad for parameter in model.parameters()], [2 * gradient for gradient in once])


@quick("rowwise", "mxfp8", of=STATELESS)
def test_gradients_of_some_inputs(name):
    """One at a time, from one forward."""
    model, x = mlp(), torch.randn(X, requires_grad=True)
    wanted, loss = [x, *model.parameters()], loss_of(te(model, name), x)
    alone = [torch.autograd.grad(loss, tensor, retain_graph=True)[0] for tensor in wanted]
    assert same(alone, torch.autograd.grad(loss, wanted))


@pytest.mark.traced
@pytest.mark.sample(1)
@quick("delayed", "rowwise", "nvfp4")
@pytest.mark.parametrize("frozen", ["weights", "first", "biases", "input", "all"])
def test_frozen(name, frozen):
    """What is frozen gets no gradient, no GEMM and no copies; the rest is what it was."""
    model, x = mlp(), torch.randn(X, requires_grad=frozen not in ("input", "all"))
    for path, parameter in model.named_parameters():
        kind = "weights" if path.endswith("weight") else "biases"
        parameter.requires_grad_(not (frozen == "all" or frozen == kind or (frozen == "first" and path[0] == "0")))
    if frozen == "all":
        assert not te(model, name, fallback="silent")(x).requires_grad
    else:
        check(model, name, x)
    gemms = {(site.fqn, site.gemm) for site in explain(model, x, options={"recipe": name}).sites}
    expected = {(path, "fprop") for path in "02"}
    expected |= {(path, "wgrad") for path in "02" if model[int(path)].weight.requires_grad}
    expected |= {("2", "dgrad")} if frozen != "all" else set()
    expected |= {("0", "dgrad")} if x.requires_grad else set()
    assert gemms == expected


@quick("delayed")
def test_tied_weights(name):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    model = Tied()
    assert len(list(model.parameters())) == 1
    check(model, name, torch.randn(X, requires_grad=True))


@pytest.mark.traced
@quick("delayed")
def test_several_outputs_of_which_one_is_used(name):
    """The gradient of a layer that nothing is computed from is none at all, or zero."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.used, self.unused = (nn.Linear(DIM, DIM) for _ in range(3))

        def forward(self, x):
            x = self.body(x).relu()
            return self.used(x), self.unused(x.detach())

    model, x = Heads(), torch.randn(X)
    y, _ = te(model, name)(x)
    y.square().sum().backward()
    assert all(parameter.grad.any() for path in ("body", "used") for parameter in getattr(model, path).parameters())
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.unused.parameters())


@quick("delayed")
def test_gradients_accumulate(name):
    """Two microbatches: the sum of what each gives alone."""
    model, batches = mlp(), [torch.randn(X) for _ in range(2)]
    alone = []
    for x in batches:
        one = copy.deepcopy(model)
        run = te(one, name)
        if name == "delayed" and x is batches[1]:
            loss_of(run, batches[0]).backward()  # whose scales the second is cast with
            one.zero_grad()
        loss_of(run, x).backward()
        alone.append([parameter.grad for parameter in one.parameters()])
    run = te(model, name)
    for x in batches:
        loss_of(run, x).backward()
    assert same([parameter.grad for parameter in model.parameters()], [a + b for a, b in zip(*alone, strict=True)])


@quick("delayed")
def test_hooks(name):
    """Hooks on parameters, on the input and on the output are called once a backward, with what they may change."""
    model, x = mlp(), torch.randn(X, requires_grad=True)
    run, calls = te(model, name), []
    plain = results(run, list(model.parameters()), x) if name != "delayed" else None
    weight = model[0].weight
    weight.register_hook(lambda gradient: calls.append("weight") or gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    x.register_hook(lambda gradient: calls.append("input"))
    torch.manual_seed(0)
    y = run(x)
    y.register_hook(lambda gradient: calls.append("output"))
    y.square().sum().backward()
    assert sorted(calls) == ["accumulated", "input", "output", "weight"]
    if plain is not None:
        assert torch.equal(weight.grad, 2 * plain[2]) and torch.equal(model[2].weight.grad, plain[4])


@pytest.mark.sample(1)
@quick("delayed", "rowwise")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(name, mode):
    """The same output, and no column copies; tensors of inference mode stay apart from training."""
    model, x = mlp(), torch.randn(X)
    expected = loss_of(te(copy.deepcopy(model), name), x)
    run = te(model, name, fallback="silent")  # delayed scaling warns: it has seen nothing yet
    with mode():
        assert torch.equal(loss_of(run, x), expected)
    assert {site.gemm for site in explained(model, x, name, mode)} == {"fprop"}
    loss_of(run, x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def explained(model, x, name, mode):
    with mode():
        return explain(model, x, options={"recipe": name}).sites


@quick("delayed")
def test_train_and_eval(name):
    """Dropout comes and goes; each mode is compiled once."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5), nn.Linear(DIM, DIM))
    run, x = te(model, name), torch.randn(X)
    torch._dynamo.utils.counters.clear()
    seen = []
    for _ in range(2):
        for training in (True, False):
            model.train(training)
            torch.manual_seed(0)
            y = run(x)
            seen.append(y)
            y.square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch.equal(seen[0], seen[1])
    if name != "delayed":
        assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])


@quick("block", of=STATELESS)
def test_functional_call(name):
    """Other parameters than the module's own, with gradients of their own."""
    model, x = mlp(), torch.randn(X)
    other = {path: torch.randn_like(value).requires_grad_() for path, value in model.named_parameters()}
    expected = copy.deepcopy(model)
    expected.load_state_dict({path: value.detach() for path, value in other.items()})
    run = te(lambda parameters, x: torch.func.functional_call(model, parameters, (x,)), name)
    torch.manual_seed(0)
    y = run(other, x)
    found = [y.detach(), *torch.autograd.grad(y.square().sum(), list(other.values()))]
    assert same(found, results(te(expected, name), list(expected.parameters()), x))


def called(model: nn.Module):
    return lambda parameters, x: torch.func.functional_call(model, parameters, (x,))


@quick("current", of=STATELESS)
def test_gradients_of_torch_func(name):
    """Gradients inside a compiled function are the layer's own."""
    model, x = mlp(), torch.randn(4, *X)
    run, parameters = called(model), {path: value.detach() for path, value in model.named_parameters()}

    def gradients(parameters, x):
        return torch.func.grad(lambda parameters: run(parameters, x).square().sum())(parameters)

    def pulled_back(parameters, x):
        y, pull = torch.func.vjp(lambda parameters: run(parameters, x), parameters)
        return pull(2 * y)[0]

    leaves = {path: value.clone().requires_grad_() for path, value in parameters.items()}
    y = te(run, name)(leaves, x)
    expected = torch.autograd.grad(y.square().sum(), list(leaves.values()))
    for function in (gradients, pulled_back):
        assert same(te(function, name)(parameters, x).values(), expected)


@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.thorough)])
def test_other_transforms_of_torch_func(name):
    """Layers in other transforms stay in high precision, and that is said. Nothing of a transform is left behind."""
    model, x, tangent = mlp(), torch.randn(4, *X), torch.randn(4, *X)
    run, parameters = called(model), {path: value.detach() for path, value in model.named_parameters()}

    def loss(parameters, x):
        return run(parameters, x).square().sum()

    def gradients(parameters, x):
        return torch.func.grad(loss)(parameters, x)

    def twice(parameters, x):
        return torch.func.grad(lambda x: torch.func.grad(lambda x: loss(parameters, x))(x).sum())(x)

    def jacobian(parameters, x):
        return torch.func.jacrev(lambda x: loss(parameters, x))(x)

    def pushed_forward(x, tangent):
        return torch.func.jvp(model, (x,), (tangent,))

    def dual(x, tangent):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))

    tracked = {path: value.clone().requires_grad_() for path, value in parameters.items()}
    for function, inputs, what in (
        (lambda x: torch.func.vmap(model)(x), (x,), "vmap"),
        (twice, (parameters, x), "grad in grad"),
        (jacobian, (parameters, x), "grad, beside vmap"),
        (gradients, (tracked, x), "grad, of inputs that require gradients themselves"),
        (pushed_forward, (x, tangent), "jvp"),
        (lambda x: torch.func.jacfwd(lambda x: model(x).sum())(x), (x[0, :2],), "jvp in vmap"),
        (dual, (x, tangent), "forward-mode AD"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", te_inductor.errors.FallbackWarning)
            found = te(function, name, fallback="warn")(*inputs)
        [text] = [str(entry.message) for entry in caught if entry.category is te_inductor.errors.FallbackWarning]
        assert f"inside a transform of torch.func ({what}): 0, 2" in text
        torch.testing.assert_close(found, function(*inputs))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert forward_ad._current_level == -1


@pytest.mark.traced
@quick("delayed")
def test_a_gradient_of_a_gradient_is_refused(name):
    model, x = mlp(), torch.randn(X, requires_grad=True)
    loss = loss_of(te(model, name), x)
    with pytest.raises(
        RuntimeError, match=r"aot_autograd does not .*support"
    ):  # AOTAutograd's, who would have to trace it
        [gradient] = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()


@pytest.mark.traced
@quick("rowwise", "nvfp4")
def test_nothing_saved_is_an_alias_of_an_activation(name):
    """What is saved for the backward shares no memory with inputs or outputs: in-place changes of them between forward
    and backward are the user's right."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    x, saved = torch.randn(X), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = te(model, name)(x)
    theirs = {t.untyped_storage().data_ptr() for t in (x, y)}
    assert saved and not theirs & {t.untyped_storage().data_ptr() for t in saved if t.numel()}
    expected = [p.grad for p in trained(copy.deepcopy(model), name, x)]
    with torch.no_grad():
        x.mul_(3.0)
    y.backward(torch.ones_like(y))
    assert same([p.grad for p in model.parameters()], expected)


@pytest.mark.traced
@pytest.mark.parametrize("options", [{}, {"wgrad": "main_grad"}, {"wgrad": "deferred"}], ids=str)
def test_hooks_that_copy_what_is_saved(options):
    """A backward writes state and totals themselves, not the copies that hooks make of them, as offloading does."""

    def steps(pack):
        torch.manual_seed(0)
        model = mlp()
        if options.get("wgrad") == "main_grad":
            with_totals(model)
        run = te(model, "delayed", **options)
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                loss = loss_of(run, torch.randn(X))
            loss.backward()
            te_inductor.backward_dw(model)
        totals = [getattr(p, "main_grad", p.grad) for p in model.parameters()]
        return [*totals, *te_inductor.state_dict(model).values()]

    assert same(steps(torch.clone), steps(lambda t: t))


@pytest.mark.traced
@quick("delayed", "current")
def test_a_weight_changed_before_the_backward_is_an_error_or_does_not_matter(name):
    """It is as in high precision, where a layer saves its weight: autograd finds the change."""
    model, x = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), torch.randn(X)
    expected = [p.grad for p in trained(copy.deepcopy(model), name, x)]
    y = te(model, name)(x)
    with torch.no_grad():
        model[1].weight.mul_(3.0)
    try:
        y.backward(torch.ones_like(y))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert same([p.grad for p in model.parameters()], expected)


def trained(model, name, x):
    y = te(model, name)(x)
    y.backward(torch.ones_like(y))
    return list(model.parameters())


@pytest.mark.traced
@pytest.mark.sample(1)
@quick("delayed", "rowwise", "mxfp4")
@pytest.mark.parametrize("how", ["expanded", "transposed", "sliced"])
def test_gradients_of_any_layout(name, how):
    model, x = nn.Sequential(nn.Linear(DIM, DIM)), torch.randn(X)
    dy = {
        "expanded": torch.randn(()).expand(X),
        "transposed": torch.randn(X[::-1]).t(),
        "sliced": torch.randn(X[0], 2 * X[1])[:, ::2],
    }[how]
    gradients = []
    for run, given in ((te(copy.deepcopy(model), name), dy), (te(model, name), dy.contiguous())):
        torch.manual_seed(0)
        y = run(x)
        y.backward(given)
        gradients.append([parameter.grad for parameter in run.parameters()])
    assert same(*gradients)


@quick("delayed")
def test_a_loss_inside_the_compiled_function(name):
    model, x, target = mlp(), torch.randn(X), torch.randint(DIM, X[:1])
    eager = quantized(model, x, options={"recipe": name})

    def loss(run):
        return lambda x: F.cross_entropy(run(x), target)

    found = results(te(loss(model), name), list(model.parameters()), x)
    assert same(found, results(loss(eager), list(eager.parameters()), x))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, z):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


@pytest.mark.sample(1)
@quick("delayed", "block")
@pytest.mark.parametrize("last", [StraightThrough.apply, lambda y, z: y + 0 * z], ids=["straight through", "times 0"])
def test_a_layer_for_the_gradient_alone(name, last):
    """What a forward's outputs do not hang on is computed by the backward, behind the end of the forward's step; with
    the forward's scales all the same."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(DIM, DIM)

        def forward(self, x):
            return last(x, self.layer(x))

    model, x = Model(), torch.randn(X, requires_grad=True)
    eager = quantized(model, x, options={"recipe": name})
    expected = results(eager, list(eager.parameters()), x)
    assert same(results(te(model, name), list(model.parameters()), x), expected)


@pytest.mark.thorough  # test_delayed_backward.py has one in the quick round, state included
@pytest.mark.traced
@every_recipe
def test_compiled_autograd(name):
    """A backward that torch captures as a graph of its own."""

    def gradients():
        torch.manual_seed(0)
        model, x = mlp(), torch.randn(X, requires_grad=True)
        te(model, name)(x).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    counters.clear()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        found = gradients()
    assert counters["compiled_autograd"]["captures"] == 1
    torch._dynamo.reset()
    assert same(found, gradients())


@quick("delayed", "mxfp8")
def test_a_loss_over_padded_layers(name):
    """Sizes that no GEMM takes as they are: what is padded is no part of a mean. A layer that computes ones shows
    it."""
    layer, x = nn.Linear(250, 250), torch.randn(7, 250)
    with torch.no_grad():
        layer.weight.zero_(), layer.bias.fill_(1.0)
    loss = te(lambda x: layer(x).mean(), name)(x)
    loss.backward()
    assert loss == 1.0
    torch.testing.assert_close(layer.bias.grad, torch.full((250,), 1 / 250))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_contractions_and_attention_in_transforms(transform):
    """Contractions and attention in transforms stay as they are; the pass that puts layers in their place failed, and
    the whole graph was in high precision."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.attention = nn.Linear(32, 32), nn.MultiheadAttention(32, 4)
            self.heads = nn.Parameter(torch.randn(32, 4, 8) / 6)

        def function(self, x):
            y = torch.einsum("td,dhk->thk", x, self.heads).flatten(1)
            return self.attention(y, y, y, need_weights=False)[0].sin().sum()

        def forward(self, x):
            return transform(self.function)(self.layer(x))

    model = Model().requires_grad_(False)
    report = te_inductor.explain(model, torch.randn(*((2,) if transform is torch.vmap else ()), 8, 32))
    assert report.failure is None and [site.fqn for site in report.sites if site.kernel != "high_precision"] == [
        "layer"
    ]
