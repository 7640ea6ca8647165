"""The functions of a saved value that bear the error of E4M3, as a backward computes them.

# Note [Functions that bear a relative error]
The walk over what the backward computes of a value, before a gradient comes into it, knows three kinds. LINEAR is the
value itself times what does not depend on it, or a power of it. SQUARE is an even power of it times a number above
zero. BOUNDED is what sigmoid, tanh or erf make of it, and combinations with these: the derivative decays where the
value grows, so that its error stays within that of the value. Operators that are not listed are refused, as each of
these would give other numbers:
- signs, rounding and ties. Comparisons are made in the forward, of the exact value, and saved as bits beside it
  (`saved_masks`): the derivative of ReLU asks whether a value is above zero, and E4M3 has zeros where the value has none;
- a division by the value, its logarithm or square root: by such a zero;
- a difference with what is no function of it: of a large value that leaves its error alone, as LayerNorm's deviation
  from the mean or a loss's from its target. Where all readers read the difference, that is saved in the value's place,
  also where the forward would not compute it;
- exponentials, sines: an error of a large argument is a factor of the result. `1 / (1 + exp(-x))` is a sigmoid, and
  `exp(-x^2)` decays;
- products of matrices, softmax, attention, normalization over rows: these add up errors, or rely on sums.

A choice of rows, by an index or by a mask that puts zeros in the place of the others, keeps their kind: experts' rows
that a token's gradient meets, or that belong to a group. So does a choice of single elements between two functions of
the value. Between the value and a number it is refused: what is infinite or NaN makes its whole block NaN, where a mask
that leaves it out keeps the gradients of its neighbours.

Where functions of single elements stand between a value and all that reads it, what they make is cast in its place, of
each part of the value by itself, as of gate and up that one product makes. So clamped values are cast behind the clamp,
where none is infinite.

Layers' inputs are computed again in the backward of such a value, and cast from it: that is one more rounding.

What a checkpoint computes again may be any function: `saved_checkpoints`."""

import enum
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.casts import QUANTIZE
from te_inductor.passes.graph.node_kinds import (
    in_memory_order,
    is_cast,
    is_one,
    is_pointwise,
    is_view,
    is_view_or_cast,
    tensor_of,
)
from te_inductor.passes.graph.walks import reached
from te_inductor.passes.joint.saved_checkpoints import Recomputation
from te_inductor.passes.joint.saved_masks import is_mask, is_read, refuse_mask

aten = torch.ops.aten
WIDE = (torch.bfloat16, torch.float16, torch.float32)
_COPIES = (aten.clone.default, aten.alias.default, aten.neg.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
SUMS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_POWERS = (aten.pow.Tensor_Scalar,)
_CHOICES = (aten.index.Tensor, aten.where.self)
_OF_ROWS = (  # views whose rows are those of what they view, where the last dimension is as long
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
_PARTS = (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)
_BOUNDED = (aten.sigmoid.default, aten.tanh.default, aten.erf.default, aten.erfc.default)
_FILLS: dict[Any, int] = {aten.full.default: 1, aten.scalar_tensor.default: 0}  # with the place of the number
_ENDS = QUANTIZE | {ops.quantize_groups, ops.transpose_groups}  # copies of a layer's input


class Dependence(enum.Enum):
    """What the backward has made of a value: Note [Functions that bear a relative error]."""

    LINEAR = enum.auto()
    SQUARE = enum.auto()
    BOUNDED = enum.auto()


def functions_of(
    chain: Sequence[fx.Node],
    known: Mapping[str, fx.Node],
    later: set[fx.Node],
    cast: set[fx.Node],
    again: Recomputation | None,
) -> Refusal | list[fx.Node]:
    """Why what reads the last node of a chain does not bear its error; or else the comparisons with it, and with what is
    in front of it, that the forward has to save. `cast` is not computed of it. Note [Functions that bear a relative
    error]"""
    value = chain[-1]
    kinds, exact, masks = {value: Dependence.LINEAR}, set(chain[:-1]), list[fx.Node]()
    for node in _behind(chain[0]):
        if node in chain:
            continue
        if again is not None and node not in cast and again.reads(node, kinds):
            refusal = again.add(node)
            if refusal is not None:
                return refusal
            continue
        operands = [one for one in node.all_input_nodes if one in kinds]
        if is_mask(node, later) and any(one in kinds or one in exact for one in node.all_input_nodes):
            exact.add(node)
            if is_read(node, later):
                masks.append(node)
            continue
        if not operands or node in cast or (node.target in _ENDS and node not in later):
            continue
        kind = _read(node, value, operands, kinds, later)
        if isinstance(kind, Refusal):
            return kind
        if kind is not None:
            kinds[node] = kind
    return next(filter(None, (refuse_mask(one, known) for one in masks)), masks)


def _read(
    node: fx.Node, value: fx.Node, operands: Sequence[fx.Node], kinds: dict[fx.Node, Dependence], later: set[fx.Node]
) -> Refusal | Dependence | None:
    """What a reader makes of a value; None where a gradient is multiplied by it."""
    if node.op != "call_function":
        return Refusal("the backward returns it")
    if _is_spread(node, value):
        return Refusal("the backward spreads it over a larger tensor")
    if node in later:
        is_factor = node.target in _PRODUCTS and len(operands) == 1
        return None if is_factor else Refusal("%s of the backward reads it beside a gradient", name_of(node))
    kind = _choice(node, value, kinds) if node.target in _CHOICES else _kind(node, kinds)
    return Refusal("%s of the backward computes with it", name_of(node)) if kind is None else kind


def _behind(value: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graph behind one."""
    while (value := value.next).op != "root":
        yield value


def _is_spread(node: fx.Node, value: fx.Node) -> bool:
    made, read = tensor_of(node), tensor_of(value)
    return made is not None and read is not None and not statically_known_true(made.numel() <= read.numel())


def name_of(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _kind(node: fx.Node, kinds: dict[fx.Node, Dependence]) -> Dependence | None:
    """What an operator makes of its operands' kinds; None of an operator that is not known, or not for these."""
    of = [kinds.get(one) if isinstance(one, fx.Node) else None for one in node.args]
    first, second = (*of, None, None)[:2]
    if is_view(node) or node.target in _COPIES:
        return first
    if is_cast(node):
        return first if node.args[1] in WIDE else None
    if node.target in _BOUNDED:
        return Dependence.BOUNDED
    if node.target is aten.reciprocal.default and _is_one_and_exp(node.args[0]):  # in SiLU's backward, by torch 2.11
        return Dependence.BOUNDED
    rules = ((_PRODUCTS, _product), (_POWERS, _power), (_QUOTIENTS, _quotient), (SUMS, _sum))
    for targets, rule in rules:
        if node.target in targets and not node.kwargs:
            return rule(node, first, second)
    return Dependence.BOUNDED if node.target is aten.exp.default and _decays(node, kinds) else None


def _number(operand: Any) -> float | None:
    """The number that an operand is, also as a tensor of it."""
    if isinstance(operand, fx.Node):
        place = _FILLS.get(operand.target)
        operand = None if place is None else operand.args[place]
    return operand if isinstance(operand, int | float) else None


def _product(node: fx.Node, first: Dependence | None, second: Dependence | None) -> Dependence:
    a, b = node.args[:2]
    if first is None or second is None:
        kind, factor = (second, a) if first is None else (first, b)
        assert kind is not None
        positive = (_number(factor) or 0) > 0
        return Dependence.LINEAR if kind is Dependence.SQUARE and not positive else kind
    if Dependence.BOUNDED in (first, second):
        return Dependence.BOUNDED
    return Dependence.SQUARE if a is b else Dependence.LINEAR


def _power(node: fx.Node, first: Dependence | None, _: Dependence | None) -> Dependence | None:
    power: Any = node.args[1]
    if power < 1 or power != int(power) or first is Dependence.BOUNDED:
        return None
    return Dependence.SQUARE if power % 2 == 0 else first


def _quotient(node: fx.Node, first: Dependence | None, second: Dependence | None) -> Dependence | None:
    if second is None:
        return Dependence.LINEAR if first is Dependence.SQUARE else first
    return Dependence.BOUNDED if _is_one_and_exp(node.args[1]) else None


def _is_one_and_exp(node: Any) -> bool:
    """Whether it is `1 + exp(u)`."""
    sums = isinstance(node, fx.Node) and node.target in SUMS[:2] and not node.kwargs
    return sums and _number(node.args[1]) == 1 and getattr(node.args[0], "target", None) is aten.exp.default


def _sum(node: fx.Node, first: Dependence | None, second: Dependence | None) -> Dependence | None:
    if first is not None and second is not None:
        return Dependence.BOUNDED if Dependence.BOUNDED in (first, second) else Dependence.LINEAR
    other = node.args[1] if second is None else node.args[0]
    kind, number = first or second, _number(other)
    if number is None:
        return Dependence.LINEAR if kind is Dependence.LINEAR and _is_bias(node, other) else None
    above = kind is Dependence.SQUARE and number >= 0 and node.target in SUMS[:2]
    return Dependence.BOUNDED if above or kind is Dependence.BOUNDED else None


def _is_bias(node: fx.Node, other: Any) -> bool:
    """Whether a norm's bias is added, for a copy of a layer's input and nothing else."""
    vector = isinstance(other, fx.Node) and other.op == "placeholder" and tensor_of(other).dim() == 1  # type: ignore[union-attr]
    behind = reached([node], lambda one: one.users if is_view_or_cast(one) or one is node else ())
    return vector and all(one.target in _ENDS for one in behind if not (is_view_or_cast(one) or one is node))


def _choice(node: fx.Node, value: fx.Node, kinds: dict[fx.Node, Dependence]) -> Dependence | None:
    """The kind of a value's rows, of which an index or a mask chooses whole ones."""
    args: Any = node.args
    if node.target is aten.index.Tensor:
        chosen, indices = args
        numbers = [tensor_of(index) for index in indices if index is not None]
        whole = len(indices) < tensor_of(chosen).dim() and all(one.dtype != torch.bool for one in numbers)  # type: ignore[union-attr]
    else:
        mask, (chosen, other) = args[0], args[1:] if args[1] in kinds else args[:0:-1]
        if other in kinds:
            return None if Dependence.BOUNDED in (kinds[chosen], kinds[other]) else Dependence.LINEAR
        whole = _number(other) == 0 and mask not in kinds and _is_one_a_row(mask)
    return kinds[chosen] if whole and chosen in kinds and _has_rows(chosen, value, kinds) else None


def _is_one_a_row(mask: fx.Node) -> bool:
    value = tensor_of(mask)
    assert value is not None
    return value.dim() == 0 or is_one(value.shape[-1]) or statically_known_true(value.stride(-1) == 0)


def _has_rows(node: fx.Node, value: fx.Node, kinds: dict[fx.Node, Dependence]) -> bool:
    """Whether each row of what is computed of a value is of one row of it, as rows lie in memory."""

    def is_by_row(one: fx.Node) -> bool:
        if one.target in _OF_ROWS:
            sizes = [tensor_of(each).shape[-1] for each in (one, one.all_input_nodes[0])]  # type: ignore[union-attr]
            return statically_known_true(sizes[0] == sizes[1])
        by_row = (operator.getitem, *_PARTS, *_CHOICES, *_COPIES)
        return one is value or is_pointwise(one) or one.target in by_row

    between = _between(node, value, kinds)
    order = in_memory_order(tensor_of(value))  # type: ignore[arg-type]
    return order is not None and order[-1] == len(order) - 1 and all(map(is_by_row, between))


def _between(node: fx.Node, value: fx.Node, kinds: dict[fx.Node, Dependence]) -> Iterable[fx.Node]:
    """What is computed of a value for a node, with both."""
    return reached([node], lambda one: () if one is value else [each for each in one.all_input_nodes if each in kinds])


def _decays(exp: fx.Node, kinds: dict[fx.Node, Dependence]) -> bool:
    """Whether it is a sigmoid's exponential, or that of minus a square."""
    argument: Any = exp.args[0]
    if exp.users and all(_is_one_and_exp(user) and _only_divides(user) for user in exp.users):
        return True
    if argument.target not in _PRODUCTS:
        return False
    square, factor = sorted(argument.args[:2], key=lambda one: _number(one) is not None)
    return kinds.get(square) is Dependence.SQUARE and (_number(factor) or 0) < 0


def _only_divides(node: fx.Node) -> bool:
    quotients = (user.target is aten.div.Tensor and user.args[0] is not node for user in node.users)
    return all(
        divides or user.target is aten.reciprocal.default for divides, user in zip(quotients, node.users, strict=True)
    )
