"""Runs the casts of experts in Triton's interpreter and compares them with plain torch, bit for bit; then a whole layer,
forward and backward, with those casts in it: python -m tests.offline.grouped_casts some|all, with TRITON_INTERPRET=1."""

import itertools
import math
import sys
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from te_inductor import ops, recipes
from te_inductor.ops import grouped as grouped_ops
from te_inductor.recipes import Quantizer
from te_inductor.runtime.eager import grouped
from te_inductor.templates.triton import experts_rows, group_strips
from te_inductor.templates.triton import grouped_casts as kernels
from te_inductor.templates.triton import grouped_ops as on_cuda
from tests.offline.cached_weights_kernels import one_nan
from tests.offline.interpret import mend_interpreter
from tests.support.layers import grouped_linears

SHAPES = ((2, 136, 80), (3, 130, 137), (1, 45, 300))  # of experts: no multiples of a tile, odd, of fewer than one
WHOLE, ROWS = (Quantizer("e4m3"), Quantizer("e5m2")), (Quantizer("e4m3", scope="row"),)
ROWS += (Quantizer("e5m2", scope="row", power_2_scale=True, amax_epsilon=0.5),)
SQUARES = (Quantizer("e4m3", scope="128x128"), Quantizer("e4m3", scope="128x128", power_2_scale=True))
OF_GROUPS = (*ROWS, Quantizer("e5m2", scope="1x128", power_2_scale=True), Quantizer("e4m3", scope="1x128"))


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: object) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype, what
        one, other = (one_nan(x).contiguous().view(torch.uint8) for x in (one, other))
        assert torch.equal(one, other), what


def check_experts(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], every: bool) -> None:
    """Tries `every` shape in both layouts, or has the layouts take turns."""
    for number, shape in enumerate(shapes):
        w = torch.randn(shape).to(dtype)
        w[0, 0, 0], w[0, 3, 5], w[-1, :16] = math.inf, math.nan, 0.0
        scale = torch.rand(shape[0]) * 10
        layouts = (w, w.transpose(1, 2).contiguous().transpose(1, 2))
        for source in layouts if every else layouts[number % 2 :][:1]:
            for quantizer, one in itertools.product(WHOLE, (scale, scale[0])):
                found = kernels.transpose_experts(source, one, quantizer)
                assert_same((found,), (grouped.quantize_experts_delayed(source, one, quantizer, True),), quantizer)
            for quantizer in ROWS:
                found = kernels.transpose_experts_by_row(source, quantizer)
                assert_same(found, grouped.quantize_experts(source, quantizer, None, True), quantizer)
            for quantizer, transposed in itertools.product(SQUARES, (False, True)):
                found = kernels.quantize_experts_squares(source, quantizer, transposed)
                assert_same(found, grouped.quantize_experts(source, quantizer, None, transposed), quantizer)


def check_rows(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> None:
    """Rows' copies with the scales of columns, and the column copies that those give: bit for bit what eager code
    makes, and within half a step of the format of what float64 holds."""
    for shape in shapes:
        w = torch.randn(shape).to(dtype)
        w[0, 0, 0], w[0, 3, 5], w[-1, :16], w[-1, :, 7] = math.inf, math.nan, 0.0, 0.0
        for quantizer in ROWS:
            expected = grouped.quantize_experts_rows(w, quantizer)
            cut = experts_rows.RowsConfig(256, 256, 80, span=8)  # several turns of several programs
            for config in (None, cut) if shape[0] == 2 and quantizer is ROWS[0] else (None,):
                found = experts_rows.quantize_experts_rows(w, quantizer, config)
                assert_same(found, expected, (shape, quantizer))
            columns = kernels.transpose_experts(w, found[2], quantizer)
            assert_same((columns, found[3]), grouped.quantize_experts(w, quantizer, None, True), (shape, quantizer))
            for data, scale_inv, exact in ((found[0], found[1], w), (columns, found[3], w.transpose(1, 2))):
                exact = exact.double()
                amax = exact.abs().amax(2, keepdim=True)
                near = (amax.isfinite() & (amax >= quantizer.amax_epsilon)).expand_as(exact)
                unit = scale_inv.double()[:, :, None]
                values = data[:, :, : exact.shape[2]].double() * unit
                half = (exact.abs() * quantizer.format.epsilon).maximum(quantizer.format.smallest_step * unit) / 2
                assert ((values - exact).abs() <= half * (1 + 1e-6))[near].all(), (shape, quantizer)


def check_groups(dtype: torch.dtype) -> None:
    x, rows = torch.randn(50, 72).to(dtype), torch.randint(0, 50, (300,))
    x[3, 4], x[5] = math.nan, 0.0
    ends = torch.tensor([0, 7, 7, 135, 290], dtype=torch.int32)
    starts, tiles, source = grouped.layout(ends, 300)
    source = torch.where(source >= 0, rows[source.clamp(min=0)], -1).int()
    for quantizer in OF_GROUPS:
        expected = grouped.quantize_groups(x, source, tiles, starts, quantizer)
        found = kernels.quantize_groups(x, source, tiles, starts, quantizer)
        assert_same(found, expected, quantizer)
        if quantizer in ROWS:
            assert_same(group_strips.quantize_groups_by_column(x, source, starts, quantizer), expected, quantizer)
    data = ops.quantize_delayed(x, torch.tensor(2.0), WHOLE[0])[:, :72]
    assert_same((kernels.transpose_groups(data, source),), (grouped.transpose_groups(data, source),), "bytes")


def check_layer(name: str) -> None:
    """The same numbers with CUDA's casts in the place of torch's."""
    recipe = recipes.resolve(name)
    assert recipe is not None
    order, ends = torch.randperm(60), torch.tensor([10, 10, 27, 55], dtype=torch.int32)
    x, w = torch.randn(30, 48).bfloat16().requires_grad_(), torch.randn(4, 32, 48).bfloat16().requires_grad_()
    dy = torch.randn(60, 32).bfloat16()
    dy[55:] = math.nan

    def layer() -> list[Tensor]:
        given = x, [w], [], ends, recipe.slots(), torch.bfloat16, order // 2, ops.places_of(order, 2)
        [y] = grouped_linears(*given)
        return [y, *torch.autograd.grad(y, (x, w), dy)]

    expected = layer()
    replaced = {name: getattr(grouped_ops, name) for name in on_cuda.KERNELS}
    products = ("grouped_mm", "grouped_wgrad", "accumulate_grouped_wgrad")  # Gluon's: test_grouped_mm.py
    for name, kernel in on_cuda.KERNELS.items():
        if name not in products:
            setattr(grouped_ops, name, kernel)
    try:
        with mock.patch.object(group_strips, "_most_rows", lambda device, size: math.inf):  # a CPU has no such limits
            assert_same(tuple(layer()), tuple(expected), name)
    finally:
        for name, op in replaced.items():
            setattr(grouped_ops, name, op)


if __name__ == "__main__":
    mend_interpreter()
    torch.manual_seed(0)
    every = sys.argv[1] == "all"
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,):
        check_experts(dtype, SHAPES if every else SHAPES[:2], every)
        check_rows(dtype, SHAPES if every else SHAPES[:2])
        check_groups(dtype)
    for name in ("current", "rowwise", "block") if every else ("rowwise",):
        check_layer(name)
