"""Inductor's arithmetic of indices: without pattern matching where nothing can match.

Inductor writes ``ModularIndexing(i, 1, 32) + 32 * ModularIndexing(i, 32, 4)`` as ``ModularIndexing(i, 1, 128)``. It looks
for such pairs by sympy's `match` of every term with every other: of two layers of Llama under current scaling 5,400
times, most for terms of different indices or with other factors (torch 2.13, 2026-11-26). Whether two terms can be a
pair is seen from the arguments of their functions."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import sympy  # type: ignore[import-untyped]

from te_inductor.compat.patches import patch


def joining_dimensions_fast() -> AbstractContextManager[Any]:
    from torch._inductor import sizevars

    return patch("torch._inductor.sizevars.join_dimensions", functools.partial(_join, sizevars.join_dimensions))


def _join(torchs: Callable[[sympy.Expr], sympy.Expr], expr: sympy.Expr) -> sympy.Expr:
    return torchs(expr) if _may_join(expr) else expr


@functools.lru_cache(4096)
def _may_join(expr: sympy.Expr) -> bool:
    """False where torch's function would return the expression itself. True also where that is not certain."""
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    if not isinstance(expr, sympy.Add):
        return True
    terms = [sympy.Mul.make_args(term) for term in expr.args]
    for factors in terms:
        remainders = [factor for factor in factors if isinstance(factor, ModularIndexing)]
        if len(remainders) > 1:
            return True
        for remainder in remainders:
            base, divisor, modulus = remainder.args
            rest = (base, divisor * modulus)
            quotient, further = FloorDiv(*rest), ModularIndexing(*rest, sympy.Dummy(integer=True))
            if quotient.args != rest or further.args[:2] != rest:  # they became something else
                return True
            wanted = _factor_of(remainder, factors) * modulus
            for others in terms:
                for one in others:
                    if isinstance(one, FloorDiv | ModularIndexing) and one.args[:2] == rest:
                        found = _factor_of(one, others)
                        if found == wanted or not (found.is_Integer and wanted.is_Integer):
                            return True
    return False


def _factor_of(one: sympy.Expr, factors: Sequence[sympy.Expr]) -> sympy.Expr:
    return sympy.Mul(*(factor for factor in factors if factor is not one))
