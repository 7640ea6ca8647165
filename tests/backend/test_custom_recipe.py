"""CustomRecipe: a user's quantizers reach their slots, by module path; they are cached by code; mistakes are named."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from te_inductor import autocast, explain
from te_inductor.backend import parse, run_passes
from te_inductor.errors import RecipeError
from te_inductor.ops import layers
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.recipes import CustomRecipe, Float8CurrentScaling, Format, Gemm, MMParams, Quantizer, Slots, formats
from tests.backend.autocast_programs import same, step, te
from tests.support.oracle_layers import check, through

pytestmark = pytest.mark.usefixtures("without_tracing")

X = (32, 128)
GEMMS = ("fprop", "dgrad", "wgrad")


def each_its_own(slot, module):
    """Another quantizer for each tensor; each changes values."""
    return {
        "input": Quantizer("e5m2", amax_epsilon=40.0),
        "weight": Quantizer("e4m3", power_2_scale=True),
        "grad_output": Quantizer("e4m3", amax_epsilon=3.0),
    }.get(slot)


def rows(slot, module):
    return None if slot in ("fprop", "dgrad", "wgrad") else Quantizer("e4m3", scope="row")


def blocks(slot, module):
    if slot in ("fprop", "dgrad", "wgrad"):
        return MMParams(use_split_accumulator=True) if slot == "dgrad" else None
    return Quantizer("e4m3", scope="128x128" if slot == "weight" else "1x128")


def sixes(slot, module):
    """FP6, as the OCP Microscaling Formats have it."""
    return None if slot in GEMMS else Quantizer("e3m2" if slot == "grad_output" else "e2m3", scope="1x32")


def nothing(slot, module):
    return None


def by_module(slot, module):
    if module == "first":
        return rows(slot, module)
    return each_its_own(slot, module) if module.startswith("blocks.") else None


def test_slots_by_default_are_those_of_current_scaling():
    assert CustomRecipe(nothing).slots() == Float8CurrentScaling().slots()


@pytest.mark.parametrize("factory", [each_its_own, rows, blocks, sixes])
@pytest.mark.parametrize("road", ["called", "te"])
def test_a_users_quantizer_reaches_its_slot(road, factory):
    """Forward and gradients, by the oracle with the same quantizers; sizes where a wrong one of them is seen."""
    check(through(road), 33, 128, 256, torch.float32, True, CustomRecipe(factory))


@pytest.mark.parametrize(
    ("element", "casts"),
    [
        (("e3m2", torch.uint8, 28.0, 2, -2), "values up to 4.69762e"),  # of 8 bits
        (("e3m2", torch.uint8, 28.0, 2, -2, 2, None, 6), "values up to 28,"),  # two a byte
        (("e2m1", torch.uint8, 4.0, 1, 0, 2, None, 4), "values up to 6, 1 bits"),
        (("e0m3", torch.uint8, 7.0, 3, 0, 2, None, 4), "nothing"),
        (("e4m3", torch.float8_e4m3fn, 240.0, 3, -6), "values up to 448, 3 bits"),
        (("e5m2", torch.float8_e5m2, 57344.0, 3, -14), "values up to 57344, 2 bits"),
        (("e5m2", torch.float8_e5m2, 57344.0, 2, -15), r".* from -14"),
        (("e4m3", torch.float8_e4m3fnuz, 240.0, 3, -7), "nothing"),
        (("half", torch.float16, 65504.0, 10, -14), "nothing"),
    ],
    ids=str,
)
def test_an_element_that_no_cast_makes(element, casts):
    """Its bytes would otherwise be another's values."""
    with pytest.raises(
        RecipeError, match=rf"element '{element[0]}' has values up to .* make {casts}.*; expected one of"
    ):
        formats.Element(*element)


def test_elements_and_scopes_are_those_that_kernels_know():
    for table in (formats.ELEMENTS, formats.SCOPES):
        with pytest.raises(TypeError, match="does not support item assignment"):
            table["another"] = next(iter(table.values()))
    with pytest.raises(RecipeError, match="element 'e1m4', expected one of e4m3, e5m2, e2m1"):
        Quantizer("e1m4")
    with pytest.raises(RecipeError, match="scope '1x64', expected one of tensor, row, 1x128"):
        Quantizer("e4m3", scope="1x64")
    with pytest.raises(RecipeError, match=r"fprop of scopes \('row', '1x64'\), expected of tensor, row, 1x128"):
        Gemm("fprop", scopes=("row", "1x64"))


def coarse(slot, module, changed="input"):
    return Quantizer("e4m3", amax_epsilon=40.0) if slot == changed else None


@pytest.mark.parametrize(
    ("slot", "changes"), [("input", [1, 1, 1]), ("weight", [1, 1, 1]), ("grad_output", [0, 1, 1])], ids=str
)
def test_each_slot_matters(slot, changes):
    """One slot changed changes y, dx and dw, as far as they depend on it: the check above sees which goes where."""
    model, x = nn.Linear(128, 128), torch.randn(X)
    coarse.__defaults__ = (slot,)
    plain, changed = step(model, x), step(model, x, recipe=CustomRecipe(coarse))
    assert [not torch.equal(a, b) for a, b in zip(plain, changed, strict=True)][:3] == changes


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(128, 128), nn.Linear(128, 128)
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def slots_of(model, *inputs, **options) -> list[Slots]:
    """The slots of each layer in the rewritten graph, in order."""
    found = []

    def backend(gm, example_inputs):
        plan = Plan(gm, parse(None, {"weights": "each_call", **options}), example_inputs)
        assert run_passes(plan).failure is None
        found.extend(node.args[3].slots for node in gm.graph.nodes if node.target is layers)
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found


def test_by_module_path():
    model, x = Model(), torch.randn(X)
    recipe = CustomRecipe(by_module)
    expected = [recipe.slots_of(path) for path in ("first", "blocks.0", "blocks.1", "last")]
    assert slots_of(model, x, recipe=recipe) == expected and len(set(expected)) == 3
    assert {site.recipe for site in explain(model, x, options={"recipe": recipe}).sites} == {"custom"}
    policy = {"first": CustomRecipe(rows), "blocks.*": CustomRecipe(each_its_own)}
    assert same(step(model, x, recipe=recipe), step(model, x, policy=policy))
    with autocast(recipe=recipe):
        assert slots_of(model, x) == expected


def test_layers_of_other_quantizers_are_not_one_gemm():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(128, 128, bias=False) for _ in range(3))

        def forward(self, x):
            return self.q(x) + self.k(x) + self.v(x)

    def v_apart(slot, module):
        return Quantizer("e4m3", power_2_scale=True) if (slot, module) == ("weight", "v") else None

    sites = explain(Both(), torch.randn(X), options={"recipe": CustomRecipe(v_apart)}).sites
    assert {site.fqn: site.merged for site in sites} == {"q": ("q", "k"), "k": ("q", "k"), "v": ()}


# Keys.


def made(scale: float):
    """A new function at each call: of equal code, and of equal or other default arguments."""

    def factory(slot, module, epsilon=scale):
        return Quantizer("e4m3", amax_epsilon=epsilon) if slot == "input" else None

    return factory


def test_equal_code_is_an_equal_recipe():
    one, same_again, other = CustomRecipe(made(1.0)), CustomRecipe(made(1.0)), CustomRecipe(made(2.0))
    assert one.factory is not same_again.factory
    assert one == same_again and hash(one) == hash(same_again) and one != other
    assert one.__fx_repr__()[0] == same_again.__fx_repr__()[0] != other.__fx_repr__()[0]
    source, names = one.__fx_repr__()
    assert eval(source, dict(names)) == one


def test_equal_code_never_recompiles():
    model, x = nn.Linear(128, 128), torch.randn(X)
    counters.clear()
    run = te(model)
    for scale, compiles in ((1.0, 1), (1.0, 1), (2.0, 2), (1.0, 2)):
        for _ in range(2):
            with autocast(recipe=CustomRecipe(made(scale))):
                run(x)
            assert counters["stats"]["unique_graphs"] == compiles

    def inside(x):
        with autocast(recipe=CustomRecipe(each_its_own)):
            return model(x)

    assert torch.equal(te(inside)(x), te(model, recipe=CustomRecipe(each_its_own))(x))


def with_default(value, named: bool = False):
    def factory(slot, module, table=None, *, other=None):
        return None

    if named:
        factory.__kwdefaults__ = {"other": value}
    else:
        factory.__defaults__ = (value,)
    return factory


INEXACT = (torch.zeros(5000), [1, 2], {"q": 1}, object(), torch.amax, bytearray(2))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("value", INEXACT, ids=lambda value: type(value).__name__)
def test_defaults_that_have_no_exact_text_are_refused(value, named):
    """The repr of a tensor leaves out most of 5,000 elements; a list may change; an object's has its address."""
    with pytest.raises(RecipeError, match="a default argument of function with_default"):
        CustomRecipe(with_default(value, named))
    with pytest.raises(RecipeError, match="make a tuple"):
        CustomRecipe(with_default((1, (value,)), named))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        ((1,), 1),
        (torch.float32, torch.float64),
        (Quantizer("e4m3"), Quantizer("e5m2")),
        (with_default(1), with_default(2)),
        (frozenset({1, 2}), frozenset({1, 3})),
        (Format.E4M3, Format.HYBRID),
        (None, ...),
    ],
)
def test_defaults_that_differ_are_other_recipes(one, other):
    for named in (False, True):
        first, second = CustomRecipe(with_default(one, named)), CustomRecipe(with_default(other, named))
        assert first != second and first.__fx_repr__()[0] != second.__fx_repr__()[0]
        assert first == CustomRecipe(with_default(one, named))


def test_functions_that_take_their_arguments_otherwise_are_other_recipes():
    def plain(slot, module, epsilon=None):
        return None

    def named(slot, module, *, epsilon=None):
        return None

    named.__qualname__ = plain.__qualname__
    assert CustomRecipe(plain) != CustomRecipe(named)


def test_what_no_key_can_stand_for_is_refused():
    epsilon = 1.0

    def closes_over(slot, module):
        return Quantizer("e4m3", amax_epsilon=epsilon)

    class Factory:
        def __call__(self, slot, module):
            return None

    for factory, text in (
        (closes_over, "closes over epsilon"),
        (functools.partial(nothing), "expected a number"),
        (Factory(), "plain function"),
        ("e4m3", "expected a function of slot and module path"),
    ):
        with pytest.raises(RecipeError, match=text):
            CustomRecipe(factory)


# Mistakes are the user's to mend: raised, and no fallback.


def fails(slot, module):
    raise KeyError(module)


def wrong_type(slot, module):
    return "e4m3"


def two_e5m2(slot, module):
    return Quantizer("e5m2") if slot in ("input", "weight", "grad_output") else None


def rows_by_tensor(slot, module):
    return Quantizer("e4m3", scope="row") if slot == "weight" else None


def square_blocks(slot, module):
    return Quantizer("e4m3", scope="128x128") if slot in ("input", "weight", "grad_output") else None


def fast_blocks(slot, module):
    return MMParams(use_split_accumulator=False) if slot == "wgrad" else blocks(slot, module)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (fails, "factory raised KeyError for slot 'input' of 1: '1'"),
        (wrong_type, "for slot 'input' of 1 is a str ('e4m3'), expected a Quantizer or None"),
        (two_e5m2, "fprop of 1: both operands are e5m2, expected at most one"),
        (rows_by_tensor, "fprop of 1: scopes 'tensor' and 'row', expected the same"),
        (square_blocks, "fprop of 1: scopes '128x128' and '128x128', expected at most one of square blocks"),
        (fast_blocks, "wgrad of 1: use_split_accumulator=False, expected True"),
    ],
)
def test_mistakes(factory, text):
    model, x = nn.Sequential(nn.ReLU(), nn.Linear(128, 128)), torch.randn(X)
    with pytest.raises(RecipeError) as raised:
        explain(model, x, options={"recipe": CustomRecipe(factory)})
    assert text in str(raised.value)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        torch.compile(model, backend="te", options={"recipe": CustomRecipe(factory), "fallback": "silent"})(x)
    assert type(raised.value.inner_exception) is RecipeError
