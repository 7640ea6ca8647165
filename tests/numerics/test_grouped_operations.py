"""Experts' layers by hand: each group against a `Linear` of its own and against float64, the scaled bias, weight
gradients that wait."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from te_inductor.eager_layers import GroupedBias, GroupedLinear, Linear, WaitingGradients
from te_inductor.errors import DoubleBackwardError, OptionError, RecipeError
from te_inductor.recipes import Float8BlockScaling
from tests.support.format_errors import FORWARD, SLACK

E, N, K = 4, 48, 96
SIZES, BEHIND = (5, 0, 130, 1), 3
M = sum(SIZES) + BEHIND
RECIPES = ["current", "rowwise", "block", "mxfp8"]
recipes = pytest.mark.parametrize("recipe", RECIPES)


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    x = torch.randn(M, K)
    x[M - BEHIND :] = torch.nan  # of nobody
    made = {"x": x, "weight": torch.randn(E, N, K) / K**0.5, "bias": torch.randn(E, N), "scales": torch.rand(M)}
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in made.items()}


def ends() -> Tensor:
    return torch.tensor(SIZES).cumsum(0).int()


def groups() -> list[tuple[int, slice]]:
    return [(place, slice(*span)) for place, span in enumerate(itertools.pairwise([0, *ends().tolist()]))]


def gradient_of(y: Tensor) -> Tensor:
    torch.manual_seed(5)
    dy = torch.randn(y.shape).to(y.dtype)
    dy[M - BEHIND :] = torch.nan
    return dy


def backward(y: Tensor, given: dict[str, Tensor], names: str = "x weight bias") -> list[Tensor]:
    y.backward(gradient_of(y))
    return [y.detach(), *(given[name].grad for name in names.split())]


@pytest.mark.sample(1)
@recipes
@pytest.mark.parametrize("one", [True, False], ids=["one parameter", "one each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_group_is_a_layer_of_its_own(recipe, one, dtype):
    """Bit for bit but for the order of sums, where no scale is everybody's; rows of nobody give zeros."""
    given = inputs(dtype)
    layer = GroupedLinear(recipe)
    weight = given["weight"] if one else list(given["weight"].unbind())
    bias = given["bias"] if one else list(given["bias"].unbind())
    found = backward(layer(given["x"], ends(), weight, bias), given)
    assert found[0].dtype == dtype and (found[0][M - BEHIND :] == 0).all() and (found[1][M - BEHIND :] == 0).all()
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    alone = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    dy, by_hand = gradient_of(found[0]), Linear(recipe)
    for expert, rows in groups():
        if rows.start == rows.stop:
            assert not any(gradient[expert].any() for gradient in found[2:])
            continue
        double = torch.nn.functional.linear(exact["x"][rows], exact["weight"][expert], exact["bias"][expert])
        double.backward(dy[rows].double())
        y = by_hand(alone["x"][rows], alone["weight"][expert], alone["bias"][expert])
        y.backward(dy[rows])
        assert_near(found[0][rows], y, double, recipe)
    for name, gradient in zip(("x", "weight", "bias"), found[1:], strict=True):
        rows = slice(0, M - BEHIND) if name == "x" else slice(None)
        assert_near(gradient[rows], alone[name].grad[rows], exact[name].grad[rows], recipe)


def assert_near(found: Tensor, alone: Tensor, exact: Tensor, recipe: str) -> None:
    """`FORWARD` is the relative rms error of one product of FP8 operands; E5M2's are twice as coarse."""
    error = torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact)
    assert error <= 2 * SLACK * FORWARD, recipe
    if recipe != "current":  # whose x and dy have one scale for all groups
        step = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, alone, rtol=2 * step, atol=8 * step * alone.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scaled_bias(dtype):
    """TransformerEngine's: bias times a row's scale, and all gradients, against float64 by autograd."""
    given = inputs(dtype)
    y = torch.randn(M, N).to(dtype).requires_grad_()
    given["y"] = y
    found = backward(GroupedBias()(y, ends(), given["bias"], given["scales"]), given, "y bias scales")
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    z = exact["y"].clone()
    for expert, rows in groups():
        z[rows] = exact["y"][rows] + exact["bias"][expert] * exact["scales"][rows, None]
    dy = gradient_of(y).double()
    (z[: M - BEHIND] * dy[: M - BEHIND]).sum().backward()
    assert torch.equal(found[0][M - BEHIND :], y[M - BEHIND :])
    assert torch.equal(found[1][: M - BEHIND], gradient_of(y)[: M - BEHIND])
    assert (found[3][M - BEHIND :] == 0).all()
    # fp32 sums of at most 130 rows or N columns, and one rounding.
    step = torch.finfo(dtype).eps
    for mine, other in ((found[0], z), (found[2], exact["bias"].grad), (found[3], exact["scales"].grad)):
        mine, other = mine[: M - BEHIND].double(), other[: M - BEHIND].detach()
        assert ((mine - other).abs() <= step * other.abs() + 130 * 2.0**-23 * other.abs().max()).all()
    assert (found[2][1] == 0).all()  # of no rows


@recipes
def test_a_layer_with_a_scaled_bias(recipe):
    """The product without a bias, and then the bias."""
    given, other = inputs(), inputs()
    for name in given:
        other[name].data.copy_(given[name].data)
    layer = GroupedLinear(recipe, scale_bias=True)
    y = layer(given["x"], ends(), given["weight"], given["bias"], given["scales"])
    found = backward(y, given, "x weight bias scales")
    plain = GroupedLinear(recipe)(other["x"], ends(), other["weight"])
    expected = GroupedBias()(plain, ends(), other["bias"], other["scales"])
    assert all(map(torch.equal, found, backward(expected, other, "x weight bias scales")))
    assert layer(given["x"], ends(), given["weight"]).shape == (M, N)  # no bias, no scales


@pytest.mark.sample(1)
@recipes
@pytest.mark.parametrize("one", [True, False], ids=["one parameter", "one each"])
def test_weight_gradients_that_wait(recipe, one):
    """Nothing before `run`; then what the backward would have left, added to `grad` or to `main_grad`."""
    given = inputs()
    expected = backward(GroupedLinear(recipe)(given["x"], ends(), given["weight"], given["bias"]), given)
    x, bias = given["x"].detach().requires_grad_(), given["bias"].detach().requires_grad_()
    whole = given["weight"].detach()
    weights = [nn.Parameter(whole.clone())] if one else [nn.Parameter(each.clone()) for each in whole]
    layer = GroupedLinear(recipe, delay_wgrad=True)
    for steps in (1, 2):
        x.grad = bias.grad = None
        y, waiting = layer(x, ends(), weights[0] if one else weights, bias)
        assert isinstance(waiting, WaitingGradients) and waiting.run() == 0
        y.backward(gradient_of(y))
        assert len(waiting) == 1 and torch.equal(x.grad, expected[1]) and torch.equal(bias.grad, expected[3])
        assert steps > 1 or all(weight.grad is None for weight in weights)
        assert waiting.run() == 1 and waiting.run() == 0
        found = weights[0].grad if one else torch.stack([weight.grad for weight in weights])
        assert torch.equal(found, expected[2] * steps)
    for weight in weights:
        weight.grad, weight.main_grad = None, torch.ones(weight.shape)
    y, waiting = layer(x, ends(), weights[0] if one else weights, bias)
    y.backward(gradient_of(y))
    waiting.run()
    found = weights[0].main_grad if one else torch.stack([weight.main_grad for weight in weights])
    torch.testing.assert_close(found, 1 + expected[2], rtol=1e-6, atol=1e-6)
    assert all(weight.grad is None for weight in weights)
    y, waiting = layer(x, ends(), weights[0] if one else weights, bias)
    torch.autograd.grad(y, x, gradient_of(y))
    assert len(waiting) == 0  # of a gradient that is asked for x alone


def test_frozen_weights_and_no_gradients():
    given = inputs()
    with torch.no_grad():
        y = GroupedLinear("rowwise")(given["x"], ends(), given["weight"], given["bias"])
    assert not y.requires_grad
    frozen = GroupedLinear("rowwise")(given["x"], ends(), given["weight"].detach(), given["bias"].detach())
    assert torch.equal(frozen, y)
    frozen.backward(gradient_of(y))
    assert given["x"].grad is not None and given["weight"].grad is None


def test_gradients_of_torch_func():
    given = {name: tensor.detach() for name, tensor in inputs().items()}
    given["x"] = given["x"].nan_to_num()
    layer, cut = GroupedLinear("rowwise", scale_bias=True), ends()

    def run(x: Tensor, weight: Tensor, bias: Tensor, scales: Tensor) -> Tensor:
        return layer(x, cut, weight, bias, scales)

    y, pull = torch.func.vjp(run, *given.values())
    dy = torch.randn(y.shape)
    leaves = [tensor.clone().requires_grad_() for tensor in given.values()]
    run(*leaves).backward(dy)
    assert all(torch.equal(found, leaf.grad) for found, leaf in zip(pull(dy), leaves, strict=True))
    for result, leaf in ((run(*leaves), leaves[0]), (GroupedBias()(torch.randn(M, N), cut, *leaves[2:]), leaves[2])):
        with pytest.raises(DoubleBackwardError):
            torch.autograd.grad(result.sum(), leaf, create_graph=True)


def test_what_is_refused():
    for recipe in ("none", "delayed", "nvfp4_weight_only"):
        with pytest.raises(RecipeError):
            GroupedLinear(recipe)
    with pytest.raises(RecipeError, match="blocks of several rows"):
        GroupedLinear(Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1))
    given = inputs()
    arguments = given["x"], ends(), given["weight"], given["bias"]
    with pytest.raises(OptionError, match="with scales: True, expected False"):
        GroupedLinear("rowwise")(*arguments, given["scales"])
    with pytest.raises(OptionError, match="with scales: False, expected True"):
        GroupedLinear("rowwise", scale_bias=True)(*arguments)
