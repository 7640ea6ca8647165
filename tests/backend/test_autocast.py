"""`te_inductor.autocast` around and inside compiled functions: which recipe a layer gets, and what it costs to compile.

The traps that other libraries met, and where each is held off:

=====================================================================  ==================================================
keyed by id(), or by a repr that omits a field                         test_every_field_of_a_recipe_tells_regions_apart
a table of recipes that grows                                          test_equal_recipes_never_recompile
a global singleton that is replaced, so that guards go stale           test_guards_see_every_change
``recipe=None`` inside a compiled region                               test_no_recipe_is_the_default
a SymInt inside a constant                                             test_a_symbolic_size_is_no_part_of_a_recipe
recompile_limit hit by many configurations of one code object          test_many_recipes_in_one_function_are_one_compile,
                                                                       test_many_recipes_around_one_function
a test that wraps nn.Linear in autocast and so never quantizes         test_nothing_compiled_is_said
second backward with retain_graph; `assert` for user errors; silently  test_compiles.py, test_autograd.py; test_imports.py;
ignored constructor options; padding that corrupts the loss;           test_options.py; numerics/test_linear.py;
tensors left in the CUDA graphs' pool; transposed stores beside NaN    gpu/test_linear.py; offline/test_mlp.py
=====================================================================  ==================================================
"""

import copy
import dataclasses
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from te_inductor import autocast, explain, recipes, regions
from te_inductor.backend import DECIDE, parse, run_passes
from te_inductor.diagnostics import Refusal
from te_inductor.errors import FallbackWarning, RecipeError
from te_inductor.passes import Plan
from te_inductor.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MMParams,
    QParams,
)
from tests.recipes import every_recipe, every_stateless_recipe, strict

pytestmark = pytest.mark.usefixtures("without_codegen")

DIM = 128


def te(function, fullgraph=True, **options):
    return torch.compile(function, backend="te", fullgraph=fullgraph, options={"fallback": "error", **options})


def compiles() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def no_compiles_yet():
    counters.clear()


def chosen(model, *inputs, **options) -> list[str]:
    """The recipe of each layer, in the order of the calls."""
    return [site.recipe for site in explain(model, *inputs, options=options).sites if site.gemm == "fprop"]


def step(model, x: torch.Tensor, **options) -> list[torch.Tensor]:
    """A forward and a backward of a copy, which starts without state: the output and all gradients."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(0)
    y = te(model, **options)(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Within(nn.Module):
    """A module whose forward runs in a region of its own."""

    def __init__(self, module: nn.Module, **region) -> None:
        super().__init__()
        self.module, self.region = module, region

    def forward(self, x):
        with autocast(**self.region):
            return self.module(x)


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


def layer() -> nn.Linear:
    return nn.Linear(DIM, DIM)


X = (32, DIM)


# What a recipe reaches.


@every_recipe
def test_a_region_computes_what_the_option_does(name):
    """Around a compiled function and inside one, forward and gradients, bit for bit, wherever the backward runs."""
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
    """That of the options, else of the environment, else auto: whatever the regions around say."""
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
    """It speaks of many layers, a policy entry of one."""
    monkeypatch.setattr("te_inductor.patterns.size_rule.refusal", lambda matches, recipe: Refusal("too small"))
    model = Within(nn.Sequential(layer(), layer()), recipe="block")
    sites = explain(model, torch.randn(X), options={"policy": {"module.1": "rowwise"}}).sites
    assert {(site.fqn, site.kernel) for site in sites} == {("module.0", "high_precision"), ("module.1", "inductor")}


# Bodies, breaks, exceptions, threads.


@every_stateless_recipe  # delayed scaling records once more: test_delayed_backward.py
def test_checkpoints(name):
    """A region in the body of a checkpoint, and around it: recomputed as it was."""
    model, x = layer(), torch.randn(X)
    allowed = {"fallback": strict(name)}
    expected = step(model, x, recipe=name, **allowed)
    assert same(step(Checkpointed(Within(model, recipe=name)), x, recipe="none", **allowed), expected)
    assert same(step(Within(Checkpointed(model), recipe=name), x, recipe="none", **allowed), expected)
    nested = Within(Checkpointed(Within(Checkpointed(model), recipe=name)), enabled=False)
    assert same(step(nested, x, recipe="none", **allowed), expected)


def test_one_body_in_two_regions_is_refused():
    model = layer()

    @torch.compiler.nested_compile_region
    def body(x):
        return model(x)

    def function(x):
        with autocast(enabled=False):
            y = body(x)
        with autocast(recipe="rowwise"):
            return y + body(x)

    sites = explain(function, torch.randn(X)).sites
    assert {site.kernel for site in sites} == {"high_precision"}
    assert "one body is called under 2 different autocasts" in sites[0].reason


def test_a_graph_cut_in_pieces():
    """As DistributedDataParallel does it, between its buckets: here each layer is a bucket, and a piece."""
    found = []

    def backend(gm, inputs):
        plan = Plan(gm, parse(None, {}), inputs)
        found.append([site.recipe for site in run_passes(plan, DECIDE).sites if site.gemm == "fprop"])
        return gm.forward

    inner = Within(
        nn.Sequential(layer(), Within(nn.Sequential(layer(), layer()), enabled=False), layer()), recipe="block"
    )
    cut = DDPOptimizer(1, backend, first_bucket_cap=1).compile_fn
    torch.compile(nn.Sequential(layer(), inner, layer()), backend=cut, fullgraph=True)(torch.randn(X))
    assert found == [["current"], ["block"], ["none"], ["none"], ["block"], ["current"]]


def test_a_checkpoint_that_nobody_compiles():
    """torch runs the function again when the backward calls, where the region around it is gone: one inside is not."""
    model, x = layer(), torch.randn(X)
    expected = step(model, x, recipe="rowwise")
    run = te(model)

    def function(x):
        with autocast(recipe="rowwise"):
            return run(x)

    x.requires_grad_()
    y = checkpoint(function, x, use_reentrant=False)
    assert same([y.detach(), *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))], expected)


def test_graph_breaks_inside_a_compiled_function():
    """Around it, all graphs have the region."""
    model = layer()

    def function(x):
        x = model(x)
        torch._dynamo.graph_break()
        return model(x)

    expected = te(function, fullgraph=False, recipe="rowwise")(x := torch.randn(X))
    with autocast(recipe="rowwise"):
        assert chosen(function, x) == ["rowwise", "rowwise"]
        assert torch.equal(te(function, fullgraph=False)(x), expected)


def test_a_graph_break_inside_a_region():
    """torch gives up the function, and compiles what it calls; that is told, and the pieces have their region."""
    model = layer()

    def piece(x):
        return model(x) * 2

    def function(x):
        with autocast(recipe="rowwise"):
            x = piece(x)
            torch._dynamo.graph_break()
            return piece(x)

    x = torch.randn(X)
    with pytest.warns(FallbackWarning, match="because of a graph break inside the `with`"):
        y = te(function, fullgraph=False)(x)
    compiled = te(piece, recipe="rowwise")
    assert torch.equal(y, compiled(compiled(x)))
    assert regions.active() == regions.Region()


def test_exceptions_leave_regions():
    model, x = layer(), torch.randn(X)
    with pytest.raises(KeyError), autocast(recipe="block"), autocast(enabled=False):
        raise KeyError
    assert regions.active() == regions.Region()

    def function(x, fails):
        try:
            with autocast(recipe="block"):
                x = model(x)
                if fails:
                    raise ValueError
                x = model(x)
        except ValueError:
            x = model(x)
        return model(x)

    assert chosen(function, x, False) == ["block", "block", "current"]
    assert chosen(function, x, True) == ["block", "current", "current"]


def test_threads():
    """Each has its own region, for functions that others compiled too."""
    run, x = te(layer()), torch.randn(X)
    names, barrier = ["current", "rowwise", "block", "none"], threading.Barrier(4, timeout=60)
    outside, expected = run(x), {}
    for name in names:
        with autocast(recipe=name):
            expected[name] = run(x)
    assert compiles() == 5
    wrong = []

    def work(name):
        with autocast(recipe=name):
            for _ in range(20):
                barrier.wait()
                if not torch.equal(run(x), expected[name]):
                    wrong.append(name)
        if not torch.equal(run(x), outside):
            wrong.append(f"{name}, left")

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    with autocast(recipe="rowwise"):  # of this thread alone
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == [] and compiles() == 5


# What it costs.


def recipe_of_many_fields() -> Float8CurrentScaling:
    return Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_fwd_inp=QParams(amax_epsilon=0.5))


def test_equal_recipes_never_recompile():
    """Around, inside, given as an argument; and nothing is left behind."""
    model, x = layer(), torch.randn(X)

    def inside(x):
        with autocast(recipe=Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_fwd_inp=QParams(amax_epsilon=0.5))):
            return model(x)

    def given(x, recipe):
        with autocast(recipe=recipe):
            return model(x)

    run_given = te(given)
    for run in (te(inside), te(model), lambda x: run_given(x, recipe_of_many_fields())):
        counters.clear()
        for _ in range(4):
            with autocast(recipe=recipe_of_many_fields()):
                y = run(x)
            with autocast(enabled=True, recipe=recipe_of_many_fields()):
                assert torch.equal(run(x), y)
        assert compiles() == 1
    assert regions.active() == regions.Region() and regions._active.around == ()


def test_another_recipe_recompiles_once():
    model, x = layer(), torch.randn(X)

    def given(x, recipe):
        with autocast(recipe=recipe):
            return model(x)

    run_model = te(model)

    def around(x, recipe):
        with autocast(recipe=recipe):
            return run_model(x)

    for run in (te(given), around):
        counters.clear()
        for expected, recipe in enumerate([recipe_of_many_fields(), Float8RowwiseScaling(), Float8BlockScaling()], 1):
            for _ in range(3):
                run(x, recipe)
            assert compiles() == expected


def test_regions_that_mean_the_same_are_equal():
    """None at all and the default; disabled whatever the recipe; a name and what it names."""
    run, x = te(layer()), torch.randn(X)
    run(x)
    with autocast():
        run(x)
    assert compiles() == 1
    for off in ({"enabled": False}, {"enabled": False, "recipe": "block"}, {"recipe": "none"}):
        with autocast(**off):
            run(x)
    assert compiles() == 2
    for on in ("block", Float8BlockScaling()):
        with autocast(recipe=on):
            run(x)
    assert compiles() == 3


def test_a_function_whose_layers_have_their_own_region_ignores_the_threads():
    run, x = te(Within(layer(), recipe="block")), torch.randn(X)
    y = run(x)
    with autocast(enabled=False):
        assert torch.equal(run(x), y)
    assert compiles() == 1


def variants(recipe) -> list:
    """The recipe with each field changed to another value that it takes, one at a time."""
    others = {
        bool: lambda value: not value,
        int: lambda value: value + 1,
        float: lambda value: value + 0.5,
        QParams: lambda value: dataclasses.replace(value, amax_epsilon=value.amax_epsilon + 0.5),
        MMParams: lambda value: MMParams(not value.use_split_accumulator),
        Format: lambda value: Format.HYBRID if value is Format.E4M3 else Format.E4M3,
    }
    made = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        try:
            made.append(dataclasses.replace(recipe, **{field.name: others[type(value)](value)}))
        except (KeyError, RecipeError):
            continue  # a field of another type, or that may not be changed alone
    return made


@every_recipe
def test_every_field_of_a_recipe_tells_regions_apart(name):
    """By equality, by hash, and by the source text that stands for a region in the caches' keys."""
    recipe = recipes.resolve(name)
    every = [regions.Region(recipe=one) for one in (recipe, *variants(recipe))]
    assert len(every) > 1
    assert len(set(every)) == len({region.__fx_repr__()[0] for region in every}) == len(every)
    for region in every:
        source, names = region.__fx_repr__()
        assert eval(source, dict(names)) == region


def test_guards_see_every_change():
    """What they compare is the thread's region as it is, not the object that it was."""
    run, x = te(layer()), torch.randn(X)
    outputs = {}
    for _ in range(3):
        for name in ("current", "none", "rowwise"):
            with autocast(recipe=name):
                y = run(x)
                assert torch.equal(outputs.setdefault(name, y), y)
    assert compiles() == 3 and len({y.sum().item() for y in outputs.values()}) == 3


def test_many_recipes_in_one_function_are_one_compile():
    """More than torch's recompile_limit of 8, all through the code of nn.Linear."""
    layers = nn.ModuleList(layer() for _ in range(12))

    def function(x):
        for place, one in enumerate(layers):
            with autocast(recipe=Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=float(place)))):
                x = one(x)
        return x

    te(function)(torch.randn(X))
    assert compiles() == 1


def test_many_recipes_around_one_function():
    """Each is a compile of the same code, which torch's limit counts; raised, there is one for each and no more."""
    run, x = te(layer()), torch.randn(X)

    def sweep(count):
        for place in range(count):
            with autocast(recipe=Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=float(place)))):
                run(x)

    with torch._dynamo.config.patch(recompile_limit=16):
        sweep(12)
        sweep(12)
    assert compiles() == 12
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        sweep(12)


def test_a_symbolic_size_is_no_part_of_a_recipe():
    model = layer()

    def function(x):
        with autocast(recipe=Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=x.shape[0]))):
            return model(x)

    run = torch.compile(function, backend="te", fullgraph=True, dynamic=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="not a constant"):
        run(torch.randn(X))


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
        ({"recipe": 8}, "recipe is a int"),
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


@pytest.mark.codegen
def test_compiled_by_inductor():
    model, x = nn.Sequential(Within(layer(), recipe="rowwise"), layer()), torch.randn(X)
    y, *gradients = step(model, x)
    expected, *others = step(nn.Sequential(model[0].module, model[1]), x, policy={"0": "rowwise"})
    torch.testing.assert_close(y, expected)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, other)


def test_nothing_compiled_is_said(monkeypatch):
    """Once, at the end of the outermost region; never where the backend was called."""
    monkeypatch.setattr(regions, "_compiles", False)
    model, x = layer(), torch.randn(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with autocast(enabled=False):
            model(x)
    with pytest.warns(FallbackWarning, match="nothing has been compiled") as caught, autocast(), autocast():
        y = model(x)
    assert len(caught) == 1 and torch.equal(y, model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with autocast():
            model(x)
        monkeypatch.setattr(regions, "_compiles", False)
        with autocast():
            te(model)(x)
