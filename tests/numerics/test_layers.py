"""Layers by their op against the float64 oracle: form, recipe, source of scales, weight operand and gradient sink, as
rows of data. A kind of part is a row of its table. Each case is compared with what the oracle makes of its inputs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.ops.casts import ScalePair
from te_inductor.ops.layers.delayed_scales import Delayed, FirstStep
from te_inductor.ops.layers.operands import Kept
from te_inductor.ops.layers.parts import GradientSink, Operand, ScaledOperand, ScaleSource, WeightGradient
from te_inductor.ops.layers.sinks import MainGrad
from te_inductor.ops.layers.unrounded import Unrounded
from te_inductor.recipes import DelayedScaling, Float8BlockScaling, Format
from te_inductor.recipes.constants import constant
from tests.oracle import casts, grouped
from tests.support.grouped_layers import Found, compare, ends_of, inputs
from tests.support.oracle_layers import RECIPES, SEEDS

pytestmark = pytest.mark.usefixtures("known_seeds")


@dataclass(frozen=True)
class Form:
    """Rows of each group, or of a dense layer; rows of each weight, and their columns."""

    sizes: tuple[int, ...]
    n: tuple[int, ...] = (45,)
    k: int = 40
    experts: bool = True
    behind: int = 0  # rows that belong to nobody
    each: int = 0  # copies of each row of x, which are multiplied in another order


FORMS = {
    "one value": Form((1,), (1,), 1, experts=False),
    "small": Form((3,), (5,), 17, experts=False),
    "odd": Form((33,), (70,), 130, experts=False),
    "blocks and a half": Form((140,), (260,), 150, experts=False),
    "two layers": Form((33,), (128, 256), 128, experts=False),
    "few": Form((5, 0, 17, 3), (17,), 24, behind=4),
    "few copies": Form((3, 0, 20, 1), (17,), 24, each=2),
    "many sizes": Form((0, 1, 15, 16, 17, 127, 0, 130)),
    "rows behind": Form((5, 0, 128, 3), behind=20),
    "one has all": Form((0, 0, 150, 0)),
    "all empty": Form((0, 0, 0), behind=12),
    "one expert": Form((33,)),
    "blocks and a half of experts": Form((40, 0, 130, 7), (192,), 320, behind=3),
    "copies": Form((0, 1, 15, 16, 17, 127, 0, 130), behind=2, each=4),
    "copies, rows behind": Form((5, 0, 128, 3), behind=24, each=4),
    "two layers of copies": Form((16, 0, 40), (128, 256), each=2),
}
FEW = ("one value", "odd", "few", "few copies")  # of elements of 4 bits, whose oracle is slow


@constant
class Fixed(ScaleSource):
    """The source of a number that is each operand's scale: a part that the package does not know."""

    scale: float

    def pair(self, operand: ScaledOperand) -> ScalePair:
        scale = torch.full((), self.scale)
        return ScalePair(scale, scale.reciprocal())


@constant
class Summed(GradientSink):
    """The sink that adds gradients to its tensors, in their dtype: a part that the package does not know."""

    def take(self, gradient: WeightGradient, tensors: Sequence[Tensor]) -> Sequence[None]:
        for tensor, dw in zip(tensors, gradient.laid_out(), strict=True):
            tensor.add_(dw)
        return [None] * len(tensors)


# Sources of scales: the part, its tensors, and the scales of x, the weights and dy that the oracle is to know. The last
# follow from the operands where they are a function.
DELAYED, KNOWN = DelayedScaling(margin=1), (3.0, 5.0, 7.0)
SLOTS = ("input", "weight", "grad_output")


def of_first_step(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    elements = [getattr(DELAYED.slots(), slot).format for slot in SLOTS]
    pairs = zip(elements, tensors, strict=True)
    return tuple(casts.ScalingHistory(DELAYED, element).scale_of_first(tensor) for element, tensor in pairs)


SOURCES: dict[str, tuple[ScaleSource, list[float], Any]] = {
    "own": (ScaleSource(), [], None),
    "first step": (FirstStep(DELAYED), [], of_first_step),
    "known": (Delayed(DELAYED, SLOTS), [one for scale in KNOWN for one in (scale, 1 / scale)], KNOWN),
    "a number": (Fixed(4.0), [], (4.0, 4.0, 4.0)),
}
SINKS = {"autograd": GradientSink(), "main_grad": MainGrad(), "summed": Summed(), "unrounded": Unrounded()}
WEIGHTS = {"cast": Operand(), "kept": Kept()}
PLAIN = {**RECIPES, "block rows": Float8BlockScaling(fp8_format=Format.HYBRID, w_block_scaling_dim=1)}
ALL = {**{name: recipe.slots() for name, recipe in PLAIN.items()}, "delayed": DELAYED.slots()}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOGETHER = {"hybrid", "e4m3", "options", "block", "mxfp8 options", "delayed"}  # for two layers as one


def cases() -> list[Any]:
    """Each form with each recipe and source of scales; what else there is takes turns."""
    sources = [(recipe, "own") for recipe in PLAIN] + [("delayed", source) for source in SOURCES if source != "own"]
    found = []
    for number, (form, (recipe, source)) in enumerate(itertools.product(FORMS, sources)):
        one, experts, weight = len(FORMS[form].n) == 1, FORMS[form].experts, ALL[recipe].weight
        if (not one and recipe not in TOGETHER) or (experts and ALL[recipe].input.scope == "128x128"):
            continue  # experts are refused whose rows share blocks
        kept_of_experts = weight.scope in ("tensor", "row", "128x128")
        weights = WEIGHTS if source == "own" and one and (kept_of_experts or not experts) else ("cast",)
        others = list(itertools.product(weights, SINKS, DTYPES, (True, False)))
        case = form, recipe, source, *others[7 * number % len(others)]
        slow = weight.element == "e2m1" and form not in FEW
        found.append(pytest.param(case, marks=pytest.mark.thorough if slow else ()))
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
def test_layer(case):
    name, recipe, source_name, weight_name, sink_name, dtype, biased = case
    form, slots, (source, known, scales) = FORMS[name], ALL[recipe], SOURCES[source_name]
    x, weights, biases, dy, order = inputs(form.sizes, form.behind, form.n, form.k, dtype, biased, form.each)
    rows = None if order is None else order // form.each
    used = grouped.masked(dy, form.sizes)
    dy[sum(form.sizes) :] = torch.nan  # which nothing may read
    grad_amax, given = torch.zeros(()), dict[str, Any](known=[torch.tensor(one) for one in known])
    if recipe == "delayed":
        given |= {"token": torch.zeros((), requires_grad=True), "grad_amax": grad_amax}
    if form.experts:
        given["ends"] = ends_of(form.sizes)
        given |= {} if rows is None else {"rows": rows, "places": ops.places_of(order, form.each)}
    else:
        weights, biases = ([one[0].detach().requires_grad_() for one in group] for group in (weights, biases))
    if weight_name == "kept":
        given["of_weight"] = kept(weights[0].detach(), slots.weight)
    two_level = slots.weight.granularity.two_level and weight_name == "kept"
    takers = [] if sink_name == "autograd" else [torch.full(w.shape, 4.0) for w in weights]
    if sink_name == "unrounded":
        takers = [taker.requires_grad_() for taker in takers]
    spec = ops.LayerSpec(
        slots, source, weight=Kept(two_level) if weight_name == "kept" else Operand(), sink=SINKS[sink_name]
    )

    seen = x if rows is not None or not form.experts else ops.mask_rows(x, given["ends"])
    ys = ops.layers(seen, weights, biases, spec, dtype, takers=takers, **given)
    torch.autograd.backward(ys, list(dy.split([y.shape[-1] for y in ys], -1)))

    assert [w.grad is None for w in weights] == [bool(takers)] * len(weights)
    dws = [total - 4.0 if total.grad is None else total.grad for total in takers] or [w.grad for w in weights]
    dws, dbs, whole, added = (
        [one if form.experts else one[None] for one in group]
        for group in (dws, [b.grad for b in biases], [w.detach() for w in weights], [b.detach() for b in biases])
    )
    if callable(scales):
        scales = scales(
            [x.detach() if rows is not None else grouped.masked(x.detach(), form.sizes), torch.cat(whole, 1), used]
        )
    pairs = (
        grouped.operands(x.detach(), whole, used, form.sizes, slots, rows, SEEDS, scales)
        if form.experts
        else dense(x.detach(), torch.cat(whole, 1)[0], used, slots, scales)
    )
    found = Found(torch.cat(ys, 1).detach(), x.grad, torch.cat(dws, 1), torch.cat(dbs, 1) if biased else None)
    total = 4.0 if takers and takers[0].grad is None else 0.0
    made = torch.float32 if sink_name == "unrounded" else dtype
    compare(pairs, found, torch.cat(added, 1) if biased else None, form.sizes, slots, used, rows, total, made)
    assert recipe != "delayed" or grad_amax == used.abs().max()


def kept(weight: Tensor, quantizer: Any) -> list[Tensor]:
    """The copies that the layer would cast itself; then the amax, where scales have two levels."""
    amax = ops.tensor_amax(weight.flatten(0, -2)) if quantizer.granularity.two_level else None
    cast = ops.quantize if weight.dim() == 2 else ops.quantize_experts
    copies = [part for one in (weight, weight.mT) for part in cast(one, quantizer, amax)]
    return copies if amax is None else [*copies, amax]


def dense(
    x: Tensor, weight: Tensor, dy: Tensor, slots: Any, scales: tuple[float, float, float] | None
) -> grouped.Operands:
    """The operands of a dense layer, as those of one group."""

    def both(matrix: Tensor, slot: str, seeds: tuple[int, int] | None = None) -> Sequence[casts.Copy]:
        quantizer = getattr(slots, slot)
        if scales is None:
            return casts.copies(matrix, quantizer, seeds)
        scale = scales[SLOTS.index(slot)]
        return [casts.Copy(*casts.quantize_known(one, scale, quantizer)) for one in (matrix, matrix.t())]

    (x_row, x_column), (w_row, w_column) = both(x, "input"), both(weight, "weight")
    g_row, g_column = both(dy, "grad_output", SEEDS)
    return grouped.Operands([(x_row, w_row)], [(g_row, w_column)], [(g_column, x_column)])
