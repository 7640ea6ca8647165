"""What `te_inductor.autocast` costs to compile: equal recipes never recompile, and nothing else is taken for equal."""

import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from te_inductor import autocast, recipes
from te_inductor.errors import RecipeError
from te_inductor.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MMParams,
    QParams,
    regions,
)
from tests.backend.autocast_programs import Within, X, compiles, layer, te
from tests.recipes import every_recipe

pytestmark = pytest.mark.usefixtures("without_tracing")


@pytest.fixture(autouse=True)
def no_compiles_yet():
    counters.clear()


def recipe_of_many_fields() -> Float8CurrentScaling:
    return Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_fwd_inp=QParams(amax_epsilon=0.5))


def test_equal_recipes_never_recompile():
    """Equal recipes around, inside, or given as an argument do not; and nothing is left behind."""
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
    assert regions.active() == regions.Region() and regions._entered.get() == ()


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
    """Regions differ by equality, by hash, and by the source text that stands for a region in the caches' keys."""
    recipe = recipes.resolve(name)
    every = [regions.Region(recipe=one) for one in (recipe, *variants(recipe))]
    assert len(every) > 1
    assert len(set(every)) == len({region.__fx_repr__()[0] for region in every}) == len(every)
    for region in every:
        source, names = region.__fx_repr__()
        assert eval(source, dict(names)) == region


def parts(key) -> list:
    return [leaf for part in key for leaf in parts(part)] if isinstance(key, tuple) else [key]


def users_own(*_):
    return None


OWN = [CustomRecipe(users_own), DelayedScaling(amax_compute_algo=users_own)]


@pytest.mark.parametrize("recipe", [*recipes.NAMES, *OWN], ids=[*recipes.NAMES, "custom", "delayed with a function"])
def test_guards_run_no_python(recipe):
    """Note [Regions]: what they compare is compared by C, whole or part by part."""
    key = regions.Region(recipe=recipe).key()
    assert all(
        "__eq__" not in vars(kind)
        for part in parts(key)
        for kind in type(part).__mro__
        if kind.__module__ != "builtins"
    )


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
