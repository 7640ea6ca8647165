"""A backward in another precision than its forward: of every recipe, high precision, what fprop's copies stand for, and
other recipes, of both GEMMs or of each."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import ops, recipes
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.ops.layers.sinks import MainGrad
from te_inductor.recipes import BackwardPrecision, Slots
from tests.recipes import every_recipe

M, N, K = 48, 64, 96
ENDS = torch.tensor([16, 16, 40], dtype=torch.int32)  # rows behind the last group
FORMS = {"dense": (), "experts": (3,)}


def slots(name: str, backward: object) -> Slots:
    recipe = recipes.resolve(name)
    return type(recipe)(backward=backward).slots_of("")


def tensors(form: str, dtype: torch.dtype, weights: int = 1) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(M, K), *[(*FORMS[form], N, K)] * weights, *[(M, N)] * weights]
    x, *others = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, others[:weights], others[weights:]


def run(form: str, slots: Slots, dtype: torch.dtype, weights: int = 1, biased: bool = False, **more: object) -> list:
    """The outputs, dx, the gradients of the weights and of their biases."""
    x, ws, dys = tensors(form, dtype, weights)
    biases = [torch.linspace(-1, 1, N).to(dtype).requires_grad_() for _ in ws] if biased else []
    leaves = [one.requires_grad_() for one in (x, *ws)] + biases
    spec = ops.LayerSpec(slots, **{"sink": more.pop("sink")} if "sink" in more else {})
    ends = {"ends": ENDS} if form == "experts" else {}
    torch.manual_seed(1)  # of stochastic rounding
    ys = ops.layers(x, ws, biases, spec, dtype, **ends, **more)
    torch.autograd.backward(ys, dys)
    return [*(y.detach() for y in ys), *(one.grad for one in leaves)]


def autograd(form: str, x: Tensor, weights: list[Tensor], dys: list[Tensor]) -> list[Tensor]:
    """dx and the weights' gradients, as autograd has them of products in the dtype of the operands."""
    leaves = [one.detach().clone().requires_grad_() for one in (x, *weights)]
    x, *ws = leaves
    if form == "dense":
        ys = [F.linear(x, w) for w in ws]
    else:
        parts = zip(torch.tensor_split(x, ENDS.tolist())[:-1], *(w.unbind() for w in ws), strict=True)
        [*rows] = (part @ w.t() for part, w in parts)
        ys, dys = [torch.cat(rows)], [dys[0][: int(ENDS[-1])]]
    torch.autograd.backward(ys, dys)
    return [one.grad for one in leaves]


def stands_for(form: str, name: str, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What fprop's copies of x and the weights stand for, in fp32."""
    own = recipes.resolve(name).slots()

    def dequantized(matrix: Tensor, slot: str, amax: Tensor | None = None) -> Tensor:
        quantizer, two = getattr(own, slot), amax is not None
        amax = (
            ops.tensor_amax(matrix, quantizer.rows_have_factors)
            if quantizer.granularity.two_level and not two
            else amax
        )
        data, scale_inv = ops.quantize(matrix, quantizer, amax)
        found = ops.dequantize(data, scale_inv, quantizer, torch.float32)[:, : matrix.shape[1]]
        return found if amax is None else found * (amax / quantizer.two_level_max)

    if form == "dense":
        return dequantized(x, "input"), [dequantized(w, "weight") for w in weights]
    [w] = weights
    amax = ops.tensor_amax(w.flatten(0, 1)) if own.weight.granularity.two_level else None
    return dequantized(ops.mask_rows(x, ENDS), "input"), [torch.stack([dequantized(one, "weight", amax) for one in w])]


@every_recipe
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "rowwise", {"dgrad": "mxfp8"}], ids=str)
def test_the_forward_is_the_recipes_own(name, backward):
    own, other = (run("dense", slots(name, how), torch.bfloat16, biased=True) for how in (None, backward))
    assert torch.equal(own[0], other[0]) and torch.equal(own[3], other[3])  # and the bias's gradient
    assert backward != "high_precision" or not torch.equal(own[1], other[1])
    if backward == {"dgrad": "mxfp8"} and not slots(name, None).grad_output.stochastic:
        assert torch.equal(own[2], other[2])


@pytest.mark.parametrize(
    ("form", "dtype"), [("dense", torch.float32), ("dense", torch.bfloat16), ("experts", torch.bfloat16)], ids=str
)
@every_recipe
def test_high_precision_is_autograds_bits(name, form, dtype):
    x, weights, dys = tensors(form, dtype)
    _, dx, dw = run(form, slots(name, "high_precision"), dtype)
    expected = autograd(form, x, weights, dys)
    assert torch.equal(dx, expected[0]) and torch.equal(dw, expected[1])


@pytest.mark.parametrize("form", FORMS)
@every_recipe
def test_dequantized_is_autograd_of_the_dequantized_forward(name, form):
    """The gradients are those that float64 has, up to the rounding of fp32's sums. Experts multiply in bf16, to which what
    the copies stand for is rounded once, as is the result."""
    dtype = torch.float32 if form == "dense" else torch.bfloat16
    x, weights, dys = tensors(form, dtype)
    low_x, low_weights = stands_for(form, name, x, weights)
    _, dx, dw = run(form, slots(name, "dequantized"), dtype)
    if form == "experts":
        low_x, low_weights = low_x.to(dtype), [w.to(dtype) for w in low_weights]
    expected = autograd(form, *(low_x.double(), [w.double() for w in low_weights], [dy.double() for dy in dys]))
    size = autograd(
        form, low_x.double().abs(), [w.double().abs() for w in low_weights], [dy.double().abs() for dy in dys]
    )
    epsilon = M * torch.finfo(torch.float32).eps
    for found, one, sum_ in zip((dx, dw), expected, size, strict=True):
        bound = epsilon * sum_ + torch.finfo(dtype).eps / 2 * one.abs()
        assert ((found.double() - one).abs() <= bound).all()
        assert (found.double() - one).abs().max() > 0 or dtype == torch.bfloat16


@every_recipe
def test_a_recipe_of_the_backward_has_the_gradients_that_are_its_own(name):
    """Each GEMM by itself, as of a layer that has the other recipe in its forward too."""
    of_rows = run("dense", slots("rowwise", None), torch.bfloat16)
    both = run("dense", slots(name, "rowwise"), torch.bfloat16)
    assert all(map(torch.equal, both[1:], of_rows[1:]))
    high = run("dense", slots(name, "high_precision"), torch.bfloat16)
    for gemm, place in (("dgrad", 1), ("wgrad", 2)):
        other = {"dgrad": "wgrad", "wgrad": "dgrad"}[gemm]
        mixed = run("dense", slots(name, {gemm: "rowwise", other: "high_precision"}), torch.bfloat16)
        assert torch.equal(mixed[place], of_rows[place]) and torch.equal(mixed[3 - place], high[3 - place])


@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "current"])
def test_layers_that_are_one(backward):
    """Layers of one input have the gradients of two, of which the input's is the sum."""
    x, weights, dys = tensors("dense", torch.float32, 2)
    made = slots("rowwise", backward)
    found = run("dense", made, torch.float32, 2, biased=True)
    if backward == "high_precision":
        dx, *dws = autograd("dense", x, weights, dys)
        assert torch.equal(found[2], dx) and all(map(torch.equal, found[3:5], dws))
    if backward == "dequantized":
        low_x, low_weights = stands_for("dense", "rowwise", x, weights)
        for one, expected in zip(found[2:5], autograd("dense", low_x, low_weights, dys), strict=True):
            torch.testing.assert_close(one, expected)
    if backward == "current":  # one scale for both, as of a layer whose recipe it is
        assert all(map(torch.equal, found[2:], run("dense", slots("current", None), torch.float32, 2, biased=True)[2:]))


@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized", "current"])
def test_gradients_are_added_to_totals(backward, weights):
    """The totals have products of bf16 before these are rounded."""
    made, totals = slots("rowwise", backward), [torch.zeros(N, K) for _ in range(weights)]
    *_, plain = [run("dense", made, torch.bfloat16, weights)]
    found = run("dense", made, torch.bfloat16, weights, sink=MainGrad(), takers=totals)
    assert found[weights + 1 :] == [None] * weights
    for total, dw in zip(totals, plain[weights + 1 :], strict=True):
        assert torch.equal(total.bfloat16(), dw) and not torch.equal(total, dw.float())


def test_what_is_saved():
    """x and the weight themselves, or copies of a byte an element."""
    sizes = {}
    for backward in (None, "high_precision", "dequantized"):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.nbytes) or x, lambda x: x):
            x, [w], _ = tensors("dense", torch.bfloat16)
            ops.layers(x, [w.requires_grad_()], [], ops.LayerSpec(slots("current", backward)), torch.bfloat16)
        sizes[backward] = sum(saved)
    assert sizes["high_precision"] == 2 * M * K and sizes["dequantized"] == M * K + 4 == sizes[None]


def test_slots_are_written_as_text_and_read():
    for backward in (None, "high_precision", "dequantized", "nvfp4", {"wgrad": "mxfp8"}):
        made = slots("block", backward)
        assert Slots.from_text(made.to_text()) == made
    older = slots("block", None).to_text().replace(',"dgrad_operands":null,"wgrad_operands":null', "")
    assert "operands" not in older and Slots.from_text(older) == slots("block", None)


def test_two_recipes_that_mean_the_same_are_equal():
    one = recipes.MXFP8BlockScaling(backward="rowwise")
    assert one == recipes.MXFP8BlockScaling(backward=BackwardPrecision("rowwise", recipes.Float8RowwiseScaling()))
    assert one == recipes.MXFP8BlockScaling(backward={"dgrad": "rowwise", "wgrad": "rowwise"})
    assert recipes.MXFP8BlockScaling(backward={}) == recipes.MXFP8BlockScaling() == one.own != one
    assert len({one, recipes.MXFP8BlockScaling(), recipes.MXFP8BlockScaling(backward={"dgrad": "rowwise"})}) == 3


@pytest.mark.parametrize(
    ("backward", "text"),
    [
        ("zzz", "unknown DelayedScaling.backward 'zzz'"),
        ("high-precision", "did you mean 'high_precision'"),
        ("none", "expected 'high_precision'"),
        ("delayed", "expected one without state, such as 'current'"),
        ("nvfp4_weight_only", "expected a recipe of plain weights"),
        (recipes.MXFP8BlockScaling(backward="rowwise"), "with a backward of its own"),
        (3, "is an int"),
        ({"fprop": "current"}, "unknown GEMM of DelayedScaling.backward 'fprop'"),
        ({"dgrad": "crrent"}, "did you mean 'current'"),
        ("{oops", "is no JSON"),
    ],
    ids=str,
)
def test_wrong_values(backward, text):
    with pytest.raises(recipes.RecipeError, match=text):
        recipes.DelayedScaling(backward=backward)


def test_transformer_engines_name_says_ours():
    with pytest.raises(recipes.RecipeError, match="the field is named backward here"):
        recipes.MXFP8BlockScaling(backward_override="high_precision")


@every_recipe
def test_pickles_of_older_recipes_load(name):
    recipe = recipes.resolve(name)
    state = {field: value for field, value in vars(recipe).items() if field != "backward"}
    made = object.__new__(type(recipe))
    made.__setstate__(state)
    assert made == recipe and made.backward is None


@pytest.mark.parametrize("name", ["current", "block"])
def test_a_weight_that_was_gathered_in_low_precision(name):
    """The backward multiplies by what was gathered."""
    made = slots(name, "dequantized")
    x, w, dy = (torch.randn(size) for size in ((M, 128), (128, 128), (M, 128)))
    data, scale_inv = ops.quantize(w, made.weight)
    gathered = GatheredWeight(data, scale_inv, w.shape, w.dtype, recipes.resolve(name)).requires_grad_()
    found = []
    for weight in (w.clone().requires_grad_(), gathered):
        leaf = x.clone().requires_grad_()
        [y] = ops.layers(leaf, [weight], [], ops.LayerSpec(made), x.dtype)
        y.backward(dy)
        found.append((y.detach(), leaf.grad, weight.grad))
    assert all(map(torch.equal, *found))
