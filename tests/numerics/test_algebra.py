"""The algebra of tensors: what torch itself would do otherwise. That the arithmetic on it is that of lowerings, and of
the oracle, bit for bit, the tests of casts hold (test_microscaling.py, test_nvfp4_variants.py)."""

import pytest
import torch

from te_inductor.numerics import arithmetic
from te_inductor.numerics.algebra import TORCH


@pytest.fixture
def narrow_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_numbers_are_fp32_or_int32(narrow_default):
    """Numbers are so even where two stand alone, of which torch makes its default dtype, and int64."""
    condition = torch.tensor([True, False])
    for made, dtype, values in (
        (TORCH.where(condition, TORCH.fp32(449), TORCH.fp32(1 + 2**-20)), torch.float32, [449.0, 1 + 2**-20]),
        (TORCH.where(condition, TORCH.int32(2**30), TORCH.int32(-1)), torch.int32, [2**30, -1]),
    ):
        assert made.dtype == dtype and made.tolist() == values


def test_quotients_are_rounded_once():
    x = torch.rand(4096) + 1
    for a, b in ((448.0 * 6, x), (x, 6.0), (x, x.flip(0))):
        wide = [each.double() if isinstance(each, torch.Tensor) else each for each in (a, b)]
        assert torch.equal(TORCH.quotient(a, b), (wide[0] / wide[1]).float())


def test_sums_have_their_order():
    """1 + 2**-24 is 1 in fp32, and 2**-24 + 2**-24 is kept."""
    values = [torch.tensor(value) for value in (1.0, 2.0**-24, 2.0**-24, 2.0**-24)]
    assert arithmetic.in_order(values).item() == 1.0
    assert arithmetic.in_halves(values).item() == 1.0 + 2.0**-23
    assert arithmetic.in_order(values[::-1]).item() > 1.0
