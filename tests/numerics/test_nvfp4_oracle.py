"""The oracle of NVFP4 against what defines the format: its values, examples by hand, and how far it may be off."""

import math

import pytest
import torch

from te_inductor.recipes.formats import E2M1
from tests.bounds import assert_same_values
from tests.oracle import nvfp4 as oracle
from tests.oracle.casts import round_to_element

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_rounding_to_e2m1():
    """Values stay; halfway goes to the even mantissa; beyond the last value everything saturates."""
    table = dict(zip(VALUES, VALUES, strict=True))
    table |= {
        0.25: 0.0,
        0.75: 1.0,
        1.25: 1.0,
        1.75: 2.0,
        2.5: 2.0,
        3.5: 4.0,
        5.0: 4.0,
        5.01: 6.0,
        1e30: 6.0,
        math.inf: 6.0,
    }
    for sign in (1.0, -1.0):
        x, expected = (torch.tensor(list(side), dtype=torch.float64) * sign for side in (table, table.values()))
        assert_same_values(round_to_element(x, E2M1), expected)


def test_by_hand():
    """amax 12: encode scale 2688 / 12 = 224; a block of amax 12 has scale 448, one of amax 3 has 112, one of zeros
    0."""
    x = torch.zeros(1, 48)
    x[0, :4] = torch.tensor([12.0, -6.0, 1.0, 0.4])
    x[0, 16:18] = torch.tensor([3.0, -0.25])
    data, scales, tensor_scale = oracle.quantize(x)
    assert scales.tolist() == [[448.0, 112.0, 0.0]] and tensor_scale == pytest.approx(1 / 224, rel=1e-7)
    assert data[0, :4].tolist() == [6.0, -3.0, 0.5, 0.0] and data[0, 16:18].tolist() == [6.0, -0.5]
    assert oracle.pack(data)[0, :2].tolist() == [0xD7, 0x01]  # low nibble first: 6, -3; 0.5, 0
    assert not data[0, 32:].any()


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("shape", [(1, 16), (5, 33), (40, 64)])
def test_distance(shape, block):
    """A block scale of 4 bits is off by 1/16, then a value by half a step: 1/4 of itself, or 1/4 where the step is
    1/2."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-3, 4, shape))
    data, scales, tensor_scale = oracle.quantize(x, block)
    wide = oracle.dequantize(torch.ones(shape), scales, tensor_scale, block)
    # 7/17: a scale rounded down by 1/17 saturates amax.
    bound = torch.maximum(x.abs().double() / 4, wide / 4) * (1 + 1e-6)
    assert ((oracle.dequantize(data, scales, tensor_scale, block) - x.double()).abs() <= bound).all()
    assert set(data.abs().flatten().tolist()) <= set(VALUES)


def test_what_is_not_finite():
    x = torch.randn(2, 48)
    x[0, 3], x[0, 20], x[1, 40] = math.nan, math.inf, 12.0
    data, scales, tensor_scale = oracle.quantize(x)
    assert tensor_scale == pytest.approx(12 / 2688, rel=1e-7) and scales[0].isnan().tolist() == [True, True, False]
    wide = oracle.dequantize(data, scales, tensor_scale)
    assert wide[0, :32].isnan().all() and wide[0, 32:].isfinite().all() and wide[1].isfinite().all()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 3e38])
def test_extremes(size):
    data, scales, tensor_scale = oracle.quantize(torch.tensor([[size, -size / 2, *[0.0] * 14]]))
    assert data.isfinite().all() and math.isfinite(tensor_scale) and scales.isfinite().all()
