"""What the nodes of a graph compute, in one vocabulary for all graphs: those of Dynamo, whose nodes call functions, methods
and Python's operators, and those of ATen's operators.

`read` says of a node which operator it calls, by one name for all the ways to write it, and of which kind that is. So
``torch.add(a, b)``, ``a + b``, ``a.__add__(b)``, ``a += b`` and ``aten.add_.Tensor`` are "add", the last two in place, and
``x.mT`` is "mT", which Dynamo writes as ``getattr(x, "mT")``. An operator that no list here names has the kind that ATen's
tags give the one of its name. Whether a view shares memory, and whether that was written since, say aliases.py and
writes.py."""

import enum
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from te_inductor.passes.graph.values import is_tensor


class Kind(enum.Flag):
    """What an operator does with the elements of its first operand."""

    OTHER = enum.auto()
    PERMUTE = enum.auto()  # gives its dimensions other places
    RESHAPE = enum.auto()  # splits, merges, adds or removes dimensions
    EXPAND = enum.auto()  # repeats elements along dimensions, in the same memory
    PART = enum.auto()  # takes those at places that stand in the graph; of several results, one
    SAME = enum.auto()  # leaves them all, as `detach` does
    BITS = enum.auto()  # takes their bits for another dtype's
    CAST = enum.auto()  # to another dtype
    COPY = enum.auto()  # to other memory, or as they are
    PRODUCT = enum.auto()  # multiplies matrices
    POINTWISE = enum.auto()  # computes each by itself, with those at its place in other operands
    REDUCE = enum.auto()  # computes one of many
    INDEX = enum.auto()  # takes those that a tensor names
    SCATTER = enum.auto()  # puts others at places that a tensor names
    CHOICE = enum.auto()  # orders them
    FILL = enum.auto()  # makes a tensor of a constant, or of nothing; reads sizes alone
    SIZE = enum.auto()  # reads sizes alone
    VIEW = PERMUTE | RESHAPE | EXPAND | PART | SAME


class Operator(NamedTuple):
    """The operator that a node calls."""

    name: str  # "" of a node that calls none
    kind: Kind = Kind.OTHER
    in_place: bool = False


_NAMED = {
    Kind.PERMUTE: "t T mT H mH numpy_T adjoint transpose permute movedim",
    Kind.RESHAPE: "view view_as reshape reshape_as flatten unflatten unsqueeze squeeze _unsafe_view",
    Kind.EXPAND: "expand expand_as broadcast_to",
    Kind.PART: "getitem select narrow chunk split split_with_sizes tensor_split unbind diagonal unfold",
    Kind.SAME: "detach alias data",
    Kind.CAST: "to type type_as float double half bfloat16 long int short char byte bool _to_copy convert_element_type",
    Kind.COPY: "contiguous clone lift_fresh_copy",
    Kind.PRODUCT: "linear matmul rmatmul mm bmm mv addmm baddbmm addbmm addmv einsum tensordot inner bilinear chain_matmul"
    " multi_dot linalg_multi_dot _grouped_mm grouped_mm grouped_mm_fallback",
    # What ATen's tags do not say of operators of these names.
    Kind.POINTWISE: "rsub rtruediv floordiv rfloordiv mod rmod rpow and or xor invert not",
    Kind.INDEX: "index index_select gather take_along_dim embedding",
    Kind.SCATTER: "scatter scatter_add index_add index_put setitem",
    Kind.CHOICE: "topk sort argsort",
    Kind.FILL: "zeros ones full empty arange zeros_like ones_like full_like empty_like new_zeros new_ones new_full"
    " new_empty",
    Kind.SIZE: "size shape dim numel",
}
_KINDS = {name: kind for kind, names in _NAMED.items() for name in names.split()}
_SYNONYMS = {
    **dict.fromkeys("truediv true_divide divide".split(), "div"),
    **dict.fromkeys("swapaxes swapdims".split(), "transpose"),
    **dict.fromkeys("concat concatenate".split(), "cat"),
    "floor_divide": "floordiv",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
    "moveaxis": "movedim",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_get_data_attr": "data",
    "radd": "add",
    "rmul": "mul",
}
_ATTRIBUTES = frozenset("T mT H mH data shape".split())
# Python's operators that have a form in place, as its modules and methods call them, and those that are named as if.
_PYTHON = frozenset("add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split())
RESERVED = frozenset("and_ or_ not_ is_".split())
# Operators whose gradient needs no operand, and those whose gradient needs the other one.
LINEAR = frozenset("add sub rsub neg sum mean cat stack gather index_select".split())
BILINEAR = frozenset("mul div".split())


def name(node: fx.Node) -> str:
    """The name of the function or method that a node calls, as it is written, without an overload's."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(target).partition(".")[0]


def read(node: Any) -> Operator:
    """The operator that a node calls; one without a name of anything that calls none."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return Operator("")
    called = name(node)
    if called == "getattr":
        attribute = str(node.args[1])
        return _named(attribute) if attribute in _ATTRIBUTES else Operator(attribute)
    found = _named(called)
    if found.kind is Kind.RESHAPE and any(isinstance(one, torch.dtype) for one in (*node.args, *node.kwargs.values())):
        return found._replace(kind=Kind.BITS)
    if found.name == "getitem" and _is_chosen(node.args[1]):
        return found._replace(kind=Kind.INDEX)
    return found._replace(in_place=True) if node.kwargs.get("inplace") is True else found


def _is_chosen(index: Any) -> bool:
    """Whether a tensor, or a sequence of numbers, says which elements."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | tuple) or is_tensor(part) for part in parts)


@functools.cache
def _named(called: str) -> Operator:
    in_place, plain = False, called
    if called.startswith("__") and called.endswith("__"):
        plain = called.strip("_")
        plain = plain[1:] if f"{plain[1:]}_" in RESERVED else plain  # `__rand__`, which is no `torch.rand`
    elif called in RESERVED:
        plain = called.removesuffix("_")
    elif called.endswith("_"):
        in_place, plain = True, called.removesuffix("_")
    if plain.startswith("i") and plain[1:] in _PYTHON:
        in_place, plain = True, plain[1:]
    plain = _SYNONYMS.get(plain, plain)
    kind = _KINDS.get(plain) or _tagged(plain)
    if in_place and kind in Kind.VIEW:  # which leaves the values, and changes what the tensor is of them
        kind = Kind.OTHER
    return Operator(plain, kind, in_place or plain == "setitem")


def _tagged(plain: str) -> Kind:
    packet = getattr(torch.ops.aten, plain, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return Kind.OTHER
    tags = getattr(packet, packet.overloads()[0]).tags
    if torch.Tag.pointwise in tags:
        return Kind.POINTWISE
    return Kind.REDUCE if torch.Tag.reduction in tags else Kind.OTHER


def order(node: Any) -> list[int] | None:
    """The operand's dimension that each one of a permutation is; None of any other node, and where a run alone can tell."""
    called, kind, _ = read(node)
    made = node.meta.get("example_value", node.meta.get("val")) if kind is Kind.PERMUTE else None
    if not isinstance(made, torch.Tensor):
        return None
    found = list(range(made.dim()))
    if called in ("t", "T", "numpy_T", "H"):
        return found[::-1]
    given = [*node.args[1:], *node.kwargs.values()] if called in ("transpose", "permute", "movedim") else [-2, -1]
    dims = [[dim % len(found) for dim in ints(one)] for one in given]
    if called == "permute":
        flat = [dim for part in dims for dim in part]
        return flat if len(flat) == len(found) else None
    if len(dims) != 2 or len(dims[0]) != len(dims[1]) or not dims[0]:
        return None
    if called == "movedim":
        rest = [dim for dim in found if dim not in dims[0]]
        for to, dim in sorted(zip(dims[1], dims[0], strict=True)):
            rest.insert(to, dim)
        return rest
    [first], [second] = dims
    found[first], found[second] = found[second], found[first]
    return found


def swaps(node: Any) -> bool | None:
    """Whether a permutation swaps the last two dimensions, or none; None of other permutations, and of other nodes."""
    found = order(node)
    if found is None or len(found) < 2 or found[:-2] != list(range(len(found) - 2)):
        return None
    return found[-2] > found[-1]


def ints(given: Any) -> list[int]:
    """The numbers of an argument that is one or several; none of nodes."""
    parts = given if isinstance(given, Sequence) else [given]
    return [one for one in parts if isinstance(one, int)]


def arguments(node: fx.Node, *names: str | tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a call by their names, which they have in this order; of several names for one, as releases and
    overloads give it, by the first. Those that the call leaves out are missing, and those of other names stay."""
    known = [(one,) if isinstance(one, str) else one for one in names]
    first = {other: own for own, *others in known for other in others}
    given = dict(zip((own for own, *_ in known), node.args, strict=False))
    return given | {first.get(called, called): one for called, one in node.kwargs.items()}


# Products by one name each, whether they come as a function or as a method, with the names of their operands in order.
_FUNCTIONS: dict[Any, str] = {
    torch._C._nn.linear: "linear",
    torch.nn.functional.linear: "linear",
    torch.ops.aten.linear.default: "linear",  # of calls that passes have opened, and of exported programs, as the next are
    torch.ops.aten.matmul.default: "matmul",
    torch.ops.aten.mm.default: "mm",
    torch.ops.aten.addmm.default: "addmm",
    torch.ops.aten.bmm.default: "bmm",
    torch.matmul: "matmul",
    torch.linalg.matmul: "matmul",
    torch.mm: "mm",
    torch.addmm: "addmm",
    torch.bmm: "bmm",
    operator.matmul: "matmul",
}
_OPERANDS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "addmm": ("input", "mat1", "mat2"),
    "bmm": ("input", "mat2"),
}
GROUPED = frozenset(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"))


@dataclass(frozen=True)
class Call:
    """A node read as a product of one matrix with another, or of batches of them."""

    name: str
    operands: dict[str, Any]
    options: dict[str, Any]  # keyword arguments that are no operands, such as alpha

    @staticmethod
    def read(node: fx.Node) -> "Call | None":
        if node.op == "call_function":
            name = _FUNCTIONS.get(node.target)
        elif node.op == "call_method" and node.target in _OPERANDS and node.target != "linear":
            name = str(node.target)
        else:
            return None
        if name is None or "out" in node.kwargs:
            return None
        given = arguments(node, *_OPERANDS[name])
        options = {key: given.pop(key) for key in given.keys() - {*_OPERANDS[name]}}
        return Call(name, given, options)


def grouped_operands(node: fx.Node) -> dict[str, Any]:
    """The operands of a grouped product, by the names `x`, `weight`, `offs`, `bias` and `out_dtype`; none of another
    node."""
    if node.op != "call_function" or name(node) not in GROUPED:
        return {}
    return arguments(node, ("x", "input", "self", "mat_a"), ("weight", "mat2", "mat_b"), "offs", "bias", "out_dtype")
