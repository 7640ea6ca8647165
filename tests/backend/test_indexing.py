"""Inductor's sums of indices that are left alone without pattern matching (compat/indexing.py)."""

import itertools

import sympy
from torch._inductor.sizevars import join_dimensions
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from te_inductor.compat.indexing import _may_join, joining_dimensions_fast

i, j = sympy.symbols("i j", integer=True, nonnegative=True)
BASES = (i, i + 128 * j, 4 * i, FloorDiv(i, 4))
TERMS = [
    *(ModularIndexing(base, *rest) for base in BASES for rest in ((1, 32), (32, 4))),
    *(FloorDiv(base, 32) for base in BASES),
    FloorDiv(ModularIndexing(i, 1, 32), 4) * ModularIndexing(i, 32, 4),
    i,
]


def test_what_torch_joins_is_left_to_torch():
    """torch joins pairs, and three terms."""
    joined = 0
    for a, b in itertools.permutations(TERMS, 2):
        for expr in (a + 32 * b, j * (a + 32 * b), 8 * (a + 32 * b) + 4096 * ModularIndexing(j, 64, 7)):
            found = join_dimensions(expr)
            joined += found != expr
            assert _may_join(expr) or found == expr, expr
    assert joined


def test_what_cannot_join_is_not_matched():
    """Other indices, or factors."""
    assert not _may_join(ModularIndexing(i, 1, 32) + 64 * ModularIndexing(i, 32, 4))
    assert not _may_join(ModularIndexing(i, 1, 32) + 32 * ModularIndexing(j, 32, 4))
    assert not _may_join(ModularIndexing(i, 1, 32) + 32 * ModularIndexing(i, 64, 4))
    assert not _may_join(ModularIndexing(i, 1, 32) + 32 * FloorDiv(j, 32))


def test_pairs_are_joined():
    from torch._inductor import sizevars

    with joining_dimensions_fast():
        joined = sizevars.join_dimensions(ModularIndexing(i, 1, 32) + 32 * ModularIndexing(i, 32, 4) + 128 * j)
    assert joined == ModularIndexing(i, 1, 128) + 128 * j
