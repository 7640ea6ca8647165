"""What a mask is proven to be: which keys each query attends to, for all batches, heads and sizes of a graph.

A mask is read as a predicate over (batch, head, query, key), a conjunction of conditions. A condition that holds at
every place of the scores is dropped; what is left says what the mask is. Nothing is guessed: a condition of another
form stays, and the mask is then not causal, or a window, but that and more."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]
from torch import fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._sympy.functions import FloorDiv

from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.attention.expressions import Expr, cases, expression, truth
from te_inductor.passes.pre_grad.attention.formulas import Reader

BATCH, HEAD, QUERY, KEY = sympy.symbols("b h q k", integer=True, nonnegative=True)
PLACES = (BATCH, HEAD, QUERY, KEY)
_MOST_CONDITIONS = 16  # masks of models have five; one of more is nobody's, and would take long to read


@dataclass(frozen=True)
class Scores:
    """The sizes of attention's scores, and the environment of those that are symbolic."""

    batch: Any  # int or SymInt, as the others
    heads: Any
    queries: Any
    keys: Any
    shapes: ShapeEnv | None = None

    @staticmethod
    def of(q: torch.Tensor, keys: Any) -> "Scores":
        """The scores of q, (B, H, L, D), and so many keys."""
        fake: Any = q
        batch, heads, queries, _ = q.shape
        return Scores(batch, heads, queries, keys, fake.fake_mode.shape_env)

    @property
    def sizes(self) -> tuple[Any, Any, Any, Any]:
        return self.batch, self.heads, self.queries, self.keys

    @property
    def is_square(self) -> bool:
        return statically_known_true(self.queries == self.keys)

    def holds(self, condition: Expr, guard: bool = False) -> bool:
        """Whether a condition on sizes is known to hold; with `guard` also where it holds for the sizes of this
        compile, and Dynamo compiles anew for others."""
        if condition in (sympy.true, sympy.false):
            return bool(condition == sympy.true)
        if self.shapes is None or condition.atoms(AppliedUndef) or condition.free_symbols & set(PLACES):
            return False
        found = torch.SymBool(SymNode(condition, self.shapes, bool, None))
        return statically_known_true(found) or (guard and found.node.hint is True and bool(found))


@dataclass(frozen=True)
class Line:
    """The condition ``queries * q + keys * k + rest <= 0``."""

    queries: int
    keys: int
    rest: Expr

    @staticmethod
    def of(condition: Expr) -> "Line | None":
        """None of a condition that is none such."""
        if isinstance(condition, sympy.Ge | sympy.Gt):
            condition = condition.reversed
        if not isinstance(condition, sympy.Le | sympy.Lt):
            return None
        below, above = condition.lhs, condition.rhs
        if not (below.is_integer and above.is_integer):
            return None
        rest = sympy.expand(below - above + (1 if isinstance(condition, sympy.Lt) else 0))
        factors: list[int] = []
        for place in (QUERY, KEY):
            factor = rest.coeff(place, 1)
            if not factor.is_Integer:
                return None
            factors.append(int(factor))
            rest = sympy.expand(rest - factor * place)
        return None if rest.free_symbols & {QUERY, KEY} else Line(factors[0], factors[1], rest)

    def always(self, scores: Scores) -> Expr:
        """The condition on sizes under which it holds at every place."""
        sizes = ((self.queries, scores.queries), (self.keys, scores.keys))
        largest = self.rest + sum(factor * (expression(size) - 1) for factor, size in sizes if factor > 0)
        return sympy.expand(largest) <= 0

    @property
    def is_causal(self) -> bool:
        """Whether it bounds the keys of a query from above: ``k <= q - rest``."""
        return (self.queries, self.keys) == (-1, 1)

    @property
    def is_window(self) -> bool:
        """Whether it bounds them from below: ``k >= q + rest``."""
        return (self.queries, self.keys) == (1, -1)


@dataclass(frozen=True)
class Mask:
    """A predicate, as conditions of which all hold where a query attends to a key."""

    conditions: tuple[Expr, ...]
    scores: Scores
    # Whether the smallest number, and not minus infinity, stands where no key is attended to: a query that attends to
    # none then attends to all of them alike.
    smallest: bool = False

    @cached_property
    def data(self) -> tuple[Expr, ...]:
        """The conditions that read tensors; the others are on positions alone."""
        return tuple(one for one in self.conditions if one.atoms(AppliedUndef))

    @property
    def without_data(self) -> "Mask":
        """The mask where all of those hold."""
        return replace(self, conditions=tuple(one for one in self.conditions if one not in self.data))

    @property
    def is_full(self) -> bool:
        return not self.conditions

    @property
    def is_causal(self) -> bool:
        """Whether it is what `is_causal` of torch's attention says: a query attends to its own key and those before."""
        lines = [Line.of(one) for one in self.conditions]
        return len(lines) == 1 and lines[0] is not None and lines[0].is_causal and lines[0].rest == 0

    @property
    def ends_early(self) -> bool:
        """Whether there are more keys than queries, and no query attends to one behind its own, as of a static cache
        while the prompt is read. Dynamo compiles anew where queries are more."""
        scores, lines = self.scores, [Line.of(one) for one in self.conditions]
        return (
            not scores.is_square
            and any(line is not None and line.is_causal and scores.holds(line.rest >= 0) for line in lines)
            and scores.holds(expression(scores.queries) <= expression(scores.keys), guard=True)
        )

    def of_first_keys(self) -> "Mask":
        """The mask on as many keys as there are queries."""
        scores = replace(self.scores, keys=self.scores.queries)
        return replace(self, scores=scores, conditions=_left(self.conditions, scores))

    @property
    def is_shifted_by_data(self) -> bool:
        """Whether a bound of keys by queries reads a tensor, as how much a cache holds."""
        lines = [Line.of(one) for one in self.data]
        return any(line is not None and (line.is_causal or line.is_window) for line in lines)

    @property
    def name(self) -> str:
        """The name that reports have."""
        return ", ".join(sorted({_kind(one) for one in self.conditions}, key=_KINDS.index)) or "full"

    def nowhere_empty(self) -> bool:
        """Whether every query is known to attend to a key: its own."""
        own = [condition.subs(KEY, QUERY) for condition in self.conditions]
        lines = [(one, Line.of(one)) for one in own]
        return self.scores.holds(expression(self.scores.queries) <= expression(self.scores.keys)) and all(
            one == sympy.true or (line is not None and self.scores.holds(line.always(self.scores)))
            for one, line in lines
        )


def read(mask: fx.Node, reader: Reader, scores: Scores) -> Mask | Refusal:
    """What a mask of torch's attention is: Booleans, or numbers that are added to the scores."""
    formula = reader.read(mask)
    shape = (scores.batch, scores.heads, scores.queries, scores.keys)
    if len(formula.shape) > len(shape):
        return Refusal("the mask has %d dimensions", len(formula.shape))
    element = formula.broadcast(shape, PLACES)
    smallest = False
    if formula.dtype is not torch.bool:
        found = _added(element, formula.dtype)
        if found is None:
            unknown = Refusal("what is added to the scores is not known to be 0 or minus infinity at each place")
            return _dense(element, reader) or unknown
        element, smallest = found
    return of_predicate(element, scores, reader, smallest)


def _dense(expression: Expr, reader: Reader) -> Refusal | None:
    """Why an expression is no predicate on positions: the tensor of queries and keys that it reads."""
    for function in expression.atoms(AppliedUndef):
        if {QUERY, KEY} <= function.free_symbols:
            return Refusal("its values come from %s, not from positions", reader.told(reader.leaf_of(function)))
    return None


def of_predicate(predicate: Expr, scores: Scores, reader: Reader, smallest: bool = False) -> Mask | Refusal:
    """What is known of a predicate over `PLACES`."""
    predicate = truth(predicate)
    # In an order that is the same in each process, as it is in generated code, which caches know by its text.
    conditions = sorted(sympy.And.make_args(predicate), key=sympy.default_sort_key)
    if predicate == sympy.false or len(conditions) > _MOST_CONDITIONS:
        return Refusal("the mask attends to nothing" if predicate == sympy.false else "the mask has many conditions")
    dense = _dense(predicate, reader)
    if dense is not None:
        return dense
    return Mask(_left(conditions, scores), scores, smallest)


def _left(conditions: Iterable[Expr], scores: Scores) -> tuple[Expr, ...]:
    """The conditions that do not hold everywhere."""
    return tuple(one for one in conditions if not _everywhere(one, scores))


def _everywhere(condition: Expr, scores: Scores) -> bool:
    if condition == sympy.true:
        return True
    line = Line.of(condition)
    return line is not None and scores.holds(line.always(scores), guard=line.is_window)


def _added(element: Expr, dtype: torch.dtype) -> tuple[Expr, bool] | None:
    """Finds where an additive mask is 0, and whether it is the smallest number elsewhere, not minus infinity."""
    attended: Expr = sympy.false
    smallest = set()
    for value, when in cases(element):
        if when == sympy.false:
            continue
        if value.is_zero:
            attended = attended | when
        elif value == -sympy.oo or value == sympy.Rational(torch.finfo(dtype).min):
            smallest.add(value != -sympy.oo)
        else:
            return None
    return (attended, smallest == {True}) if len(smallest) < 2 else None


_KINDS = ("causal", "causal with an offset", "window", "chunks", "positions", "padded", "packed", "data")


def _kind(condition: Expr) -> str:
    """What a condition is called in reports; one of `_KINDS`."""
    line = Line.of(condition)
    functions = condition.atoms(AppliedUndef)
    if functions and (line is None or 0 in (line.queries, line.keys)):
        is_padding = (
            isinstance(condition, sympy.Ne | sympy.Eq) and len(functions) == 1 and not functions.pop().has(QUERY)
        )
        is_packed = isinstance(condition, sympy.Eq) and {one.func for one in (condition.lhs, condition.rhs)} == {
            one.func for one in condition.atoms(AppliedUndef)
        }
        return "padded" if is_padding else "packed" if is_packed else "data"
    if line is not None and line.is_causal:
        return "causal" if line.rest == 0 else "causal with an offset"
    if line is not None and line.is_window:
        return "window"
    return "chunks" if isinstance(condition, sympy.Eq) and condition.atoms(FloorDiv) else "positions"
