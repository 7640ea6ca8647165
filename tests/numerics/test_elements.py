"""Rounding to one value of an element: the oracle against the formats' own definition, and the eager cast against
both."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_inductor.numerics import arithmetic
from te_inductor.numerics.algebra import TORCH
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import ELEMENTS, Element
from te_inductor.runtime.eager import dense
from tests.bounds import assert_same_values, values_of
from tests.oracle import casts

TABLES = {  # magnitudes, by their codes
    "e2m1": [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "e3m2": [0.0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 1.75,
             2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0, 28.0],
    "e2m3": [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875, 2.0,
             2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5],
}  # fmt: skip
elements = pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda element: element.name)


def every_value(element: Element) -> torch.Tensor:
    """The finite values, from the definition: m * 2**e with m of mantissa_bits + 1 bits."""
    values = [0.0, -0.0]
    whole = 2**element.mantissa_bits
    for mantissa in range(1, whole):
        values.append(mantissa * element.smallest_step)
    exponent = element.min_exponent
    while whole * 2.0 ** (exponent - element.mantissa_bits) <= element.max:
        values += [m * 2.0 ** (exponent - element.mantissa_bits) for m in range(whole, 2 * whole)]
        exponent += 1
    values = [value for value in values if value <= element.max]
    return torch.tensor(values + [-value for value in values if value > 0], dtype=torch.float64)


def bits_of_every_value(element: Element) -> torch.Tensor:
    """All values of the format, from all bytes."""
    codes = torch.arange(2 ** (element.bits * element.packed), dtype=torch.uint8)
    return values_of(codes[None].view(element.dtype), element.name).flatten().unique()


def eager_cast(x: torch.Tensor, element: Element) -> torch.Tensor:
    if element.coded:  # where two are a byte the values behind the last are no matter
        return values_of(dense.microscaling.stored(torch.cat([x, x])[None], element), element.name).flatten()[: len(x)]
    return dense.cast(x, torch.tensor(1.0), Quantizer(element.name))


@pytest.mark.parametrize("element", [one for one in ELEMENTS.values() if one.coded], ids=lambda element: element.name)
def test_codes_and_values_are_each_others_inverse(element):
    """Each code has its value, by the tables of the OCP Microscaling Formats Specification; E2M1's own arithmetic and
    that of any element are one."""
    codes, several = torch.arange(2**element.bits, dtype=torch.uint8), replace(element, name="any")
    for one in (element, several):
        values = arithmetic.decode_value(TORCH, codes, one)
        assert values[: len(TABLES[element.name])].tolist() == TABLES[element.name]
        assert (
            torch.equal(values[len(values) // 2 :], -values[: len(values) // 2]) and values[len(values) // 2].signbit()
        )
        assert torch.equal(arithmetic.encode_value(TORCH, values, one).to(torch.uint8), codes)
    x = torch.randn(100_000) * torch.exp2(torch.randint(-6, 6, (100_000,)))
    found = (arithmetic.encode_value(TORCH, x, one).to(torch.uint8) for one in (element, several))
    assert torch.equal(*found)


@elements
def test_definition_is_the_bit_format(element):
    finite = bits_of_every_value(element)
    finite = finite[finite.isfinite()]
    assert torch.equal(finite.sort().values, every_value(element).unique())


@elements
def test_every_value_round_trips(element):
    values = every_value(element)
    assert_same_values(casts.round_to_element(values, element), values)
    assert_same_values(eager_cast(values.float(), element), values)
    if element.coded:
        data = dense.microscaling.stored(torch.cat([values, values])[None].float(), element)
        assert_same_values(dense.microscaling.values(data, element)[0, : len(values)], values)
        return
    scale_inv = torch.tensor(1.0)
    back = dense.dequantize(eager_cast(values.float(), element), scale_inv, Quantizer(element.name), torch.float32)
    assert_same_values(back, values)


@elements
def test_halfway_cases_round_to_even(element):
    """The cases lie between every pair of neighbours: the middle goes to the even mantissa, a hair to either side to
    the nearer one."""
    values = every_value(element).unique()  # sorted; one zero
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    above = torch.nextafter(middle.float(), torch.tensor(torch.inf))
    below = torch.nextafter(middle.float(), torch.tensor(-torch.inf))
    step = high - low
    even = torch.where((low / step) % 2 == 0, low, high)  # low / step is the mantissa of the finer neighbour
    for round_to in (
        lambda x: casts.round_to_element(x.double(), element),
        lambda x: eager_cast(x.float(), element),
    ):
        assert torch.equal(round_to(middle).double(), even)
        assert torch.equal(round_to(above).double(), high)
        assert torch.equal(round_to(below).double(), low)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        # E4M3 near 1 has a step of 1/8, its subnormals one of 2**-9; 448 is the last value.
        ("e4m3", {1.0625: 1.0, 1.1875: 1.25, 1.3125: 1.25, 1.4375: 1.5, 2.0**-10: 0.0, 3 * 2.0**-10: 2.0**-8,
                  416.0 + 16: 448.0, 400.0: 384.0, 449.0: 448.0, 464.0: 448.0, 480.0: 448.0, 1e30: 448.0}),
        # E5M2 near 1 has a step of 1/4, its subnormals one of 2**-16; 57344 is the last value.
        ("e5m2", {1.125: 1.0, 1.375: 1.5, 1.625: 1.5, 1.875: 2.0, 2.0**-17: 0.0, 3 * 2.0**-17: 2.0**-15,
                  53248.0: 49152.0, 57345.0: 57344.0, 61440.0: 57344.0, 65536.0: 57344.0, 1e30: 57344.0}),
        # E3M2 near 1 has a step of 1/4, its subnormals one of 1/16; 28 is the last value.
        ("e3m2", {1.125: 1.0, 1.375: 1.5, 1 / 32: 0.0, 3 / 32: 1 / 8, 7 / 32: 1 / 4, 18.0: 16.0, 22.0: 24.0, 26.0: 24.0,
                  27.0: 28.0, 30.0: 28.0, 1e30: 28.0}),
        # E2M3 near 1 has a step of 1/8, as its subnormals; 7.5 is the last value.
        ("e2m3", {1.0625: 1.0, 1.1875: 1.25, 1 / 16: 0.0, 3 / 16: 1 / 4, 15 / 16: 1.0, 4.25: 4.0, 4.75: 5.0, 7.25: 7.0,
                  7.4: 7.5, 8.0: 7.5, 1e30: 7.5}),
    ],
)  # fmt: skip
def test_table(name, table):
    element = ELEMENTS[name]
    x = torch.tensor(list(table) + [-value for value in table], dtype=torch.float64)
    expected = torch.tensor(list(table.values()) + [-value for value in table.values()], dtype=torch.float64)
    assert_same_values(casts.round_to_element(x, element), expected)
    assert_same_values(eager_cast(x.float(), element), expected)


@elements
def test_not_finite(element):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], dtype=torch.float64)
    saturated = torch.tensor([torch.nan, element.max, -element.max, -0.0], dtype=torch.float64)
    if element.coded:  # it has no NaN: the cast makes the largest of it
        largest = torch.full((1, 2), torch.nan), torch.full((1, 2), element.max)
        assert torch.equal(*(dense.microscaling.stored(one, element) for one in largest))
        x, saturated = x[1:], saturated[1:]
    assert_same_values(casts.round_to_element(x, element), saturated)
    cast = saturated if element.coded else torch.where(x.isinf(), torch.nan, saturated)
    assert_same_values(eager_cast(x.float(), element), cast)


@elements
@settings(max_examples=300, deadline=None)
@given(value=st.floats(width=32))
def test_oracle_rounds_to_the_nearest_value(element, value):
    """The reference is a search over all values."""
    rounded = casts.round_to_element(torch.tensor([value], dtype=torch.float64), element)
    if value != value:
        assert rounded.isnan().all()
        return
    clipped = min(max(value, -element.max), element.max)
    distances = (every_value(element) - clipped).abs()
    assert (rounded - clipped).abs().item() == distances.min().item()
    if math.isfinite(value):  # of an infinity the cast makes NaN
        assert_same_values(eager_cast(torch.tensor([value]), element), rounded)
