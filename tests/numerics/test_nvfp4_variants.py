"""NVFP4 whose blocks go to 4 or to 6, or whose rows have factors of their own: by hand, and eager and compiled casts
against the oracle."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_inductor import ops
from te_inductor.errors import RecipeError
from te_inductor.lowerings import install
from te_inductor.recipes import Quantizer, Slots
from tests.bounds import values_of
from tests.oracle import casts
from tests.support.contents import CONTENTS, DTYPES, LAYOUTS
from tests.support.layers import linears
from tests.support.microscaled_casts import SIZES, check_both, compiled
from tests.support.nvfp4_casts import FACTORS_OF_ROWS, QUANTIZERS, check_rows, copies_of_rows, factors_of_rows

quantizers = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.scope} {q.error_metric}")

# No format has it: the rule is the same for any number of candidates.
THREE = Quantizer("e2m1", scope="1x16", candidates=(6.0, 4.0, 3.0), error_metric="MSE", scale_max=256.0)


def one(metric: str, most: float = 256.0, scope: str = "1x16") -> Quantizer:
    return Quantizer("e2m1", scope=scope, candidates=(6.0, 4.0), error_metric=metric, scale_max=most)


def quantized(values: list[float], quantizer: Quantizer, amax: float) -> tuple[list[float], float]:
    """The values and the scale of one block of 16, the oracle's, which are those of the op."""
    x = torch.tensor([values + [0.0] * (16 - len(values))])
    data, scale = casts.quantize(x, quantizer, amax)
    found, found_scale = ops.quantize(x, quantizer, torch.tensor(amax))
    assert torch.equal(values_of(found), data) and torch.equal(found_scale.double(), scale)
    return data[0, : len(values)].tolist(), scale[0].item()


# Values of a tensor with amax 6, and 256 as the largest scale, are in units of their own: to 6 they are rounded to 0,
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
    """Cast to 6, 5 is off by 1 and nothing else is; to 4, 5 and 4 are off by 1/2 each and 1/2 is by 1/4: the magnitudes
    are 1 and 5/4, the squares 1 and 9/16."""
    values = [6.0, 5.0, 4.0, 0.5]
    assert quantized(values, one("MAE"), 6.0) == ([6.0, 4.0, 4.0, 0.5], 256.0)
    assert quantized(values, one("MSE"), 6.0) == ([4.0, 3.0, 3.0, 0.5], 384.0)


def test_the_largest_scale():
    """The block of the tensor's amax has, with 448, no larger scale to go to 4 with. One of half the amax has 224, or
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


@pytest.mark.sample(1)
@quantizers
@pytest.mark.parametrize("content", CONTENTS)
def test_eager(content, quantizer):
    for size in SIZES:
        for layout, dtype in zip(LAYOUTS.values(), itertools.cycle(DTYPES), strict=False):
            check_both(layout(CONTENTS[content](*size).to(dtype)), quantizer)


# Each is a C++ compile of seconds. `test_compiled_rows` has one of candidates in each round.
COMPILED = [
    ((33, 70), torch.bfloat16, "contiguous", QUANTIZERS[0]),
    ((33, 70), torch.float32, "transposed", QUANTIZERS[1]),
    ((64, 96), torch.float32, "transposed", QUANTIZERS[2]),
    ((33, 70), torch.bfloat16, "strided", QUANTIZERS[3]),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "dtype", "layout", "quantizer"), COMPILED, ids=str)
def test_compiled(size, dtype, layout, quantizer):
    functions = compiled()
    for make in CONTENTS.values():
        check_both(LAYOUTS[layout](make(*size).to(dtype)), quantizer, *functions)


def test_rows_have_factors_of_their_own():
    """Rows that differ by a power of two have the same values and scales; as one tensor, the smaller one has none."""
    row = torch.tensor([[12.0, -6.0, 1.0, 0.4] + 12 * [0.0] + [3.0, -0.25] + 14 * [0.0]])
    x = torch.cat([row, row * 2.0**-30])
    amax = ops.tensor_amax(x, True)
    assert amax.tolist() == [[12.0], [12 * 2.0**-30]]
    data, scale_inv = ops.quantize(x, FACTORS_OF_ROWS[0], amax)
    assert scale_inv.tolist() == 2 * [448.0, 112.0]
    assert torch.equal(data[0], data[1]) and values_of(data)[0, :4].tolist() == [6.0, -3.0, 0.5, 0.0]
    _, scale_inv = ops.quantize(x, Quantizer("e2m1", scope="1x16"), ops.tensor_amax(x))
    assert scale_inv.tolist() == [448.0, 112.0, 0.0, 0.0]


def test_a_row_that_is_not_finite_is_alone():
    x, weight = torch.randn(4, 32), torch.randn(16, 32)
    x[1, 3], x[2, 5] = math.inf, math.nan
    plain = Quantizer("e2m1", scope="1x16")
    slots = Slots.of(FACTORS_OF_ROWS[0], Quantizer("e2m1", scope="16x16"), plain)
    [y] = linears(x, [weight], [], slots, x.dtype)
    assert y.isfinite().all(1).tolist() == [True, False, False, True]


@pytest.mark.sample(1)
@factors_of_rows
@pytest.mark.parametrize("content", CONTENTS)
def test_eager_rows(content, quantizer):
    for size in SIZES:
        for layout, dtype in zip(LAYOUTS.values(), itertools.cycle(DTYPES), strict=False):
            check_rows(layout(CONTENTS[content](*size).to(dtype)), quantizer)


@pytest.mark.quick("4 over 6-torch.float32-transposed")
@pytest.mark.parametrize(("dtype", "layout"), [(torch.bfloat16, "contiguous"), (torch.float32, "transposed")], ids=str)
@factors_of_rows
def test_compiled_rows(quantizer, dtype, layout):
    install()
    function = torch.compile(copies_of_rows, backend="inductor", fullgraph=True, dynamic=False)
    for make in CONTENTS.values():
        check_rows(LAYOUTS[layout](make(33, 70).to(dtype)), quantizer, function)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 34),
    columns=st.integers(0, 70),
    values=st.lists(st.floats(width=32), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    quantizer=st.sampled_from([*QUANTIZERS, *FACTORS_OF_ROWS, THREE]),
    dtype=st.sampled_from(DTYPES),
)
def test_eager_on_any_values(rows, columns, values, seed, quantizer, dtype):
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(values), (rows, columns), generator=generator)
    noise = 1 + torch.randn(rows, columns, generator=generator) / 8
    x = (torch.tensor(values, dtype=torch.float32)[pick] * noise).to(dtype)
    (check_rows if quantizer.rows_have_factors else check_both)(x, quantizer)


def test_what_reports_call_them():
    assert one("MAE").label(columnwise=False) == "e2m1 1x16 4 over 6, MAE"
    assert Quantizer("e2m1", scope="1x16", hadamard=True, stochastic=True).label(columnwise=True) == (
        "e2m1 1x16 transformed stochastic"
    )


def test_quantizers_that_no_format_has():
    chosen: dict[str, object] = {"candidates": (6.0, 4.0), "error_metric": "MAE"}
    for fields in (
        {"candidates": (6.0, 4.0)},
        {"candidates": (6.0, 4.0), "error_metric": "mae"},
        {"candidates": (6.0,), "error_metric": "MAE"},
        {"candidates": (4.0, 6.0), "error_metric": "MAE"},
        {"candidates": (6.0, 4.0, 4.0), "error_metric": "MAE"},
        {"candidates": (6.0, 0.0), "error_metric": "MAE"},
        {"candidates": [6.0, 4.0], "error_metric": "MAE"},
        {"error_metric": "MAE"},
        {"scale_max": 256.0},
        chosen | {"scale_max": 255.0},
        chosen | {"stochastic": True},
        chosen | {"hadamard": True},
        chosen | {"element": "e4m3", "scope": "1x32"},
        {"factor_scope": "block"},
        {"factor_scope": "row", "scope": "16x16"},
        {"factor_scope": "row", "element": "e4m3", "scope": "row"},
        {"factor_scope": "row", "stochastic": True},
        {"factor_scope": "row", "hadamard": True},
    ):
        with pytest.raises(RecipeError, match="expected"):
            Quantizer(**{"element": "e2m1", "scope": "1x16"} | fields)
