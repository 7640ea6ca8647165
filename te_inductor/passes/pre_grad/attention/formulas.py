"""Tensors of a graph as formulas of their indices: what a mask holds at each place, read from the nodes that compute it.

A formula of a tensor gives the sympy expression of an element from the expressions of its indices. Sizes may be
symbolic. What is computed from positions alone has no more symbols than those; a tensor that no rule reads is a *leaf*,
a function of its indices, so that `mask[b, k]` stays an expression in which the mask's own values are unknown.

A node is read only where its values are what it computed: memory that the graph writes anywhere is a leaf, as it is when
the node that reads it runs."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv, PythonMod

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.values import is_tensor
from te_inductor.passes.pre_grad.attention.expressions import (
    Expr,
    compare,
    expression,
    has,
    is_exact,
    is_one,
    is_truth,
    number,
    on_cases,
    plain_number,
    select,
    truth,
)
from te_inductor.runtime.attention.bands import Band

Index = tuple[Expr, ...]
_DEEPEST = 64  # nodes behind each other: a mask is computed by twenty


@dataclass(frozen=True)
class Formula:
    """A tensor: its sizes, its dtype, and the element at an index of as many expressions."""

    shape: tuple[Any, ...]  # int or SymInt
    dtype: torch.dtype
    at: Callable[[Index], Expr]

    def broadcast(self, shape: Sequence[Any], index: Index) -> Expr:
        """The element that broadcasting to `shape` reads at an index of that."""
        own = index[len(index) - len(self.shape) :]
        sizes = shape[len(shape) - len(self.shape) :]
        return self.at(
            tuple(
                sympy.Integer(0) if is_one(size) and not is_one(to) else i
                for size, to, i in zip(self.shape, sizes, own, strict=True)
            )
        )


@dataclass
class Reader:
    """Reads nodes of one graph; `is_written` says whether the graph writes a node's memory anywhere, `outer` which node an
    operand of a body stands for, `band` what an input holds that is read at an index, `told` what a node is called in
    refusals."""

    is_written: Callable[[fx.Node], bool]
    outer: Callable[[fx.Node], fx.Node]
    band: Callable[[fx.Node, Index], Band | None] = lambda node, index: None
    told: Callable[[fx.Node], str] = str
    leaves: dict[str, fx.Node] = field(default_factory=dict)  # by the name of their function
    readers: dict[str, fx.Node] = field(default_factory=dict)  # of leaves that the graph writes: what reads them
    _known: dict[tuple[fx.Node, fx.Node | None], Formula] = field(default_factory=dict)

    def read(self, node: fx.Node, depth: int = 0, reader: fx.Node | None = None) -> Formula:
        """The formula of a node that is a tensor, as another node reads it."""
        node = self.outer(node)
        key = (node, reader if self.is_written(node) else None)
        if key not in self._known:
            self._known[key] = self._computed(node, depth) or self.unread(*key)
        return self._known[key]

    def leaf_of(self, function: Expr) -> fx.Node:
        """The node of which a function in an expression stands for an element."""
        return self.leaves[function.func.__name__]

    def _computed(self, node: fx.Node, depth: int) -> Formula | None:
        called = operators.read(node)
        rule = None if called.in_place else _RULES.get(called.name)
        if rule is None or "out" in node.kwargs or depth > _DEEPEST or self.is_written(node):
            return None
        value = node.meta["example_value"]
        at = rule(_Call(self, node, depth))
        if at is None or (called.name in _COMPUTED and not is_exact(value.dtype)):
            return None
        of_truths = value.dtype is torch.bool  # whose sums are none but Booleans
        return Formula(tuple(value.shape), value.dtype, (lambda index: truth(at(index))) if of_truths else at)

    def unread(self, node: fx.Node, reader: fx.Node | None = None) -> Formula:
        """A tensor as a leaf, or as the band that it holds; one that the graph writes, as it is when `reader` reads it."""
        value = node.meta["example_value"]
        called = node.name
        if reader is not None:
            called = f"{node.name}_in_{reader.name}"
            self.readers[called] = reader
        self.leaves[called] = node
        # A float may be infinite, and may be an integer: of neither is the opposite known.
        facts = {"extended_real": True} if value.dtype.is_floating_point else {"integer": True}
        function = sympy.Function(called, **facts)

        def leaf(index: Index) -> Expr:
            element = function(*(index or (sympy.Integer(0),)))
            return sympy.Ne(element, 0) if value.dtype is torch.bool else element

        def at(index: Index) -> Expr:
            band = self.band(node, index)
            if band is None:
                return leaf(index)
            inside, outside = number(band.inside), number(band.outside)
            held = sympy.And(*band.holds(*index[-2:]))
            if band.padded:
                last = leaf((*index[:-2], expression(value.shape[-2]) - 1, index[-1]))
                held = held & (last if is_truth(last) else sympy.Eq(last, inside))
            return select(held, inside, outside)

        return Formula(tuple(value.shape), value.dtype, at)


@dataclass(frozen=True)
class _Call:
    """A node that a rule reads."""

    reader: Reader
    node: fx.Node
    depth: int

    @property
    def value(self) -> torch.Tensor:
        return self.node.meta["example_value"]  # type: ignore[no-any-return]

    def argument(self, place: int, called: str | None = None, default: Any = None) -> Any:
        args = self.node.args
        return args[place] if place < len(args) else self.node.kwargs.get(called, default) if called else default

    def formula(self, argument: Any) -> Formula | None:
        """The formula of a tensor or a number; None of anything else."""
        if is_tensor(argument):
            return self.reader.read(argument, self.depth + 1, self.node)
        found = number(argument)
        if found is None:
            return None
        value = argument.meta["example_value"] if isinstance(argument, fx.Node) else argument
        is_float = isinstance(value, float | torch.SymFloat)
        dtype = torch.bool if is_truth(found) else torch.float64 if is_float else torch.int64
        return Formula((), dtype, lambda index: found)

    def elementwise(self, operands: Sequence[Any], compute: Callable[..., Expr]) -> Callable[[Index], Expr] | None:
        found = [self.formula(operand) for operand in operands]
        if any(one is None for one in found):
            return None
        shape = self.value.shape
        return lambda index: compute(*(one.broadcast(shape, index) for one in found))  # type: ignore[union-attr]


# ---- the rules, by the name of the operator that a node calls ----

_Rule = Callable[[_Call], Callable[[Index], Expr] | None]


def _binary(compute: Callable[..., Expr]) -> _Rule:
    def rule(call: _Call) -> Callable[[Index], Expr] | None:
        if call.node.kwargs.keys() - {"other", "input"}:  # such as alpha, or a rounding mode
            return None
        return call.elementwise([call.argument(0, "input"), call.argument(1, "other")], compute)

    return rule


def _logic(of_booleans: Callable[[Expr, Expr], Expr], logical: bool) -> _Rule:
    """``&`` and its like: bits of integers are nobody's mask; `logical` asks whether these are zero."""

    def rule(call: _Call) -> Callable[[Index], Expr] | None:
        operands = [call.argument(0, "input"), call.argument(1, "other")]
        found = [call.formula(one) for one in operands]
        if not logical and any(one is None or one.dtype is not torch.bool for one in found):
            return None
        return call.elementwise(operands, lambda one, other: of_booleans(truth(one), truth(other)))

    return rule


def _invert(call: _Call) -> Callable[[Index], Expr] | None:
    if name(call.node) != "logical_not" and call.value.dtype is not torch.bool:
        return None
    return call.elementwise([call.argument(0, "input")], lambda one: ~truth(one))


def _unary(compute: Callable[[Expr], Expr]) -> _Rule:
    return lambda call: call.elementwise([call.argument(0, "input")], compute)


def _same(call: _Call) -> Callable[[Index], Expr] | None:
    """What changes a tensor's dtype, device or strides at most."""
    dtype = call.value.dtype
    source = call.formula(call.argument(0, "input"))
    if source is None or not _keeps(source.dtype, dtype):
        return None
    change: Callable[[Expr], Expr] = truth if dtype is torch.bool else plain_number
    return lambda index: change(source.broadcast(call.value.shape, index))


def _keeps(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a cast leaves every mask's number, or its truth, as it is: positions are beyond what bf16 holds."""
    if source is torch.bool or dtype is torch.bool or source is dtype:
        return True
    if source.is_floating_point or dtype.is_floating_point:
        return source.is_floating_point and dtype.is_floating_point
    return dtype.itemsize >= 4


def _constant(place: int, called: str | None, fixed: Expr | None = None) -> _Rule:
    def rule(call: _Call) -> Callable[[Index], Expr] | None:
        found = number(call.argument(place, called)) if fixed is None else fixed
        if found is None or (found.is_number and not has(call.value.dtype, found)):
            return None
        found = truth(found) if call.value.dtype is torch.bool else plain_number(found)
        return lambda index: found

    return rule


def _arange(call: _Call) -> Callable[[Index], Expr] | None:
    ends = [number(one) for one in call.node.args]
    named = {key: number(call.node.kwargs[key]) for key in ("start", "end", "step") if key in call.node.kwargs}
    if None in ends or None in named.values() or call.value.dtype.is_floating_point:
        return None
    places = ("end",) if len(ends) == 1 and "end" not in named else ("start", "end", "step")
    found: dict[str, Expr] = {"start": sympy.Integer(0), "step": sympy.Integer(1)}
    found |= dict(zip(places, ends, strict=False)) | named
    return lambda index: found["start"] + found["step"] * index[0]


def _choice(*names: tuple[int, str]) -> _Rule:
    """The rule of a condition and two tensors, which are arguments of these places and names."""

    def choose(condition: Expr, one: Expr, other: Expr) -> Expr:
        return select(truth(condition), one, other)

    return lambda call: call.elementwise([call.argument(*name) for name in names], choose)


def _triangle(keeps: Callable[[Expr, Expr], Expr]) -> _Rule:
    def rule(call: _Call) -> Callable[[Index], Expr] | None:
        source, diagonal = call.formula(call.argument(0, "input")), number(call.argument(1, "diagonal", 0))
        if source is None or diagonal is None:
            return None
        zero = sympy.false if call.value.dtype is torch.bool else sympy.Integer(0)
        return lambda index: select(keeps(index[-1] - index[-2], diagonal), source.at(index), zero)

    return rule


def _diff(call: _Call) -> Callable[[Index], Expr] | None:
    source = call.formula(call.argument(0, "input"))
    n, dim = call.argument(1, "n", 1), call.argument(2, "dim", -1)
    prepend, append = call.argument(3, "prepend"), call.argument(4, "append")
    if source is None or n != 1 or append is not None:
        return None
    dim %= len(source.shape)
    minus = on_cases(operator.sub)

    def moved(index: Index, by: int) -> Index:
        return tuple(i + by if place == dim else i for place, i in enumerate(index))

    if prepend is None:
        return lambda index: minus(source.at(moved(index, 1)), source.at(index))
    first = call.formula(prepend)
    if first is None or not is_one(first.shape[dim]):
        return None

    def at(index: Index) -> Expr:
        start = tuple(sympy.Integer(0) if place == dim else i for place, i in enumerate(index))
        inside = minus(source.at(index), source.at(moved(index, -1)))
        return select(sympy.Eq(index[dim], 0), minus(source.at(start), first.at(start)), inside)  # type: ignore[union-attr]

    return at


def _cumsum(call: _Call) -> Callable[[Index], Expr] | None:
    """The sums of what does not change along the dimension."""
    source, dim = call.formula(call.argument(0, "input")), call.argument(1, "dim")
    if source is None or not isinstance(dim, int) or not source.shape:
        return None
    dim %= len(source.shape)
    probe = _probe(source)
    if plain_number(source.at(probe)).has(probe[dim]):
        return None
    return lambda index: on_cases(operator.mul)(plain_number(source.at(index)), index[dim] + 1)


def _probe(source: Formula) -> Index:
    return tuple(sympy.Symbol(f"i{place}", integer=True, nonnegative=True) for place in range(len(source.shape)))


def _shaped(call: _Call) -> Callable[[Index], Expr] | None:
    """Views that add or remove dimensions of one element, or expand them."""
    source = call.formula(call.argument(0, "input"))
    if source is None or source.dtype is not call.value.dtype:
        return None
    shape = tuple(call.value.shape)
    if name(call.node) in ("expand", "expand_as", "broadcast_to"):
        return lambda index: source.broadcast(shape, index)
    own = [place for place, size in enumerate(source.shape) if not is_one(size)]
    new = [place for place, size in enumerate(shape) if not is_one(size)]
    if len(own) != len(new) or not all(
        statically_known_true(source.shape[one] == shape[other]) for one, other in zip(own, new, strict=True)
    ):
        probe = _probe(source)
        alike = source.at(probe)  # at each place, in whatever shape
        return None if alike.has(*probe) else lambda index: alike
    to = dict(zip(own, new, strict=True))

    def at(index: Index) -> Expr:
        return source.at(
            tuple(index[to[place]] if place in to else sympy.Integer(0) for place in range(len(source.shape)))
        )

    return at


def _permuted(call: _Call) -> Callable[[Index], Expr] | None:
    source, order = call.formula(call.argument(0, "input")), operators.order(call.node)
    if source is None or order is None:
        return None
    return lambda index: source.at(tuple(index[order.index(dim)] for dim in range(len(order))))


def _getitem(call: _Call) -> Callable[[Index], Expr] | None:
    source, given = call.formula(call.argument(0)), call.argument(1)
    entries = None if source is None else _entries(given if isinstance(given, tuple) else (given,), len(source.shape))
    if source is None or entries is None:
        return None
    tensors = [spot for spot, one in enumerate(entries) if isinstance(one, fx.Node) and number(one) is None]
    if tensors and tensors != list(range(tensors[0], tensors[-1] + 1)):
        return None  # torch moves their dimensions to the front
    wide = max((len(entries[spot].meta["example_value"].shape) for spot in tensors), default=0)
    picks: list[Callable[[Index], Expr]] = []
    at, sizes = 0, iter(source.shape)  # the next dimension of the result, and of the source
    for spot, entry in enumerate(entries):
        if entry is None:
            at += 1
            continue
        size = next(sizes)
        if spot in tensors:
            chosen = call.formula(entry)
            if chosen is None or chosen.dtype is torch.bool:
                return None
            picks.append(_by_tensor(chosen, at, call.value.shape[at : at + wide]))
            at += wide if spot == tensors[-1] else 0
            continue
        pick = _by_slice(entry, size, at) if isinstance(entry, slice) else _by_number(entry, size)
        if pick is None:
            return None
        picks.append(pick)
        at += isinstance(entry, slice)

    def read(index: Index) -> Expr:
        chosen = tuple(pick(index) for pick in picks)
        # An index below zero counts from the end, which a formula does not.
        if tensors and not all(one.is_nonnegative for one in chosen):
            return call.reader.unread(call.node).at(index)
        return source.at(chosen)

    return read


def _entries(given: tuple[Any, ...], dims: int) -> list[Any] | None:
    """One entry for each dimension of the source, and None for each new one."""
    if given.count(Ellipsis) > 1:
        return None
    if Ellipsis not in given:
        given = (*given, Ellipsis)
    place, rest = given.index(Ellipsis), dims - sum(one is not None and one is not Ellipsis for one in given)
    return [*given[:place], *([slice(None)] * rest), *given[place + 1 :]]


def _by_tensor(chosen: Formula, at: int, shape: Sequence[Any]) -> Callable[[Index], Expr]:
    return lambda index: chosen.broadcast(shape, index[at : at + len(shape)])


def _by_slice(entry: slice, size: Any, at: int) -> Callable[[Index], Expr] | None:
    begin = _begin(entry, size)
    return None if begin is None else lambda index: begin[0] + begin[1] * index[at]


def _by_number(entry: Any, size: Any) -> Callable[[Index], Expr] | None:
    fixed = number(entry)
    if fixed is None or is_truth(fixed):
        return None
    wrapped = fixed if fixed.is_nonnegative else fixed + expression(size)
    return lambda index: wrapped


def _begin(entry: slice, size: Any) -> tuple[Expr, Expr] | None:
    start = sympy.Integer(0) if entry.start is None else number(entry.start)
    step = sympy.Integer(1) if entry.step is None else number(entry.step)
    if start is None or step is None:
        return None
    if not start.is_nonnegative:
        if not start.is_negative or not statically_known_true(size + int(start) >= 0):
            return None
        start = expression(size) + start
    return start, step


def _tensor(call: _Call) -> Callable[[Index], Expr] | None:
    """`torch.tensor` of a number."""
    return _constant(0, "data")(call) if call.value.dim() == 0 else None


def _relation(relation: Any) -> _Rule:
    return _binary(on_cases(lambda one, other: compare(relation, one, other)))


_RULES: Mapping[str, _Rule] = {
    "arange": _arange,
    **dict.fromkeys(("tensor", "scalar_tensor"), _tensor),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _constant(0, None, sympy.Integer(1))),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _constant(0, None, sympy.Integer(0))),
    **dict.fromkeys(("full", "full_like"), _constant(1, "fill_value")),
    "new_full": _constant(2, "fill_value"),
    "add": _binary(on_cases(operator.add)),
    "sub": _binary(on_cases(operator.sub)),
    "rsub": _binary(on_cases(lambda one, other: other - one)),
    "mul": _binary(on_cases(operator.mul)),
    "abs": _unary(on_cases(sympy.Abs)),
    "neg": _unary(on_cases(operator.neg)),
    "floordiv": _binary(on_cases(FloorDiv)),
    **dict.fromkeys(("mod", "remainder"), _binary(on_cases(PythonMod))),
    "minimum": _binary(on_cases(sympy.Min)),
    "maximum": _binary(on_cases(sympy.Max)),
    "le": _relation(sympy.Le),
    "lt": _relation(sympy.Lt),
    "ge": _relation(sympy.Ge),
    "gt": _relation(sympy.Gt),
    "eq": _relation(sympy.Eq),
    "ne": _relation(sympy.Ne),
    **dict.fromkeys(("and", "bitwise_and"), _logic(operator.and_, logical=False)),
    **dict.fromkeys(("or", "bitwise_or"), _logic(operator.or_, logical=False)),
    **dict.fromkeys(("xor", "bitwise_xor"), _logic(sympy.Xor, logical=False)),
    "logical_and": _logic(operator.and_, logical=True),
    "logical_or": _logic(operator.or_, logical=True),
    **dict.fromkeys(("invert", "bitwise_not", "logical_not"), _invert),
    "where": _choice((0, "condition"), (1, "input"), (2, "other")),
    "masked_fill": _choice((1, "mask"), (2, "value"), (0, "input")),
    "tril": _triangle(sympy.Le),
    "triu": _triangle(sympy.Ge),
    "diff": _diff,
    "cumsum": _cumsum,
    **dict.fromkeys(("to", "type", "type_as", "bool", "int", "long", "float", "half", "bfloat16", "double"), _same),
    **dict.fromkeys(("contiguous", "clone", "detach", "alias", "_to_copy", "lift_fresh_copy"), _same),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _shaped),
    **dict.fromkeys(("unsqueeze", "squeeze", "view", "reshape", "flatten", "unflatten"), _shaped),
    **dict.fromkeys(("permute", "movedim", "transpose", "t", "T", "mT"), _permuted),
    "getitem": _getitem,
}
_COMPUTED = frozenset("arange add sub rsub mul abs neg diff cumsum".split())  # numbers, which a dtype may not have
