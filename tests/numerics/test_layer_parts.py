"""Layers are composed of parts: one that the package does not know works with both forms of products and with the op as
it is."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.ops.casts import ScalePair
from te_inductor.ops.layers.kept import Kept
from te_inductor.ops.layers.parts import GradientSink, Operand, ScaledOperand, ScaleSource, WeightGradient
from te_inductor.recipes import Float8CurrentScaling, Float8RowwiseScaling
from te_inductor.recipes.constants import constant

ENDS = torch.tensor([16, 16, 48], dtype=torch.int32)
FORMS = {"dense": ((64, 48), {}), "experts": ((3, 64, 48), {"ends": ENDS})}


@constant
class Fixed(ScaleSource):
    """Each operand's scale is a number."""

    scale: float

    def pair(self, operand: ScaledOperand) -> ScalePair:
        scale = torch.full((), self.scale)
        return ScalePair(scale, scale.reciprocal())


@constant
class Summed(GradientSink):
    """Adds gradients to its tensors, in their dtype."""

    def take(self, gradient: WeightGradient, tensors: Sequence[Tensor]) -> Sequence[None]:
        for tensor, dw in zip(tensors, gradient.laid_out(), strict=True):
            tensor.add_(dw)
        return [None] * len(tensors)


def operands(form: str) -> tuple[Tensor, Tensor, dict]:
    shape, more = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(48, 48, generator=generator), torch.randn(shape, generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), more


def run(form: str, spec: ops.LayerSpec, **given: object) -> list[Tensor | None]:
    """The output, and the gradients of x and the weight."""
    x, weight, more = operands(form)
    [y] = ops.layers(x, [weight], [], spec, torch.float32, **more, **given)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("form", FORMS)
def test_a_sink(form):
    slots, total = Float8RowwiseScaling().slots(), torch.zeros(FORMS[form][0])
    y, dx, dw = run(form, ops.LayerSpec(slots))
    for times in (1, 2):
        found = run(form, ops.LayerSpec(slots, sink=Summed()), takers=[total])
        assert torch.equal(found[0], y) and torch.equal(found[1], dx) and found[2] is None
        assert torch.equal(total, times * dw)


@pytest.mark.parametrize("form", FORMS)
def test_a_source_of_scales(form):
    """A power of two is a scale whose steps are all scales' near it: what neither saturates nor vanishes is the same."""
    slots = Float8CurrentScaling().slots()
    found = [run(form, ops.LayerSpec(slots, Fixed(scale))) for scale in (4.0, 8.0)]
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all() and (one - other).abs().max() < 2e-2 * one.abs().max()
    assert not torch.equal(found[0][0], run(form, ops.LayerSpec(slots))[0])


@pytest.mark.parametrize("form", FORMS)
def test_an_operand_that_has_its_copies(form):
    """Copies that are handed in are what the layer would cast itself."""
    slots, (_, weight, _) = Float8RowwiseScaling().slots(), operands(form)
    cast = ops.quantize if form == "dense" else ops.quantize_experts
    kept = [part for w in (weight, weight.mT) for part in cast(w.detach(), slots.weight)]
    expected, found = run(form, ops.LayerSpec(slots)), run(form, ops.LayerSpec(slots, weight=Kept()), of_weight=kept)
    assert all(map(torch.equal, expected, found))
    assert Operand() == ops.LayerSpec(slots).weight != Kept()
