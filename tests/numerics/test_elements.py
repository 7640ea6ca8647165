"""Rounding to one value of an element: the oracle against the formats' own definition, and the eager cast against
both."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import E2M1, ELEMENTS, Element
from te_inductor.runtime import eager
from tests.bounds import assert_same_values, values_of
from tests.oracle import casts

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
    return values_of(torch.arange(256, dtype=torch.uint8)[None].view(element.dtype)).flatten().unique()


def eager_cast(x: torch.Tensor, element: Element) -> torch.Tensor:
    if element is E2M1:  # two a byte, and the values behind the last are no matter
        codes = eager.microscaling.cast_e2m1(torch.cat([x, x]))[None]
        return values_of(eager.microscaling.pack(codes)).flatten()[: len(x)]
    return eager.cast(x, torch.tensor(1.0), Quantizer(element.name))


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
    if element is E2M1:
        return
    scale_inv = torch.tensor(1.0)
    back = eager.dequantize(eager_cast(values.float(), element), scale_inv, Quantizer(element.name), torch.float32)
    assert_same_values(back, values)


@elements
def test_halfway_cases_round_to_even(element):
    """Between every pair of neighbours: the middle goes to the even mantissa, a hair to either side to the nearer
    one."""
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
    if element is E2M1:  # it has no NaN: the cast makes 6 of it
        x, saturated = x[1:], saturated[1:]
    assert_same_values(casts.round_to_element(x, element), saturated)
    cast = saturated if element is E2M1 else torch.where(x.isinf(), torch.nan, saturated)
    assert_same_values(eager_cast(x.float(), element), cast)


@elements
@settings(max_examples=300, deadline=None)
@given(value=st.floats(width=32))
def test_oracle_rounds_to_the_nearest_value(element, value):
    """Against a search over all values."""
    rounded = casts.round_to_element(torch.tensor([value], dtype=torch.float64), element)
    if value != value:
        assert rounded.isnan().all()
        return
    clipped = min(max(value, -element.max), element.max)
    distances = (every_value(element) - clipped).abs()
    assert (rounded - clipped).abs().item() == distances.min().item()
    if math.isfinite(value):  # of an infinity the cast makes NaN
        assert_same_values(eager_cast(torch.tensor([value]), element), rounded)
