"""`te_inductor.autocast` around and inside compiled functions: which recipe a layer gets, and how it is used.

In programs: test_autocast_programs.py; what it costs to compile: test_autocast_compiles.py.

The traps that other libraries met, and where each is held off, in one of the three or the file that is named:

=====================================================================  ==================================================
keyed by id(), or by a repr that omits a field                         test_every_field_of_a_recipe_tells_regions_apart
a table of recipes that grows                                          test_equal_recipes_never_recompile
a global singleton that is replaced, so that guards go stale           test_guards_see_every_change
``recipe=None`` inside a compiled region                               test_no_recipe_is_the_default
a SymInt inside a constant                                             test_a_symbolic_size_is_no_part_of_a_recipe
recompile_limit hit by many configurations of one code object          test_many_recipes_in_one_function_are_one_compile,
                                                                       test_many_recipes_around_one_function
a test that wraps nn.Linear in autocast and so never quantizes         test_nothing_compiled_is_said
second backward with retain_graph                                      test_autograd.py: test_retain_graph_twice;
                                                                       test_delayed_backward.py: test_retain_graph
`assert` for user errors                                               test_options.py:
                                                                       test_no_error_of_the_user_is_an_assert
constructor options that are silently ignored                          test_recipe_fields.py: test_no_field_is_ignored;
                                                                       numerics/test_delayed.py
non-contiguous main_grad                                               test_main_grad.py: test_totals_that_do_not_fit
padding done outside the op that corrupts the loss                     test_autograd.py: test_a_loss_over_padded_layers
tensors left in the CUDA graphs' pool                                  gpu/test_cuda_graphs.py
wrong transposed fp8 stores beside NaN-propagating min/max             offline/test_mlp.py:
                                                                       test_casts_saturate_by_comparison; gpu/test_ops.py:
                                                                       test_transposed_casts_beside_nan_…_at_full_size
=====================================================================  ==================================================
"""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from te_inductor import autocast, explain
from te_inductor.errors import FallbackWarning, RecipeError
from te_inductor.recipes import (
    Float8BlockScaling,
    regions,
)
from tests.backend.autocast_programs import DIM, Within, X, chosen, compiles, layer, same, step, te
from tests.rates import rated
from tests.recipes import every_recipe, strict

pytestmark = pytest.mark.usefixtures("without_tracing")


@pytest.fixture(autouse=True)
def no_compiles_yet():
    counters.clear()


# What a recipe reaches.


@pytest.mark.quick("delayed", "block", "nvfp4")
@every_recipe
def test_a_region_computes_what_the_option_does(name):
    """A region around a compiled function, and one inside: forward and gradients, bit for bit, wherever the backward
    runs."""
    model, x = layer(), torch.randn(X)
    allowed = {"fallback": strict(name)}
    expected = step(model, x, recipe=name, **allowed)
    assert not same(expected, step(model, x, recipe="none"))
    assert same(step(Within(model, recipe=name), x, recipe="none", **allowed), expected)
    with autocast(recipe=name):
        assert same(step(model, x, recipe="none", **allowed), expected)
        twin = copy.deepcopy(model)
        x.requires_grad_()
        torch.manual_seed(0)
        y = te(twin, recipe="none", **allowed)(x)
    with autocast(enabled=False):
        assert same([y.detach(), *torch.autograd.grad(y.square().sum(), (x, *twin.parameters()))], expected)


def test_regions_nest():
    model = layer()

    def function(x):
        x = model(x)  # the thread's
        with autocast(recipe="block"):
            x = model(x)
            with autocast(enabled=False):
                x = model(x)
                with autocast(recipe="rowwise"):
                    x = model(x)
                x = model(x)
            x = model(x)
        return model(x)

    inside = ["block", "none", "rowwise", "none", "block"]
    assert chosen(function, torch.randn(X)) == ["current", *inside, "current"]
    with autocast(recipe="delayed"):
        assert chosen(function, torch.randn(X)) == ["delayed", *inside, "delayed"]
        with autocast(enabled=False):
            assert chosen(function, torch.randn(X)) == ["none", *inside, "none"]
        assert chosen(function, torch.randn(X), recipe="block") == ["delayed", *inside, "delayed"]


def test_no_recipe_is_the_default(monkeypatch):
    """The default is that of the options, else of the environment, else auto: whatever the regions around say."""
    model = Within(layer())
    for around in (nullcontext, lambda: autocast(recipe="block"), lambda: autocast(enabled=False)):
        torch._dynamo.reset()  # each recipe is a compile, of which torch 2.11 lets `explain` make eight
        with around():
            assert chosen(model, torch.randn(X), recipe="rowwise") == ["rowwise"]
            assert chosen(model, torch.randn(X)) == ["current"]
            with autocast():
                assert chosen(layer(), torch.randn(X), recipe="rowwise") == ["rowwise"]
            monkeypatch.setenv("TE_INDUCTOR_RECIPE", "delayed")
            assert chosen(model, torch.randn(X)) == ["delayed"]
            monkeypatch.delenv("TE_INDUCTOR_RECIPE")


def test_modules_of_different_recipes():
    """Each layer in the region that its caller put around it; q, k and v of one recipe alone are one GEMM."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (layer() for _ in range(4))

        def forward(self, x):
            with autocast(recipe="current"):
                q, k = self.q(x), self.k(x)
            with autocast(recipe="rowwise"):
                v = self.v(x)
            return self.o(nn.functional.scaled_dot_product_attention(q, k, v))

    model, x = Attention(), torch.randn(4, 16, DIM)
    sites = [site for site in explain(model, x, options={"recipe": "block"}).sites if site.gemm == "fprop"]
    assert {site.fqn: site.recipe for site in sites} == {"q": "current", "k": "current", "v": "rowwise", "o": "block"}
    assert {site.fqn: site.merged for site in sites} == {"q": ("q", "k"), "k": ("q", "k"), "v": (), "o": ()}
    by_policy = {"q": "current", "k": "current", "v": "rowwise"}
    for region in (Float8BlockScaling(), "delayed", None):
        with autocast(recipe=region):
            expected = step(model, x, policy=by_policy)
            assert same(step(model, x), expected)


def test_a_policy_names_layers_and_a_region_does_not():
    """A policy entry goes before the region's recipe, and not before `enabled=False`; its glob is used all the same."""
    model = nn.Sequential(layer(), layer())
    policy = {"1": "rowwise"}
    with autocast(recipe="block"):
        assert chosen(model, torch.randn(X), policy=policy) == ["block", "rowwise"]
    with autocast(enabled=False):
        report = explain(model, torch.randn(X), options={"policy": policy})
        assert {site.recipe for site in report.sites} == {"none"} and report.unused_policy == []


def test_a_region_does_not_overrule_the_size_rule(monkeypatch):
    """A region speaks of many layers, a policy entry of one."""
    rated(monkeypatch)
    model = Within(nn.Sequential(layer(), layer()), recipe="block")
    sites = explain(model, torch.randn(X), options={"policy": {"module.1": "rowwise"}}).sites
    assert {(site.fqn, site.kernel) for site in sites} == {("module.0", "high_precision"), ("module.1", "inductor")}


# How it is used, rightly and wrongly.


def test_as_a_decorator():
    model, x = layer(), torch.randn(X)

    @autocast(recipe="block")
    def function(x):
        """What it does."""
        return model(x)

    assert function.__doc__ == "What it does."
    assert chosen(function, x) == ["block"]
    run = te(model)
    around = autocast(recipe="block")(run)
    assert torch.equal(around(x), te(function)(x))


def test_a_context_may_be_entered_again():
    region, run, x = autocast(recipe="block"), te(layer()), torch.randn(X)
    with region:
        y = run(x)
        with autocast(enabled=False), region:
            assert torch.equal(run(x), y)
    assert compiles() == 1 and regions.active() == regions.Region()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"recipe": "blok"}, "unknown recipe 'blok'; did you mean 'block'?"),
        ({"recipe": 8}, "recipe is an int"),
        ({"enabled": "no"}, "autocast's enabled is a str"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(RecipeError) as raised:
        autocast(**arguments)
    assert text in str(raised.value)
    with pytest.raises(Exception) as raised:
        te(Within(layer(), **arguments))(torch.randn(X))
    assert text in str(raised.value)


def test_another_backend_is_not_disturbed():
    model, x = Within(layer(), recipe="block"), torch.randn(X)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.thorough
@pytest.mark.codegen
def test_compiled_by_inductor():
    model, x = nn.Sequential(Within(layer(), recipe="rowwise"), layer()), torch.randn(X)
    y, *gradients = step(model, x)
    expected, *others = step(nn.Sequential(model[0].module, model[1]), x, policy={"0": "rowwise"})
    torch.testing.assert_close(y, expected)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other)


def test_nothing_compiled_is_said(monkeypatch):
    """The warning comes once, at the end of the outermost region; never where a graph was compiled in it, or in an
    equal one."""

    def forget():
        monkeypatch.setattr(regions, "_said", False)
        monkeypatch.setattr(regions, "_compiled", set())

    forget()
    model, x = layer(), torch.randn(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with autocast(enabled=False):
            model(x)
    with pytest.warns(FallbackWarning, match="nothing has been compiled") as caught, autocast(), autocast():
        y = model(x)
    assert len(caught) == 1 and torch.equal(y, model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with autocast():
            model(x)
        forget()
        run = te(model)
        for _ in range(2):
            with autocast(), autocast(recipe="rowwise"):
                run(x)
            with autocast(recipe="rowwise"):
                run(x)
    with pytest.warns(FallbackWarning, match="nothing has been compiled"), autocast(recipe="current"):
        model(x)  # though something was, elsewhere
