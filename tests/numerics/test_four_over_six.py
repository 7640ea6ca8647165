"""NVFP4 blocks whose amax goes to 4 or to 6: blocks by hand; eager and compiled casts against the oracle."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from te_inductor import ops
from te_inductor.errors import RecipeError
from te_inductor.recipes import Quantizer
from tests.bounds import values_of
from tests.numerics.test_microscaling import SIZES, check_both, compiled
from tests.numerics.test_quantize import CONTENTS, DTYPES, LAYOUTS
from tests.oracle import casts

QUANTIZERS = [
    Quantizer("e2m1", scope=scope, four_over_six=metric, scale_max=most)
    for scope in ("1x16", "16x16")
    for metric, most in (("MAE", 256.0), ("MSE", 448.0))
]
quantizers = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.scope} {q.four_over_six}")


def one(metric: str, most: float = 256.0, scope: str = "1x16") -> Quantizer:
    return Quantizer("e2m1", scope=scope, four_over_six=metric, scale_max=most)


def quantized(values: list[float], quantizer: Quantizer, amax: float) -> tuple[list[float], float]:
    """The values and the scale of one block of 16, the oracle's, which are those of the op."""
    x = torch.tensor([values + [0.0] * (16 - len(values))])
    data, scale = casts.quantize(x, quantizer, amax)
    found, found_scale = ops.quantize(x, quantizer, torch.tensor(amax))
    assert torch.equal(values_of(found), data) and torch.equal(found_scale.double(), scale)
    return data[0, : len(values)].tolist(), scale[0].item()


# Of a tensor with amax 6, and 256 as the largest scale, values are in units of their own: to 6 they are rounded to 0,
# 0.5, 1, 1.5, 2, 3, 4, 6; to 4, with scale 384, to 3/2 of these.
BLOCKS = {
    "4 is exact": ([6.0, 4.5, -3.0], [4.0, 3.0, -2.0], 384.0),
    "6 is exact": ([6.0, 4.0, -3.0], [6.0, 4.0, -3.0], 256.0),
    "both are exact: 6": ([6.0, 3.0, -1.5], [6.0, 3.0, -1.5], 256.0),
    "both are off by 1/2: 6": ([6.0, 3.5], [6.0, 4.0], 256.0),  # 4, and 2 * 3/2 = 3
    "zeros: 6": ([0.0, 0.0], [0.0, 0.0], 0.0),
    "a smaller block": ([3.0, 2.25], [4.0, 3.0], 192.0),  # 128 to 6
}


@pytest.mark.parametrize("metric", ["MAE", "MSE"])
@pytest.mark.parametrize("name", BLOCKS)
def test_by_hand(name, metric):
    values, data, scale = BLOCKS[name]
    assert quantized(values, one(metric), 6.0) == (data, scale)


def test_metrics_differ():
    """To 6, 5 is off by 1 and nothing else is; to 4, 5 and 4 are off by 1/2 each and 1/2 is by 1/4: the magnitudes are
    1 and 5/4, the squares 1 and 9/16."""
    values = [6.0, 5.0, 4.0, 0.5]
    assert quantized(values, one("MAE"), 6.0) == ([6.0, 4.0, 4.0, 0.5], 256.0)
    assert quantized(values, one("MSE"), 6.0) == ([4.0, 3.0, 3.0, 0.5], 384.0)


def test_the_largest_scale():
    """With 448 the block of the tensor's amax has no larger scale to go to 4 with. One of half the amax has 224, or
    320, to which 336 is rounded: in units of 5/7 then, 2.15 is off by 1/140 and 3 by 1/7, instead of by 0.15 and 0."""
    assert quantized([6.0, 4.5], one("MAE", 448.0), 6.0) == ([6.0, 4.0], 448.0)
    assert quantized([3.0, 2.15, 2.15], one("MAE", 448.0), 6.0) == ([4.0, 3.0, 3.0], 320.0)


def test_squares_are_chosen_as_one():
    """One row would go to 4 and gain 1/2 there, another would lose 1."""
    x = torch.zeros(16, 16)
    x[:, 0], x[3, 1], x[5, 1], x[5, 2] = 6.0, 4.5, 4.0, 4.0
    amax = torch.tensor(6.0)
    data, scale = ops.quantize(x, one("MAE", scope="16x16"), amax)
    assert scale.tolist() == [256.0, 0.0, 0.0, 0.0] and values_of(data)[3, 1] == 4.0
    _, rows = ops.quantize(x, one("MAE"), amax)
    assert rows.view(16, 2)[:, 0].tolist() == [384.0 if row == 3 else 256.0 for row in range(16)]


@quantizers
@pytest.mark.parametrize("content", CONTENTS)
def test_eager(content, quantizer):
    for size in SIZES:
        for layout, dtype in zip(LAYOUTS.values(), itertools.cycle(DTYPES), strict=False):
            check_both(layout(CONTENTS[content](*size).to(dtype)), quantizer)


# Each is a C++ compile of seconds.
COMPILED = [
    ((33, 70), torch.bfloat16, "contiguous", QUANTIZERS[0]),
    ((33, 70), torch.float32, "transposed", QUANTIZERS[1]),
    ((64, 96), torch.float32, "transposed", QUANTIZERS[2]),
    ((33, 70), torch.bfloat16, "strided", QUANTIZERS[3]),
]


@pytest.mark.parametrize(("size", "dtype", "layout", "quantizer"), COMPILED, ids=str)
def test_compiled(size, dtype, layout, quantizer):
    functions = compiled()
    for make in CONTENTS.values():
        check_both(LAYOUTS[layout](make(*size).to(dtype)), quantizer, *functions)
