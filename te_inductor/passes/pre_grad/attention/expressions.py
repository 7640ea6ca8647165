"""Sympy's expressions as this package reads masks: numbers that have cases, and Booleans; and symbolic sizes, as a graph's
inputs have them: a mask is computed in front of the tensors that it is for."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from sympy.logic.boolalg import Boolean  # type: ignore[import-untyped]
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

Expr = Any  # sympy's expressions and Booleans, which mypy does not know


def expression(size: Any) -> Expr:
    """A size, or a symbolic one, as an expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def number(argument: Any) -> Expr | None:
    """A constant of the graph, or a symbolic number of it, as an expression."""
    value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if isinstance(value, float):
        # Exact, and equal to an integer where it is one, which sympy's floats are not.
        return sympy.Rational(value) if math.isfinite(value) else _special(value)
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return value.node.expr
    return None


def _special(value: float) -> Expr:
    return sympy.nan if value != value else sympy.oo if value > 0 else -sympy.oo


def is_exact(dtype: torch.dtype) -> bool:
    """Whether what is computed of positions is what a dtype has: narrow integers wrap around, as unsigned ones do."""
    return dtype.is_floating_point or dtype in (torch.bool, torch.int32, torch.int64)


def has(dtype: torch.dtype, value: Expr) -> bool:
    """Whether a dtype has a number as it is."""
    if dtype is torch.bool or value in (0, 1, sympy.oo, -sympy.oo):
        return True
    if not dtype.is_floating_point:
        return bool(value.is_integer and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max)
    rounded = torch.tensor(float(value), dtype=dtype, device="cpu").item() if value.is_Rational else math.nan
    return math.isfinite(rounded) and bool(sympy.Rational(rounded) == value)


def is_one(size: Any) -> bool:
    return statically_known_true(size == 1)


def select(condition: Expr, one: Expr, other: Expr) -> Expr:
    """``one if condition else other``, of numbers or Booleans."""
    if condition == sympy.true or one == other:
        return one
    if condition == sympy.false:
        return other
    if is_truth(one) or is_truth(other):
        return (condition & truth(one)) | (~condition & truth(other))
    return sympy.Piecewise((one, condition), (other, True))


def cases(expression: Expr) -> Iterator[tuple[Expr, Expr]]:
    """The values that a number may have, each with the Boolean that says when."""
    if not isinstance(expression, sympy.Piecewise):
        yield expression, sympy.true
        return
    before: Expr = sympy.true
    for value, condition in expression.args:
        for inner, when in cases(value):
            yield inner, before & condition & when
        before = before & ~condition


def is_truth(expression: Expr) -> bool:
    """Whether it is a Boolean; of sympy's, a symbol of a number may stand for one too."""
    return isinstance(expression, Boolean) and not isinstance(expression, sympy.Symbol)


def truth(expression: Expr) -> Expr:
    """Whether a number is not zero; a Boolean as it is."""
    if is_truth(expression):
        return expression
    return sympy.Or(*(when & sympy.Ne(value, 0) for value, when in cases(expression)))


def compare(relation: Any, one: Expr, other: Expr) -> Expr:
    """A comparison of numbers. One with an absolute value is written as two without it, each of which bounds keys."""
    join = {sympy.Le: sympy.And, sympy.Lt: sympy.And, sympy.Ge: sympy.Or, sympy.Gt: sympy.Or}.get(relation)
    if join is not None and isinstance(one, sympy.Abs):
        inner = one.args[0]
        return join(compare(relation, inner, other), compare(relation, -inner, other))
    if join is not None and isinstance(other, sympy.Abs):
        return compare(_TURNED[relation], other, one)
    return relation(one, other)


_TURNED = {sympy.Le: sympy.Ge, sympy.Lt: sympy.Gt, sympy.Ge: sympy.Le, sympy.Gt: sympy.Lt}


def plain_number(expression: Expr) -> Expr:
    """A Boolean as 1 or 0; a number as it is."""
    return select(expression, sympy.Integer(1), sympy.Integer(0)) if is_truth(expression) else expression


def on_cases(compute: Callable[..., Expr]) -> Callable[..., Expr]:
    """Computes, of numbers with cases, the results of all of them."""

    def of_cases(*operands: Expr) -> Expr:
        first = next((place for place, one in enumerate(operands) if isinstance(one, sympy.Piecewise)), None)
        if first is None:
            return compute(*operands)
        results = []
        for value, when in cases(operands[first]):
            results.append((of_cases(*operands[:first], value, *operands[first + 1 :]), when))
        found = results[-1][0]
        for value, when in reversed(results[:-1]):
            found = select(when, value, found)
        return found

    return lambda *operands: of_cases(*map(plain_number, operands))


class Symbols:
    """The inputs of a graph that have its symbols: as its value, or as one of its sizes."""

    def __init__(self, root: fx.Graph) -> None:
        self._sources: dict[Expr, tuple[fx.Node, int | None]] = {}
        for node in root.find_nodes(op="placeholder"):
            given = node.meta.get("example_value")
            sizes: Mapping[int | None, Any] = {None: given}
            if isinstance(given, torch.Tensor):
                sizes = {} if given.is_nested else dict(enumerate(given.shape))
            for dim, size in sizes.items():
                if isinstance(size, torch.SymInt) and expression(size).is_Symbol:
                    self._sources.setdefault(expression(size), (node, dim))

    def missing(self, expressions: Iterable[Expr]) -> list[Expr]:
        """The symbols in some expressions that no input has."""
        return sorted(_symbols(expressions) - self._sources.keys(), key=str)

    def operands(self, expressions: Iterable[Expr]) -> list[fx.Node]:
        """The inputs from which they are computed."""
        return list(dict.fromkeys(self._sources[symbol][0] for symbol in sorted(_symbols(expressions), key=str)))

    def values(self, expressions: Sequence[Expr], given: Sequence[Any]) -> list[Any]:
        """The values of expressions, from those of their operands."""
        inputs = dict(zip(self.operands(expressions), given, strict=True))
        env = {}
        for symbol in _symbols(expressions):
            node, dim = self._sources[symbol]
            env[symbol] = inputs[node] if dim is None else inputs[node].shape[dim]
        return [
            int(one) if one.is_Integer else sympy_interp(PythonReferenceAnalysis, env, one)  # type: ignore[arg-type]
            for one in expressions
        ]


def _symbols(expressions: Iterable[Expr]) -> set[Expr]:
    return set[Expr]().union(*(sympy.sympify(one).free_symbols for one in expressions))
