"""What a forward saves for its backward, and which of it may be saved in E4M3.

A value may where nothing but the backward's arithmetic on single elements reads it, of a kind that carries a relative
error on as one of the same size: products, and functions such as SiLU and GELU. Its error is half a step of E4M3, or of
the block's scale where it is much smaller than the block's largest.

# Note [Functions that bear a relative error]
The walk over what the backward computes of a value, before a gradient comes into it, knows three kinds. LINEAR is the
value itself times what does not depend on it, or a power of it. SQUARE is an even power of it times a number above
zero. BOUNDED is what sigmoid, tanh or erf make of it, and combinations with these: the derivative decays where the
value grows, so that its error stays within that of the value. Operators that are not listed are refused, as each of
these would give other numbers:
- comparisons, signs, rounding and ties: the derivative of ReLU asks whether a value is above zero, and E4M3 has zeros
  where the value has none. One comparison is known: of ReLU's output with zero, where what it masks has that output as
  a factor, as in a squared ReLU's backward. Where the output is rounded to zero, the factor is zero too;
- a division by the value, its logarithm or square root: by such a zero;
- a difference with what is no function of it: of a large value that leaves its error alone, as LayerNorm's deviation
  from the mean or a loss's from its target. Where all readers read the difference, that is saved in the value's place;
- exponentials, sines: an error of a large argument is a factor of the result. `1 / (1 + exp(-x))` is a sigmoid, and
  `exp(-x^2)` decays;
- products of matrices, softmax, attention, normalization over rows: these add up errors, or rely on sums.

A choice of rows, by an index or by a mask that puts zeros in the place of the others, keeps their kind: experts' rows
that a token's gradient meets, or that belong to a group. A choice of single elements is refused: what is infinite or
NaN makes its whole block NaN, where a mask that leaves it out keeps the gradients of its neighbours.

Layers' inputs are computed again in the backward of such a value, and cast from it: that is one more rounding.

What a checkpoint computes again may be any function: `saved_checkpoints`."""

import enum
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.aliases import origins
from te_inductor.passes.graph.casts import QUANTIZE
from te_inductor.passes.graph.node_kinds import (
    is_as_large,
    is_cast,
    is_pointwise,
    is_view,
    is_view_or_cast,
    tensor_of,
)
from te_inductor.passes.graph.values import bytes_of
from te_inductor.passes.graph.walks import back_past, reached
from te_inductor.passes.joint.saved_checkpoints import Recomputation, is_computed_again
from te_inductor.recipes import Quantizer

aten = torch.ops.aten
QUANTIZER = Quantizer("e4m3", power_2_scale=True, scope="1x128")
MOST = 0.75  # bytes with scales, of what the value takes: less of a gain is not worth an error
_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_COPIES = (aten.clone.default, aten.alias.default, aten.neg.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_COMPARISONS = (aten.le.Scalar, aten.gt.Scalar)
_SUMS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
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
_SAME = (*_COPIES[:2], *_OF_ROWS)
_PARTS = (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)
_BOUNDED = (aten.sigmoid.default, aten.tanh.default, aten.erf.default, aten.erfc.default)
_FILLS: dict[Any, int] = {aten.full.default: 1, aten.scalar_tensor.default: 0}  # with the place of the number
_ENDS = QUANTIZE | {ops.quantize_groups, ops.transpose_groups}  # copies of a layer's input


class Dependence(enum.Enum):
    """What the backward has made of a value: Note [Functions that bear a relative error]."""

    LINEAR = enum.auto()
    SQUARE = enum.auto()
    BOUNDED = enum.auto()
    SIGN = enum.auto()  # whether ReLU's output, which the value is, is above zero


@dataclass(frozen=True)
class Saved:
    """One value that a forward saves for its backward."""

    node: fx.Node  # an output of the forward
    read: (
        fx.Node
    )  # what is cast in its place: of the backward, the input of the same name, or what alone is computed of it
    source: fx.Node  # and of the forward
    refusal: Refusal | None = None  # why it is saved as it is

    @property
    def value(self) -> torch.Tensor:
        return self.source.meta["val"]  # type: ignore[no-any-return]

    @property
    def order(self) -> list[int]:
        """Its dimensions as they lie in memory, the last one with neighbours side by side."""
        return in_memory_order(self.value) or list(range(self.value.dim()))

    @property
    def bytes_before(self) -> int:
        return bytes_of(self.node.meta["val"])

    @property
    def bytes_after(self) -> int:
        return self.bytes_before if self.refusal is not None else _bytes_cast(self.value)


def decide(
    forward: fx.Graph, backward: fx.Graph, results: int, refuse: Callable[[fx.Node], Refusal | None]
) -> list[Saved]:
    """The values that a forward saves behind its `results` first outputs, in floating point and wider than a byte;
    `refuse` says what the options say of a node of the forward. Inputs are in memory anyway."""
    outputs = _outputs(forward)
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    later = set(reached([node for name, node in inputs.items() if "tangent" in name], lambda node: node.users))
    known = {node.name: node for node in forward.nodes}
    held = _memory(outputs[:results])
    saved = (node for node in outputs[results:] if isinstance(node, fx.Node) and node.op != "placeholder")
    nodes = [node for node in saved if _is_wide(node) and node.name in inputs]
    reads = {node: _last_alone(inputs[node.name], later, known) for node in nodes}
    found: dict[fx.Node, Saved] = {}
    cast: set[fx.Node] = set()  # what the backward need not compute
    for node in sorted(nodes, key=lambda node: reads[node].op == "placeholder"):
        read = reads[node]
        source = known[read.name]
        refusal = refuse(source) or _held(node, held) or _of_sizes(source, backward) or _of_origin(node)
        refusal = refusal or _of_readers(read, source, later, cast)
        found[node] = Saved(node, read, source, refusal)
        cast |= {read} if refusal is None else set()
    return list(_together([found[node] for node in nodes]))


def _outputs(graph: fx.Graph) -> list[Any]:
    [output] = graph.find_nodes(op="output")
    return list(output.args[0])  # type: ignore[arg-type]


def _is_wide(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype in _WIDE and value.dim() > 0


def _memory(nodes: Sequence[Any]) -> set[Any]:
    return {place for node in nodes if isinstance(node, fx.Node) for place in origins(node)}


def _held(node: fx.Node, held: set[Any]) -> Refusal | None:
    if back_past(node, is_view).op in ("placeholder", "get_attr"):
        return Refusal("it is a view of an input of the graph, which its caller holds")
    if origins(node) & held:
        return Refusal("the graph returns it, or a tensor in the same memory")
    return None


def _of_sizes(source: fx.Node, backward: fx.Graph) -> Refusal | None:
    value = tensor_of(source)
    assert value is not None
    if not isinstance(value.shape[-1], int) or in_memory_order(value) is None:
        return Refusal("the size of its last dimension, or its order in memory, is not known before it runs")
    unknown = [size for size in value.shape if not isinstance(size, int) and size_node(size, backward) is None]
    if len(unknown) > 1:
        return Refusal("several of its sizes are not known before it runs")
    if _bytes_cast(value) > MOST * bytes_of(value):
        last = value.shape[in_memory_order(value)[-1]]  # type: ignore[index]
        return Refusal("rows of %s values take as many bytes with a scale for each 128 of them", last)
    return None


def in_memory_order(value: torch.Tensor) -> list[int] | None:
    """The dimensions by their strides, the longest first; None where two may be the same memory, or strides are not
    known."""
    if any(statically_known_true(stride == 0) for stride in value.stride()):
        return None
    order = list(range(value.dim()))
    for a, b in itertools.combinations(order, 2):
        if not statically_known_true(value.stride(a) >= value.stride(b)) and not _is_one(
            value.shape[a], value.shape[b]
        ):
            break
    else:
        return order
    if not all(isinstance(stride, int) for stride in value.stride()):
        return None
    return sorted(order, key=lambda dim: value.stride()[dim], reverse=True)


def _is_one(*sizes: Any) -> bool:
    return any(statically_known_true(size == 1) for size in sizes)


def size_node(size: Any, graph: fx.Graph) -> fx.Node | None:
    """The input of a graph that is a symbolic size."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return node
    return None


def _bytes_cast(value: torch.Tensor) -> int:
    """What codes and scales take."""
    order = in_memory_order(value)
    columns = value.shape[-1] if order is None else value.shape[order[-1]]
    rows = bytes_of(value) // value.itemsize // max(columns, 1)
    data = rows * QUANTIZER.stored(columns)
    return data + 4 * data // QUANTIZER.granularity.block[1]


def _of_origin(node: fx.Node) -> Refusal | None:
    """Softmax relies on its rows adding up to one."""
    node = back_past(node, is_view_or_cast)
    if node.target in (aten._softmax.default, aten._log_softmax.default):
        return Refusal("it is a softmax, whose gradient relies on sums of one")
    if node.target is aten.div.Tensor and isinstance(node.args[1], fx.Node):
        below = reached([node.args[1]], lambda one: one.all_input_nodes if is_view_or_cast(one) else ())
        if any(one.target is aten.sum.dim_IntList and node.args[0] in one.all_input_nodes for one in below):
            return Refusal("it is a softmax, whose gradient relies on sums of one")
    return None


def _last_alone(node: fx.Node, later: set[fx.Node], known: dict[str, fx.Node]) -> fx.Node:
    """The last of a chain of functions of single elements, each of which alone reads the one before, that the forward
    computes too: what is saved in the place of the first. Casts and views at its end are left to the backward."""
    chain = [node]
    while len(chain[-1].users) == 1:
        [user] = chain[-1].users
        others = [one for one in user.all_input_nodes if one is not chain[-1]]
        computed = user not in later and (is_pointwise(user) or is_view(user))
        if not computed or not all(_is_known(one, known) for one in (user, *others)) or not is_as_large(user, node):
            break
        chain.append(user)
    while len(chain) > 1 and is_view_or_cast(chain[-1]):
        narrower = tensor_of(chain[-1]).itemsize < tensor_of(chain[-2]).itemsize  # type: ignore[union-attr]
        if narrower and not all(is_view_or_cast(one) for one in chain[1:]):
            break
        chain.pop()
    return chain[-1]


def _is_known(node: fx.Node, known: dict[str, fx.Node]) -> bool:
    return node.name in known and (node.op == "placeholder" or known[node.name].target == node.target)


def _is_of_relu(node: fx.Node) -> bool:
    return back_past(node, is_view_or_cast).target is aten.relu.default


def _of_readers(value: fx.Node, source: fx.Node, later: set[fx.Node], cast: set[fx.Node]) -> Refusal | None:
    """Why what reads a value does not bear its error, if a checkpoint does not compute it again."""
    refusal = _of_functions(value, source, later, cast, None)
    if refusal is None or not any(map(is_computed_again, value.users)):
        return refusal
    return _of_functions(value, source, later, cast, Recomputation(value, source, later))


def _of_functions(
    value: fx.Node, source: fx.Node, later: set[fx.Node], cast: set[fx.Node], again: Recomputation | None
) -> Refusal | None:
    """Note [Functions that bear a relative error]"""
    kinds, of_relu = {value: Dependence.LINEAR}, _is_of_relu(source)
    for node in _behind(value):
        if again is not None and node not in cast and again.reads(node, kinds):
            refusal = again.add(node)
            if refusal is not None:
                return refusal
            continue
        operands = [one for one in node.all_input_nodes if one in kinds]
        if not operands or node in cast or (node.target in _ENDS and node not in later):
            continue
        if node.op != "call_function":
            return Refusal("the backward returns it")
        if _is_spread(node, value):
            return Refusal("the backward spreads it over a larger tensor")
        if node in later:
            if not _is_factor(node, operands, kinds) and not _is_masked(node, value, kinds):
                return Refusal("%s of the backward reads it beside a gradient", _name(node))
            continue
        if node.target in _COMPARISONS or Dependence.SIGN in map(kinds.get, operands):
            kind = Dependence.SIGN if of_relu and _is_sign(node, value) else None
        else:
            kind = _choice(node, value, kinds) if node.target in _CHOICES else _kind(node, kinds)
        if kind is None:
            return Refusal("%s of the backward computes with it", _name(node))
        kinds[node] = kind
    return None


def _behind(value: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graph behind one."""
    while (value := value.next).op != "root":
        yield value


def _is_spread(node: fx.Node, value: fx.Node) -> bool:
    made, read = tensor_of(node), tensor_of(value)
    return made is not None and read is not None and not statically_known_true(made.numel() <= read.numel())


def _is_factor(node: fx.Node, operands: Sequence[fx.Node], kinds: dict[fx.Node, Dependence]) -> bool:
    """Whether a gradient is multiplied by what comes of the value."""
    return node.target in _PRODUCTS and len(operands) == 1 and kinds[operands[0]] is not Dependence.SIGN


def _is_masked(node: fx.Node, value: fx.Node, kinds: dict[fx.Node, Dependence]) -> bool:
    """Whether the value's sign masks gradients of which the value is a factor, element by element."""

    def is_factor(one: fx.Node) -> bool:
        in_places = all(each is value or _is_same(each) or is_pointwise(each) for each in _between(one, value, kinds))
        return kinds.get(one) in (Dependence.LINEAR, Dependence.SQUARE) and in_places

    def is_multiple(gradient: fx.Node) -> bool:
        operands = gradient.all_input_nodes
        if gradient.target in _PRODUCTS:
            return any(is_factor(one) or is_multiple(one) for one in operands)
        passes = _is_same(gradient) or (gradient.target in _SUMS and len(operands) == 2)
        return _number(gradient) == 0 or (passes and all(map(is_multiple, operands)))

    of = [kinds[one] for one in node.all_input_nodes if one in kinds]
    masks = node.target is aten.where.self and of == [Dependence.SIGN]
    return masks and all(map(is_multiple, node.all_input_nodes[1:]))


def _is_same(node: fx.Node) -> bool:
    """Whether it has the elements of its one operand, in their order."""
    return is_cast(node) or node.target in _SAME


def _is_sign(node: fx.Node, value: fx.Node) -> bool:
    """Whether it compares the value with zero, or has the elements of such a comparison."""
    compares = back_past(node, _is_same)
    if compares.target not in _COMPARISONS or compares.args[1] != 0:
        return False
    return back_past(compares.all_input_nodes[0], lambda one: one is not value and _is_same(one)) is value


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _kind(node: fx.Node, kinds: dict[fx.Node, Dependence]) -> Dependence | None:
    """What an operator makes of its operands' kinds; None of an operator that is not known, or not for these."""
    of = [kinds.get(one) if isinstance(one, fx.Node) else None for one in node.args]
    first, second = (*of, None, None)[:2]
    if is_view(node) or node.target in _COPIES:
        return first
    if is_cast(node):
        return first if node.args[1] in _WIDE else None
    if node.target in _BOUNDED:
        return Dependence.BOUNDED
    if node.target is aten.reciprocal.default and _is_one_and_exp(node.args[0]):  # in SiLU's backward, by torch 2.11
        return Dependence.BOUNDED
    rules = ((_PRODUCTS, _product), (_POWERS, _power), (_QUOTIENTS, _quotient), (_SUMS, _sum))
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
    sums = isinstance(node, fx.Node) and node.target in _SUMS[:2] and not node.kwargs
    return sums and _number(node.args[1]) == 1 and getattr(node.args[0], "target", None) is aten.exp.default


def _sum(node: fx.Node, first: Dependence | None, second: Dependence | None) -> Dependence | None:
    if first is not None and second is not None:
        return Dependence.BOUNDED if Dependence.BOUNDED in (first, second) else Dependence.LINEAR
    other = node.args[1] if second is None else node.args[0]
    kind, number = first or second, _number(other)
    if number is None:
        return Dependence.LINEAR if kind is Dependence.LINEAR and _is_bias(node, other) else None
    above = kind is Dependence.SQUARE and number >= 0 and node.target in _SUMS[:2]
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
        whole = _number(other) == 0 and mask not in kinds and _is_one_a_row(mask)
    return kinds[chosen] if whole and chosen in kinds and _has_rows(chosen, value, kinds) else None


def _is_one_a_row(mask: fx.Node) -> bool:
    value = tensor_of(mask)
    assert value is not None
    return value.dim() == 0 or _is_one(value.shape[-1]) or statically_known_true(value.stride(-1) == 0)


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


def _together(found: Sequence[Saved]) -> Iterator[Saved]:
    """Memory is let go of where all that is saved of it is cast."""
    refused = _memory([one.node for one in found if one.refusal is not None])
    for one in found:
        partly = one.refusal is None and origins(one.node) & refused
        why = Refusal("another part of its memory is saved as it is") if partly else one.refusal
        yield one if why is one.refusal else Saved(one.node, one.read, one.source, why)
