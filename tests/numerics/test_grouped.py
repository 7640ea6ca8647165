"""Grouped products and their casts against the oracle: casts bit for bit, products within derived bounds."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from te_inductor import ops
from te_inductor.ops import grouped as grouped_ops
from te_inductor.ops import places_of
from te_inductor.recipes import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    Gemm,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Quantizer,
)
from te_inductor.recipes.formats import SCOPES
from te_inductor.runtime.eager import grouped as runtime
from tests.bounds import assert_same_values, scales_of, values_of
from tests.oracle import casts, grouped
from tests.support.contents import CONTENTS
from tests.support.grouped_layers import check, ends_of, inputs, run
from tests.support.layers import grouped_linears

pytestmark = pytest.mark.usefixtures("known_seeds")


thorough = pytest.mark.thorough
SIZES = {
    "many sizes": (0, 1, 15, 16, 17, 127, 0, 130),
    "rows behind": (5, 0, 128, 3),
    "one has all": (0, 0, 150, 0),
    "all empty": (0, 0, 0),
    "one expert": (33,),
}
BEHIND = {"rows behind": 20, "all empty": 12}  # rows that belong to nobody


def same(data: Tensor, scale_inv: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """A copy, bit for bit."""
    values, scales = expected
    assert_same_values(values_of(data), values)
    assert_same_values(scales_of(scale_inv), scales)


def as_quantizer(scope: str, element: str = "e4m3", **more) -> Quantizer:
    return Quantizer("e2m1" if scope in ("1x16", "16x16") else element, scope=scope, **more)


QUANTIZERS = [as_quantizer(scope) for scope in SCOPES if scope != "tensor"] + [
    as_quantizer("row", "e5m2", power_2_scale=True),
    as_quantizer("128x128", amax_epsilon=0.5),
    Quantizer("e2m1", scope="1x32"),
]
AWKWARD = ("random", "nan and infinite", "zeros", "subnormal", "huge")


def experts_of(content: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Matrices of random values, of which the second has these contents."""
    return torch.stack(
        [torch.randn(rows, columns), CONTENTS[content](rows, columns), 3e-3 * torch.randn(rows, columns)]
    ).to(dtype)


@pytest.mark.sample(1)
@pytest.mark.parametrize("content", AWKWARD)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_experts_are_quantized_one_by_one(dtype, transposed, quantizer, content):
    for rows, columns in ((17, 45), (45, 40), (192, 136)):
        w = experts_of(content, rows, columns, dtype)
        amax = ops.tensor_amax(w.flatten(0, 1)) if quantizer.granularity.two_level else None
        data, scale_inv = ops.quantize_experts(w, quantizer, amax, transposed)
        for group, matrix in enumerate(w.transpose(1, 2) if transposed else w):
            expected = casts.quantize(matrix, quantizer, None if amax is None else amax.item())
            found = scale_inv[group].unsqueeze(1) if quantizer.scope == "row" else scale_inv[group]
            same(data[group], found, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_experts_that_are_one_matrix(quantizer, transposed):
    """What generated code casts at once, is what each expert's cast gives."""
    found = 0
    for rows, columns in ((17, 45), (48, 64), (64, 48), (96, 128)):
        if grouped_ops.is_one_matrix((3, rows, columns), quantizer, transposed):
            w = experts_of("random", rows, columns, torch.float32)
            amax = ops.tensor_amax(w.flatten(0, 1)) if quantizer.granularity.two_level else None
            expected = ops.quantize_experts(w, quantizer, amax, transposed)
            flat = (w.transpose(1, 2) if transposed else w).flatten(0, 1)
            for one, each in zip(ops.quantize(flat, quantizer, amax), expected, strict=True):
                assert torch.equal(one.view(torch.uint8).flatten(), each.view(torch.uint8).flatten())
            found += 1
    by_rows = quantizer.granularity.microscaled or (quantizer.scope == "row" and not transposed)
    assert found == (0 if not by_rows else 2 if quantizer.granularity.transposes else 4)


@pytest.mark.parametrize("content", AWKWARD)
def test_scales_of_an_expert_are_its_own(content):
    """The weights are two layers' together; known scales of one expert, and of all."""
    quantizer = Quantizer("e4m3")
    weights = [experts_of(content, 17, 40, torch.float32), 2 * experts_of("random", 33, 40, torch.float32)]
    scale, scale_inv = ops.experts_scale(weights, quantizer)
    for group in range(3):
        amax = casts.tensor_amax(torch.cat([w[group] for w in weights]))
        expected = casts.encode_scale(amax, quantizer)
        assert scale[group].item() == expected
        for transposed, w in itertools.product((False, True), weights):
            matrix = w[group].t() if transposed else w[group]
            data = ops.quantize_experts_delayed(w, scale, quantizer, transposed)
            same(data[group], scale_inv[group], casts.quantize_known(matrix, expected, quantizer))
            data = ops.quantize_experts_delayed(w, torch.tensor(3.0), quantizer, transposed)
            same(data[group], 1 / torch.tensor(3.0), casts.quantize_known(matrix, 3.0, quantizer))


@pytest.mark.parametrize("sizes", SIZES)
def test_layout(sizes):
    """A padded transpose holds each row of a group once, in order, and zeros elsewhere, whatever is behind."""
    behind, sizes = BEHIND.get(sizes, 0), SIZES[sizes]
    rows = sum(sizes) + behind
    starts, tiles, source = runtime.layout(ends_of(sizes), rows)
    assert starts.dtype == tiles.dtype == source.dtype == torch.int32
    assert starts.tolist() == [0, *(end for _, end in grouped.padded_spans(sizes))]
    expected = grouped.padded_transpose(torch.arange(1, rows + 1)[:, None], sizes)[0] - 1
    assert source.tolist() == expected.tolist()
    assert len(source) == runtime.padded_width(rows, len(sizes)) == 128 * len(tiles)
    for group, (start, end) in enumerate(grouped.padded_spans(sizes)):
        assert tiles[start // 128 : end // 128].eq(group).all()
    x = torch.randint(0, 256, (rows, 24), dtype=torch.uint8).view(torch.float8_e4m3fn)
    x[sum(sizes) :] = math.nan
    found = ops.transpose_groups(x, source)
    assert torch.equal(found.view(torch.uint8), grouped.padded_transpose(x.view(torch.uint8), sizes))


def test_rows_behind_are_masked():
    x = torch.randn(9, 4, requires_grad=True)
    poisoned = x.detach().clone()
    poisoned[6:] = torch.tensor([math.nan, math.inf, -math.inf])[:, None]
    assert torch.equal(ops.mask_rows(poisoned, torch.tensor([4, 6]).int()), grouped.masked(x.detach(), [4, 2]))
    masked = ops.mask_rows(x, torch.tensor([4, 6]).int())
    masked.backward(poisoned)
    assert torch.equal(x.grad, grouped.masked(x.grad, [4, 2])) and x.grad[:6].eq(poisoned[:6]).all()


def test_places_undo_the_order():
    order = torch.randperm(24)
    places = places_of(order, 3)
    for token, choice in itertools.product(range(8), range(3)):
        assert order[places[token, choice]] == 3 * token + choice


@pytest.mark.sample(1)
@pytest.mark.parametrize("content", [*AWKWARD, "rows apart"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("quantizer", [q for q in QUANTIZERS if q.scope in ("row", "1x128")], ids=str)
def test_groups_are_quantized_one_by_one(quantizer, sizes, content):
    """What is awkward is in one group, and the others are as if they were alone."""
    behind, sizes = BEHIND.get(sizes, 0), SIZES[sizes]
    rows = sum(sizes) + behind
    x = torch.randn(rows, 40)
    begin, end = max(grouped.spans(sizes), key=lambda span: span[1] - span[0])
    x[begin:end] = CONTENTS[content](end - begin, 40) if end > begin else 0
    x[sum(sizes) :] = math.nan
    starts, tiles, source = runtime.layout(ends_of(sizes), rows)
    data, scale_inv = ops.quantize_groups(x, source, tiles, starts, quantizer)
    expected = grouped.column_copies(x, quantizer, sizes)
    for group, (start, stop) in enumerate(grouped.padded_spans(sizes)):
        if quantizer.scope == "row":
            found = scale_inv[group][:, None]
        else:
            found = scale_inv.view(-1, 40)[start // 128 : stop // 128].flatten()
        same(data[:, start:stop], found, expected[group][:2])
    used = grouped.padded_spans(sizes)[-1][1]
    assert not data[:, used:].view(torch.uint8).any()


def random_copy(rows: int, columns: int, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    return ops.quantize(torch.randn(rows, columns), quantizer)


@pytest.mark.parametrize("sizes", SIZES)
def test_products_of_integers_are_exact(sizes):
    """Whatever stands behind the groups, and in no group's columns."""
    behind, sizes = BEHIND.get(sizes, 0), SIZES[sizes]
    rows, experts, (n, k) = sum(sizes) + behind, len(sizes), (24, 48)
    gemm = Gemm("fprop", ("e4m3", "e4m3"))
    a = torch.randint(-4, 5, (rows, k)).float()
    b = torch.randint(-4, 5, (experts, n, k)).float()
    bias = torch.randint(-4, 5, (experts, n)).float()
    scales, one = 2.0 ** torch.arange(experts).float(), torch.tensor(0.5)
    low = torch.cat([a[: sum(sizes)], torch.full((behind, k), math.nan)]).to(torch.float8_e4m3fn)
    y = ops.grouped_mm(low, one, b.to(torch.float8_e4m3fn), scales, ends_of(sizes), bias, gemm, torch.float32)
    for group, (begin, end) in enumerate(grouped.spans(sizes)):
        assert torch.equal(y[begin:end], a[begin:end] @ b[group].t() * 0.5 * 2.0**group + bias[group])
    assert not y[sum(sizes) :].any()
    starts = runtime.layout(ends_of(sizes), rows)[0]
    width = runtime.padded_width(rows, experts)
    a, b = (torch.randint(-4, 5, (size, width)).float() for size in (n, k))
    low_a, low_b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    low_a[:, starts[-1] :] = math.nan
    gemm = Gemm("wgrad", ("e4m3", "e4m3"))
    dw = ops.grouped_wgrad(low_a, one, low_b, one, starts, gemm, torch.float32)
    for group, (start, end) in enumerate(grouped.padded_spans(sizes)):
        assert torch.equal(dw[group], a[:, start:end] @ b[:, start:end].t() * 0.25)


RECIPES = {
    "current": Float8CurrentScaling(),
    "current options": Float8CurrentScaling(
        fp8_quant_fwd_inp=QParams(power_2_scale=True), fp8_quant_fwd_weight=QParams(amax_epsilon=0.3)
    ),
    "rowwise": Float8RowwiseScaling(),
    "rowwise options": Float8RowwiseScaling(fp8_format=Format.HYBRID, power_2_scale=False, amax_epsilon=0.3),
    "block": Float8BlockScaling(),
    "block options": Float8BlockScaling(fp8_format=Format.HYBRID, w_block_scaling_dim=1),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 options": MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4 options": NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True),
    "nvfp4 4 over 6": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
}


compiled_layer = torch.compile(grouped_linears, fullgraph=True)


@pytest.mark.parametrize("recipe", [n if n == "rowwise" else pytest.param(n, marks=thorough) for n in RECIPES])
def test_compiled_layer(recipe):
    sizes = (0, 1, 17, 30)
    x, weights, biases, dy, order = inputs(sizes, each=4)
    slots = RECIPES[recipe].slots()
    ys = run(compiled_layer, x, weights, biases, ends_of(sizes), slots, order, 4, dy, torch.float32)
    check(x, weights, biases, sizes, slots, ys, dy, order // 4)


def of_rows(slot, module):
    if slot in ("input", "weight", "grad_output") and module.endswith("experts.w1"):
        return Quantizer("e5m2" if slot == "grad_output" else "e4m3", scope="row")
    return None


def test_a_recipe_of_ones_own():
    """The recipe chooses by module path: scales of rows for these experts, in E5M2 for gradients."""
    slots = CustomRecipe(of_rows).slots_of("mlp.experts.w1")
    assert slots.fprop.scopes == ("row", "row") and slots.grad_output.element == "e5m2"
    sizes = (3, 0, 20)
    x, weights, biases, dy, _ = inputs(sizes, 5)
    ys = run(grouped_linears, x, weights, biases, ends_of(sizes), slots, None, 0, dy, torch.float32)
    check(x, weights, biases, sizes, slots, ys, dy)


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e-40, 3e38])
@pytest.mark.parametrize("where", ["x", "w", "dy"])
@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "mxfp8"])
def test_what_is_awkward_stays_in_its_group(recipe, where, value):
    """NaN and infinity reach the results of their own group alone; all are as the oracle has them."""
    sizes = (20, 3, 17)
    x, weights, _, dy, _ = inputs(sizes, bias=False)
    with torch.no_grad():
        {"x": x[20:23], "w": weights[0][1], "dy": dy[20:23]}[where][1:, 2:5] = value
    slots = RECIPES[recipe].slots()
    ys = run(grouped_linears, x, weights, [], ends_of(sizes), slots, None, 0, dy, torch.float32)
    for result in (ys[0], x.grad):
        assert torch.cat([result[:20], result[23:]]).isfinite().all()
    assert weights[0].grad[[0, 2]].isfinite().all()
    if not math.isfinite(value):
        reached = {"x": (ys[0], weights[0].grad), "w": (ys[0], x.grad), "dy": (x.grad, weights[0].grad)}[where]
        for result in reached:
            assert not (result[20:23] if result is not weights[0].grad else result[1]).isfinite().all()
    if value != 3e38:  # whose products overflow fp32, and the oracle's do not
        check(x, weights, [], sizes, slots, ys, dy)


@pytest.mark.parametrize("each", [0, 2])
@pytest.mark.parametrize("recipe", ["current", "rowwise", "block", "mxfp8", "nvfp4 plain"])
def test_rows_behind_change_nothing(recipe, each):
    """Poison there leaves every bit of y, dx, dw and db."""
    sizes, slots, found = (9, 0, 30), RECIPES[recipe].slots(), []
    x, weights, biases, dy, order = inputs(sizes, 11, each=each)
    for poison in (0.0, math.nan, math.inf):
        for tensor in (x, *weights, *biases):
            tensor.grad = None
        dy[39:] = poison
        if not each:
            x.data[39:] = poison
        ys = run(grouped_linears, x, weights, biases, ends_of(sizes), slots, order, each, dy, torch.float32)
        found.append([ys[0].detach(), x.grad, weights[0].grad, biases[0].grad])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)
    check(x, weights, biases, sizes, slots, ys, grouped.masked(dy, sizes), order // each if each else None)


@pytest.mark.parametrize("mutant", ["scale", "mask", "places", "padding", "dropped"])
def test_the_bounds_catch(mutant, monkeypatch):
    """A scale off by half a step of E4M3, and other faults."""
    if mutant == "scale":
        real = grouped_ops.grouped_mm
        monkeypatch.setattr(
            grouped_ops, "grouped_mm", lambda a, s, b, t, *more: real(a, s, b, t * (1 + 2.0**-4), *more)
        )
    elif mutant == "mask":
        monkeypatch.setattr(runtime, "mask_rows", lambda x, ends: x)
    elif mutant == "padding":
        real_layout = runtime.layout
        monkeypatch.setattr(
            runtime, "layout", lambda *given: (*(made := real_layout(*given))[:2], made[2].clamp(min=0))
        )
    elif mutant == "dropped":
        real_wgrad = grouped_ops.grouped_wgrad
        monkeypatch.setattr(grouped_ops, "grouped_wgrad", lambda *args: real_wgrad(*args) * 0)
    sizes = (9, 0, 30)
    x, weights, biases, dy, order = inputs(sizes, 11, each=2)
    slots = RECIPES["current"].slots()
    if mutant == "places":
        places = ops.places_of(order, 2).flip(0)
        more = {"rows": order // 2, "places": places}
        ys = grouped_linears(x, weights, biases, ends_of(sizes), slots, torch.float32, **more)
        torch.autograd.backward(ys, [dy])
    else:
        ys = run(grouped_linears, x, weights, biases, ends_of(sizes), slots, order, 2, dy, torch.float32)
    with pytest.raises(AssertionError):
        check(x, weights, biases, sizes, slots, ys, grouped.masked(dy, sizes), order // 2)
