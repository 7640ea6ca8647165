"""Conditions of a mask as `runtime.attention.predicate` has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]
from torch import fx
from torch.utils._sympy.functions import FloorDiv, PythonMod

from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.attention import masks
from te_inductor.passes.pre_grad.attention.expressions import Expr
from te_inductor.passes.pre_grad.attention.masks import Line

_NAMES: Mapping[Any, str] = {
    sympy.Le: "le",
    sympy.Lt: "lt",
    sympy.Ge: "ge",
    sympy.Gt: "gt",
    sympy.Eq: "eq",
    sympy.Ne: "ne",
    sympy.And: "and",
    sympy.Or: "or",
    sympy.Not: "not",
    sympy.Add: "add",
    sympy.Mul: "mul",
    FloorDiv: "floordiv",
    PythonMod: "mod",
}


class Writer:
    """Writes conditions, with tensors numbered in the order of `leaves`, which has them by the names of their functions.
    Numbers that a run alone tells are tensors too, without a dimension, behind those: `numbers` has their expressions,
    once all is written."""

    def __init__(self, leaves: Mapping[str, fx.Node]) -> None:
        self._leaves = leaves
        self.numbers: list[Expr] = []

    def write(self, conditions: Sequence[Expr]) -> Any:
        """All of them, as one predicate.

        Raises:
            NotImplementedError: a condition has no such form; says what it holds.
        """
        trees = [self._write(_apart(condition)) for condition in conditions]
        if not trees:
            return ["ge", "k", 0]
        return trees[0] if len(trees) == 1 else ["and", *trees]

    def _write(self, expr: Expr) -> Any:
        if expr in masks.PLACES:
            return str(expr)
        if expr.is_Integer:
            return int(expr)
        if isinstance(expr, AppliedUndef):
            place = [*self._leaves].index(str(expr.func))
            index = expr.args if value(self._leaves[str(expr.func)]).dim() else ()
            return ["at", place, *map(self._write, index)]
        if not _varies(expr) and getattr(expr, "is_integer", False):
            return self._number(expr)
        called = _NAMES.get(expr.func)
        if called is None:
            raise NotImplementedError(str(expr.func.__name__))
        operands = expr.args
        if called in ("add", "mul"):  # what is one number there counts as one
            fixed = [one for one in operands if not _varies(one)]
            operands = [*(one for one in operands if _varies(one)), *([expr.func(*fixed)] if fixed else [])]
        return [called, *map(self._write, operands)]

    def _number(self, expr: Expr) -> Any:
        if expr not in self.numbers:
            self.numbers.append(expr)
        return ["at", len(self._leaves) + self.numbers.index(expr)]


def _varies(expr: Expr) -> bool:
    """Whether an expression differs between places of the scores, or reads a tensor."""
    return bool(expr.free_symbols & set(masks.PLACES) or expr.atoms(AppliedUndef))


def _apart(condition: Expr) -> Expr:
    """A bound on keys with the key on one side and the query on the other, which blocks of scores are judged by."""
    line = Line.of(condition)
    if line is not None and line.is_causal:
        return sympy.Le(masks.KEY, masks.QUERY - line.rest, evaluate=False)
    if line is not None and line.is_window:
        return sympy.Ge(masks.KEY, masks.QUERY + line.rest, evaluate=False)
    return condition
