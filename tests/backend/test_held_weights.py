"""Weights that a program holds in FP8 and dequantizes in front of its layers: passes/pre_grad/sites/held.py."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor.passes.pre_grad.sites import held
from tests.support.main_grads import te

pytestmark = pytest.mark.usefixtures("without_codegen")


class Stored(nn.Module):
    """A layer whose weight is in E4M3 (N, K), with a scale of some shape, or, None, without."""

    def __init__(self, shape: tuple[int, ...] | None, element: torch.dtype = torch.float8_e4m3fn) -> None:
        super().__init__()
        self.register_buffer("weight", (torch.randn(48, 32) * 20).to(element))
        self.register_buffer("scale", None if shape is None else torch.rand(shape) / 16 + 0.01)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weight.to(dtype)
        return weight if self.scale is None else weight * self.scale.to(dtype)

    def forward(self, x):
        return F.linear(x, self.dequantized(x.dtype))


FORMS = {
    "no scale": ("current", None),
    "one scale": ("current", ()),
    "a scale of one element": ("current", (1,)),
    "no scale, of rows": ("rowwise", None),
    "a scale a row": ("rowwise", (48, 1)),
}


@pytest.mark.parametrize("recipe, shape", FORMS.values(), ids=FORMS.keys())
def test_values_are_multiplied_as_they_are(recipe, shape):
    """The output is that of x, cast, and the very values that the program holds; dx is near that of the same."""
    layer = Stored(shape)
    scale = 1.0 if shape is None else layer.scale.double()
    exact = layer.weight.double() * scale
    eye = torch.eye(32).requires_grad_()  # exact in E4M3, behind a scale that is a power of two or is not
    y = te(layer, recipe=recipe)(eye)
    assert torch.allclose(y.double(), exact.t(), rtol=2.0**-21, atol=0.0)
    y.backward(torch.eye(32, 48))
    if recipe == "current":
        assert torch.allclose(eye.grad.double(), exact[:32], rtol=2.0**-21, atol=0.0)
    else:  # the columns are cast from the rows
        assert torch.allclose(eye.grad.double(), exact[:32], rtol=2.0**-4, atol=2.0**-8 * float(exact.abs().max()))


@pytest.mark.parametrize(
    "recipe, shape, element",
    [
        ("current", (48, 1), torch.float8_e4m3fn),
        ("rowwise", (), torch.float8_e4m3fn),
        ("current", None, torch.float8_e5m2),
        ("delayed", (), torch.float8_e4m3fn),
        ("block", None, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_others_are_cast(recipe, shape, element):
    """What the recipe's copies are not is dequantized and cast, as a weight in high precision is."""
    layer, x = Stored(shape, element), torch.randn(16, 32)

    class Plain(nn.Module):
        def forward(self, x, weight):
            return F.linear(x, weight)

    found = te(layer, recipe=recipe, fallback="silent")(x)
    expected = te(Plain(), recipe=recipe, fallback="silent")(x, layer.dequantized(torch.float32))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scale_on_another_device_is_no_operand(device):
    layer, found = Stored(()).to("meta"), []
    layer.scale = torch.tensor(0.5, device=device)

    def backend(gm, inputs):
        [linear] = gm.graph.find_nodes(op="call_function", target=F.linear)
        found.append(held._read(linear.args[1], []))
        return gm.forward

    torch.compile(layer, backend=backend)(torch.empty(16, 32, device="meta"))
    assert [one is None for one in found] == [device == "cpu"]


class Wide(Stored):
    """Its weight is dequantized in fp32, and cast."""

    def forward(self, x):
        return F.linear(x, self.dequantized(torch.float32).to(x.dtype))


@pytest.mark.parametrize("recipe, shape", FORMS.values(), ids=FORMS.keys())
def test_values_that_are_dequantized_in_fp32(recipe, shape):
    layer = Wide(shape)
    y = te(layer, recipe=recipe)(torch.eye(32, dtype=torch.bfloat16))
    exact = layer.weight.double() * (1.0 if shape is None else layer.scale.double())
    assert torch.equal(y.t(), exact.to(torch.bfloat16))


@pytest.mark.parametrize("place, wide", [("values", False), ("values", True), ("product", False), ("product", True)])
def test_what_is_written_on_the_way_is_cast(place, wide):
    """A change in place of what the program dequantizes to is the layer's, and is in none of its operands."""

    class Doubled(Stored):
        def forward(self, x):
            values = self.weight.to(torch.float32 if wide else x.dtype)
            if place == "values":
                values.mul_(2)
            product = values * self.scale.to(values.dtype)
            if place == "product":
                product.mul_(2)
            return F.linear(x, product.to(x.dtype) if wide else product)

    layer = Doubled(())
    y = te(layer, recipe="current", fallback="silent")(torch.eye(32, dtype=torch.bfloat16))
    exact = 2 * layer.dequantized(torch.float32)
    assert torch.allclose(y.t().float(), exact, rtol=2.0**-3, atol=2.0**-8 * float(exact.abs().max()))


def test_values_that_change():
    """A value that is written in place in the program, in front of a layer or behind it, is the layer's or not."""

    class Written(Stored):
        def forward(self, x):
            weight = self.weight.to(x.dtype)
            self.weight.view(torch.uint8).zero_()
            return F.linear(x, weight)

    layer = Written(None)
    kept = copy.deepcopy(layer)
    y = te(layer, fallback="silent")(torch.eye(32))
    assert (
        y.any()
        and torch.allclose(y.t(), kept.weight.float(), rtol=2.0**-3, atol=1.0)
        and not layer.weight.float().any()
    )
