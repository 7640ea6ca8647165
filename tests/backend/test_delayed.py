"""Delayed scaling in programs: when state changes, what recompiles leave of it, what is refused, and what is said.

The numbers of one layer are in tests/numerics/test_delayed.py; here each program is held to the oracle where it knows
what enters a layer, and to another program of the same numbers elsewhere. What shares state is in
test_delayed_sharing.py, microbatches and checkpoints in test_delayed_backward.py."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor import explain
from te_inductor.errors import FallbackError, FallbackWarning, RecipeError
from te_inductor.passes import pre_grad
from te_inductor.recipes import DelayedScaling, Format
from tests.backend.delayed_programs import RECIPE, Blocks, amax_scale, equal_steps, state, steps, te, trained_steps
from tests.delayed import quantizers
from tests.passes import leave_out
from tests.support.trained import Attention, mlp, same, train

pytestmark = pytest.mark.usefixtures("without_tracing")


def test_state_survives_recompiles():
    """Other batch sizes, then symbolic ones, evaluation and training in between, another shape of x."""
    counters.clear()
    layer = steps()
    for batch in (8, 16, 24, 40):
        layer.backward(*layer.forward(torch.randn(batch, 32)))
    layer.layer.eval()
    layer.backward(*layer.forward(torch.randn(8, 32)))
    with torch.no_grad():
        before = state(layer.layer)
        layer.run(torch.randn(8, 32) * 100)
        assert same(state(layer.layer), before)
    layer.layer.train()
    layer.backward(*layer.forward(torch.randn(12, 32)))
    assert 2 <= counters["stats"]["unique_graphs"] <= 6


@pytest.mark.quick("inference_mode")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_changes(mode):
    model = mlp()
    run = te(model)
    train(run)
    before = state(model)
    x = torch.randn(8, 32) * 100
    with mode():
        first, second = run(x), run(x)
    assert torch.equal(first, second) and same(state(model), before)
    train(run)
    assert not same(state(model), before)


@pytest.mark.quick("no_grad")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_state_made_without_gradients_can_be_trained(mode):
    model = mlp()
    run = te(model, fallback="silent")
    with mode():
        run(torch.randn(8, 32))
    train(run, 2)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert all(value.item() != 1 for key, value in state(model).items() if key.endswith("scale"))


@pytest.mark.parametrize("trains", ["input", "first", "second", "bias", "nothing"])
def test_frozen_layers_have_scales_all_the_same(trains):
    """Every layer, where gradients are enabled, records what it casts, whether its own weight or input needs one or
    not."""
    model = mlp().requires_grad_(False)
    x = torch.randn(8, 32)
    for needs in {"input": [x], "first": model[0].parameters(), "second": model[2].parameters(), "nothing": []}.get(
        trains, [model[2].bias]
    ):
        needs.requires_grad_()
    run = te(model)
    y = run(x)
    if y.requires_grad:
        y.square().sum().backward()
    entries = state(model)
    assert entries["0.input.scale"].item() == amax_scale(x.detach().abs())
    for name in ("0", "2"):
        weight = model[int(name)].weight.detach()
        assert entries[f"{name}.weight.scale"].item() == amax_scale(weight.abs())
    expected = {"input": {"0", "2"}, "first": {"0", "2"}, "second": {"2"}, "bias": {"2"}, "nothing": set()}[trains]
    assert {key.split(".")[0] for key in entries if "grad_output" in key} == expected
    high = model(x)
    assert (run(x) - high).norm() < 0.1 * high.norm()


def test_a_teacher_under_no_grad_keeps_its_scales():
    """The teacher is in the same graph as the student, which moves on."""

    class Distillation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = mlp(), mlp()

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x) - target

    model = Distillation()
    train(te(model.teacher))
    before = state(model.teacher)
    train(te(model), x=100 * torch.randn(8, 32))
    after = state(model.teacher)
    # They read one tensor, so its quantizer is one, and the student has seen it.
    assert after.pop("0.input.scale") < before.pop("0.input.scale")
    after.pop("0.input.amax_history"), before.pop("0.input.amax_history")
    assert same(after, before)


@pytest.mark.traced
def test_graph_breaks():
    """Two graphs, the same numbers as one."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, x):
            x = self.first(x)
            if self.breaks:
                torch._dynamo.graph_break()
            return self.second(x)

    whole = Broken()
    whole.breaks = False
    broken = copy.deepcopy(whole)
    broken.breaks = True
    expected = trained_steps(whole, te(whole))
    torch._dynamo.reset()
    run = torch.compile(broken, backend="te", options={"recipe": RECIPE, "fallback": "error"})
    assert equal_steps(trained_steps(broken, run), expected)


@pytest.mark.traced
@pytest.mark.quick("True")
@pytest.mark.parametrize("train_mode", [True, False])
def test_dynamic_shapes(train_mode):
    """There are at most two compiles; the amaxes are those of the batches seen."""
    model = Attention()
    run, oracle = te(model), quantizers(RECIPE)["input"]
    train(run, x=torch.randn(2, 4, 32))
    oracle.record(torch.zeros(1)), oracle.update()
    counters.clear()
    seen = []
    for batch in (8, 16, 24, 40):
        x = torch.randn(batch, 5, 32)
        with torch.set_grad_enabled(train_mode):
            y = run(x)
        if train_mode:
            y.sum().backward()
            seen.append(x.abs().max().item())
    assert counters["stats"]["unique_graphs"] <= 2
    history = state(model)["q.input.amax_history"].tolist()
    assert history[4 - len(seen[-3:]) :] == seen[-3:] if train_mode else history[3] > 0 == history[2]


def test_autocast():
    """The state is that of what the model holds; the output has autocast's dtype."""
    layer = nn.Linear(32, 48)

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    x = torch.randn(8, 32)
    y = te(function)(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and state(layer)["input.scale"].item() == amax_scale(x.abs())


def warned(run, *inputs) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*inputs)
    return [str(entry.message) for entry in caught if entry.category is FallbackWarning]


def test_inference_without_any_state_is_said_once():
    model, x = mlp(), torch.randn(8, 32)
    run = te(model, fallback="warn")
    with torch.no_grad():
        [text] = warned(run, x)
        assert "has seen no step of these sites" in text and "each tensor's own amax" in text and ": 2, 0;" in text
        assert "train first, or load what te_inductor.state_dict returned with te_inductor.load_state_dict" in text
        assert warned(run, x) == []
        torch._dynamo.reset()
        assert warned(te(model, fallback="silent"), x) == []
        torch._dynamo.reset()
        with pytest.raises(FallbackError, match="each tensor's own amax"):
            te(model)(x)


@pytest.mark.parametrize("how", ["train", "load"])
def test_inference_with_state_says_nothing(how):
    model, x = mlp(), torch.randn(8, 32)
    train(te(model))
    if how == "load":
        model, entries = mlp(), state(model)
        te_inductor.load_state_dict(model, entries)
    with torch.no_grad():
        assert warned(te(model, fallback="warn"), x) == []
        assert warned(te(model), x) == []


def test_a_training_graph_says_nothing():
    model = mlp()
    assert warned(te(model, fallback="warn"), torch.randn(8, 32)) == []


def test_a_weight_that_comes_from_no_parameter_is_refused():
    def function(x, weight):
        return F.linear(x, weight)

    x, weight = torch.randn(8, 32), torch.randn(48, 32)
    report = explain(function, x, weight, options={"recipe": "delayed"})
    assert {site.kernel for site in report.sites} == {"high_precision"}
    assert all(
        "keeps its state with a parameter, and the weight comes from none" in site.reason for site in report.sites
    )
    run = torch.compile(function, backend="te", options={"recipe": "delayed", "fallback": "silent"})
    torch.testing.assert_close(run(x, weight), function(x, weight))


def test_a_site_in_a_control_flow_body_is_refused():
    model = mlp()

    def function(x):
        return torch.cond(x.sum() > 0, lambda x: model(x), lambda x: model(-x), (x,))

    report = explain(function, torch.randn(8, 32), options={"recipe": "delayed"})
    assert report.sites and all("inside a control-flow body" in site.reason for site in report.sites)
    assert explain(function, torch.randn(8, 32), options={"recipe": "current"}).fallbacks == []


def test_a_site_in_a_transform_is_refused():
    """No other is: what stands outside runs in low precision."""
    inside, outside, x = mlp().requires_grad_(False), mlp().requires_grad_(False), torch.randn(8, 32)

    def function(x):
        return outside(torch.func.grad(lambda x: inside(x).square().sum())(x))

    report = explain(function, x, options={"recipe": "delayed"})
    assert [site.reason for site in report.sites if site.gemm == "fprop"] == [
        *["delayed scaling inside a transform of torch.func (grad), which keeps no state"] * 2,
        *[None] * 2,
    ]
    run = torch.compile(function, backend="te", options={"recipe": "delayed", "fallback": "silent"})
    expected = function(x)
    assert 0 < (run(x) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("where", ["pass", "compile"])
def test_a_failure_leaves_nothing_behind(where, monkeypatch):
    """State inputs and operands of checkpoint bodies are gone from the graph that compiles in the end."""
    from te_inductor import compat

    seen, real = [], compat.compile_fx

    def spy(gm, inputs, *rest):
        modules = [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
        names = [str(node.target) for module in modules for node in module.graph.nodes]
        names += [name for name, _ in gm.named_buffers()]
        seen.append((sum("te_" in name for name in names), len(inputs)))
        if where == "compile" and len(seen) == 1:
            raise RuntimeError("injected")
        return real(gm, inputs, *rest)

    def broken(plan):
        pre_grad.rewrite_sites(plan)
        raise RuntimeError("injected")

    monkeypatch.setattr(compat, "compile_fx", spy)
    if where == "pass":
        leave_out(monkeypatch, pre_grad, pre_grad.rewrite_sites, broken)
    model = Blocks(partial(checkpoint, use_reentrant=False))
    run = torch.compile(model, backend="te", options={"recipe": RECIPE})
    x = torch.randn(8, 32, requires_grad=True)
    with pytest.warns(FallbackWarning, match="injected"):
        y = run(x)
    torch.testing.assert_close(y, model(x))
    y.sum().backward()
    assert seen[-1] == (0, 1 + len(list(model.parameters())))
    if where == "compile":
        assert seen[0][0] > 0 and seen[0][1] > seen[1][1]
    assert state(model) == {}


def closing_over(number):
    def algorithm(history):
        return history.amax(0) * number

    return algorithm


def double(history):
    return history.amax(0) * 2


def largest_of_all(history):
    return history.max()


def over_tensors(history):
    return history.amax(1)


def not_a_tensor(amax, scale, fp8_max, recipe):
    return 1.0


def broken(amax, scale, fp8_max, recipe):
    return fp8_max / amax / undefined  # noqa: F821


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"amax_compute_algo": largest_of_all}, r"\(largest_of_all\) returned shape \(\), .*expected .*\(2,\)"),
        ({"amax_compute_algo": over_tensors, "amax_history_len": 2}, r"shape \(2,\), .* for 3 tensors"),
        ({"scaling_factor_compute_algo": not_a_tensor}, r"returned is a float \(1.0\), expected a tensor"),
        ({"scaling_factor_compute_algo": broken}, "raised NameError for 2 tensors: name 'undefined'"),
    ],
)
def test_what_functions_in_a_recipe_return(fields, text):
    """One number for all tensors would be broadcast: one scale for all, without a word."""
    run = torch.compile(nn.Linear(16, 16), backend="te", options={"recipe": DelayedScaling(**fields)})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text):
        run(torch.randn(16, 16))


def test_functions_in_a_recipe():
    with pytest.raises(RecipeError, match=r"closes over number.* expected a function without a closure"):
        DelayedScaling(amax_compute_algo=closing_over(2))
    with pytest.raises(RecipeError, match="a number, string, enum member, tuple, Constant or plain function"):
        DelayedScaling(amax_compute_algo=torch.amax)

    def edited(history):
        return history.amax(0) * 3

    edited.__qualname__, edited.__module__ = double.__qualname__, double.__module__
    first, second = (DelayedScaling(amax_compute_algo=function).__fx_repr__() for function in (double, edited))
    assert first[0] != second[0]
    again = DelayedScaling(amax_compute_algo=double)
    assert again.__fx_repr__()[0] == first[0] and again == DelayedScaling(amax_compute_algo=double)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"margin": 1.0}, "margin is a float"),
        ({"margin": True}, "margin is a bool"),
        ({"margin": -1}, "margin is -1, expected 0 to 64"),
        ({"fp8_format": "HYBRID"}, "fp8_format is a str"),
        ({"amax_history_len": 0}, "amax_history_len is 0, expected 1 or more"),
        ({"amax_history_len": 1.0}, "amax_history_len is a float"),
        ({"amax_compute_algo": "mx"}, "unknown DelayedScaling.amax_compute_algo 'mx'; did you mean 'max'"),
        ({"amax_compute_algo": 3}, "unknown DelayedScaling.amax_compute_algo 3"),
        ({"scaling_factor_compute_algo": "max"}, "scaling_factor_compute_algo is a str"),
        ({"reduce_amax": 1}, "reduce_amax is an int"),
        ({"fp8_dpa": True}, "fp8_dpa is True, expected False"),
        ({"fp8_mha": 1}, "fp8_mha is an int .1., expected a bool"),
    ],
)
def test_fields_are_checked(fields, text):
    with pytest.raises(RecipeError, match=text):
        DelayedScaling(**fields)


def test_defaults_are_transformer_engines():
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.fp8_format, recipe.amax_history_len) == (0, Format.HYBRID, 1024)
    assert (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo, recipe.reduce_amax) == ("max", None, True)
    assert (recipe.fp8_dpa, recipe.fp8_mha) == (False, False)


@pytest.mark.parametrize("fallback", ["warn", "error"])
def test_each_model_without_state_is_named(fallback, recwarn):
    """Two of one class run one graph; an error is one at each call, until there is state."""
    warnings.simplefilter("always")  # Python itself says a text once a line
    trained = mlp()
    te(trained, fallback="silent")(torch.randn(8, 32)).sum().backward()
    for model in (mlp(), mlp()):
        run = torch.no_grad()(te(model, fallback=fallback))
        for _ in range(2):
            if fallback == "error":
                with pytest.raises(Exception, match="has seen no step"):
                    run(torch.randn(8, 32))
            else:
                run(torch.randn(8, 32))
        te_inductor.load_state_dict(model, te_inductor.state_dict(trained))
        run(torch.randn(8, 32))
    said = [one for one in recwarn if "has seen no step" in str(one.message)]
    assert len(said) == (2 if fallback == "warn" else 0)
