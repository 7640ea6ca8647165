"""Attention that a model writes out: products, a scale, a soft cap, masks, sinks, a softmax.

A sink is one more score of each head, which takes a part of the weights and has no value: gpt-oss concatenates it to the
scores and drops its weight. With Z the sum of the exponentials of the other scores, what is left of the output is
``Z / (Z + exp(sink))``, the sigmoid of ``log Z - sink``."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.pre_grad.attention import added
from te_inductor.passes.pre_grad.attention.added import Added
from te_inductor.passes.pre_grad.attention.expressions import number
from te_inductor.passes.pre_grad.attention.formulas import Reader
from te_inductor.passes.pre_grad.attention.masks import Scores

_CASTS = frozenset("to type type_as float half bfloat16".split())
_PRODUCTS = frozenset("matmul bmm".split())


@dataclass
class Written:
    """The parts of attention that ends in a product with v."""

    q: fx.Node  # (B, H, L, D)
    k: fx.Node  # (B, H, S, D)
    v: fx.Node  # (B, H, S, D of v)
    scale: float = 1.0
    softcap: float | None = None
    sinks: fx.Node | None = None  # that broadcasts to (B, H, L, 1)
    added: Added = field(default_factory=Added)
    dropout: float = 0.0
    given: fx.Node | None = None  # a mask, whose shape has the sizes
    read: list[fx.Node] = field(default_factory=list)  # the nodes that read q, k and sinks


def match(product: fx.Node, reader: Reader) -> Written | None:
    """The attention that ends in a product; None where it does not, or where something else reads what is inside."""
    if name(product) not in _PRODUCTS or len(product.args) != 2 or not all(map(is_tensor, product.args)):
        return None
    weights, v = product.args
    if value(v).dim() != 4:  # type: ignore[arg-type]
        return None
    walk = _Walk(product)
    node = walk.back(weights, _CASTS)
    node, dropout = walk.without_dropout(node)
    node = walk.back(node, _CASTS)
    has_sinks = node is not None and _drops_last(node)
    node = walk.step(node, 0) if has_sinks else node
    softmax = node
    if softmax is None or name(softmax) != "softmax" or not _is_last(_argument(softmax, 1, "dim"), softmax):
        return None
    node = walk.step(softmax, 0)
    found = Written(v, v, v, dropout=dropout)  # type: ignore[arg-type]
    if has_sinks:
        node = _without_largest(node, walk)
        if node is None or name(node) != "cat" or not _is_last(_argument(node, 1, "dim"), node):
            return None
        pieces = _argument(node, 0, "tensors")
        if len(pieces) != 2 or not statically_known_true(value(pieces[1]).shape[-1] == 1):
            return None
        found.sinks = pieces[1]
        found.read.append(node)
        node = walk.into(pieces[0])
    return _scores(node, found, walk, reader)


def _scores(node: fx.Node | None, found: Written, walk: "_Walk", reader: Reader) -> Written | None:
    """What is done to the product of q and k, the last first: masks, a bias, a soft cap, scales."""
    node = walk.back(node, _CASTS)
    if node is None:
        return None
    scores = Scores.of(value(node), value(node).shape[-1])
    while node is not None and name(node) not in _PRODUCTS:
        changed = _masked(node, scores, reader)
        if changed is not None:
            part, operand, given = changed
            if part.bias is not None and found.softcap is not None:
                return None
            if part.hides and (found.scale != 1.0 or found.softcap is not None):
                return None  # of the number that hides a score
            if part.replaces and found.added.bias is not None:
                return None  # which is added to the number in a score's place
            part.scale = found.scale
            merged, found.given = found.added.merged(part), found.given or given
            if merged is None:
                return None
            found.added = merged
            node = walk.back(walk.into(operand), _CASTS)
        elif found.scale == 1.0 and found.softcap is None and _is_softcap(node):
            node = _softcap(node, found, walk)
        else:
            node = _scaled(node, found, walk)
    if node is None or not all(map(is_tensor, node.args)) or len(node.args) != 2:
        return None
    found.q, turned = node.args  # type: ignore[assignment]
    if value(found.q).dim() != 4 or not _turns(turned):
        return None
    found.k = turned.args[0]  # type: ignore[union-attr, assignment]
    found.read.append(node)
    dtype = value(found.v).dtype
    found.q, found.k = _uncast(found.q, dtype, found.read), _uncast(found.k, dtype, found.read)
    dtypes = {value(one).dtype for one in (found.q, found.k, found.v, walk.end)}
    return found if walk.is_closed() and len(dtypes) == 1 else None


def _scaled(node: fx.Node, found: Written, walk: "_Walk") -> fx.Node | None:
    """What a node multiplies by a number, or divides."""
    if name(node) not in ("mul", "truediv", "div"):
        return None
    by = next((number(one) for one in node.args if not is_tensor(one)), None)
    if by is None or not by.is_number or not is_tensor(node.args[0]) or node.kwargs:
        return None
    found.scale *= float(by) if name(node) == "mul" else 1 / float(by)
    return walk.back(walk.step(node, 0), _CASTS)


def _masked(node: fx.Node, scores: Scores, reader: Reader) -> tuple[Added, Any, Any] | None:
    """What a node adds to scores or puts in their places, the scores, and the mask."""
    operands = [one for one in node.args if is_tensor(one)]
    if name(node) == "add" and len(operands) == 2 and not node.kwargs:
        for operand, mask in (operands, operands[::-1]):
            if value(mask).dtype != torch.bool and value(mask).dim() <= 4 and _is_of_scores(operand):
                found = added.read(mask, reader, scores)  # type: ignore[arg-type]
                return (found, operand, mask) if isinstance(found, Added) else None
        return None
    hidden = added.hidden_by(node, scores, reader)
    if hidden is None or value(hidden[2]).dim() != 4 or value(node).shape != value(hidden[2]).shape:
        return None
    predicate, smallest, scored = hidden
    given = node.args[1 if name(node) == "masked_fill" else 0]
    return Added(predicate, [smallest], replaces=True), scored, given


_OF_SCORES = frozenset("add mul truediv div masked_fill where tanh".split()) | _CASTS


def _is_of_scores(node: Any) -> bool:
    """Whether a node is computed, element by element, from the product of q and k."""
    while is_tensor(node) and name(node) in _OF_SCORES:
        turns = name(node) == "where" or (name(node) == "add" and not _is_of_scores(node.args[0]))
        node = node.args[1 if turns else 0]
    return is_tensor(node) and name(node) in _PRODUCTS and len(node.args) == 2 and _turns(node.args[1])


def _is_softcap(node: fx.Node) -> bool:
    return name(node) == "mul" and is_tensor(node.args[0]) and name(node.args[0]) == "tanh"


def _softcap(node: fx.Node, found: Written, walk: "_Walk") -> fx.Node | None:
    """What ``tanh(scores / cap) * cap`` is made of."""
    cap, tanh = number(node.args[1]), walk.step(node, 0)
    inner = walk.step(tanh, 0)
    if cap is None or inner is None or name(inner) not in ("truediv", "div") or number(inner.args[1]) != cap:
        return None
    found.softcap = float(cap)
    return walk.back(walk.step(inner, 0), _CASTS)


def _without_largest(node: fx.Node | None, walk: "_Walk") -> fx.Node | None:
    """What ``x - x.max(-1, keepdim=True).values`` is made of: a softmax does not see the difference."""
    if node is None or name(node) != "sub" or not is_tensor(node.args[1]):
        return node
    largest: Any = node.args[1]
    scores = node.args[0]
    if name(largest) == "getitem" and largest.args[1] == 0:
        walk.seen.append(largest)
        largest = largest.args[0]
    if not isinstance(largest, fx.Node) or name(largest) not in ("max", "amax") or largest.args[0] is not scores:
        return None
    walk.seen.append(largest)
    return walk.into(scores)


def _drops_last(node: fx.Node) -> bool:
    index = node.args[1] if name(node) == "getitem" else None
    return (
        isinstance(index, tuple)
        and index[-1] == slice(None, -1, None)
        and all(one is Ellipsis or one == slice(None, None, None) for one in index[:-1])
    )


def _turns(node: Any) -> bool:
    """Whether a node swaps the last two dimensions of k."""
    if not is_tensor(node) or value(node).dim() != 4:
        return False
    if name(node) == "transpose":
        return sorted(dim % 4 for dim in node.args[1:]) == [2, 3]  # type: ignore[operator]
    return name(node) in ("mT", "adjoint") or (name(node) == "getattr" and node.args[1] == "mT")


def _uncast(node: fx.Node, dtype: torch.dtype, read: list[fx.Node]) -> fx.Node:
    """What q or k was before it was cast to fp32: a kernel multiplies it as exactly."""
    if name(node) in _CASTS and value(node).dtype is torch.float32 and is_tensor(node.args[0]):
        source: Any = node.args[0]
        if value(source).dtype is dtype and value(source).device == value(node).device:
            read.append(node)
            return source
    return node


def _is_last(dim: Any, node: fx.Node) -> bool:
    return isinstance(dim, int) and (dim == -1 or dim == value(node).dim() - 1)


def _argument(node: fx.Node, place: int, called: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(called)


class _Walk:
    """The way back from a product to its operands."""

    def __init__(self, end: fx.Node) -> None:
        self.end, self.seen = end, list[fx.Node]()

    def into(self, node: Any) -> fx.Node | None:
        if not is_tensor(node):
            return None
        self.seen.append(node)
        return node

    def step(self, node: fx.Node | None, place: int) -> fx.Node | None:
        if node is None or place >= len(node.args):
            return None
        return self.into(node.args[place])

    def back(self, node: Any, names: frozenset[str]) -> fx.Node | None:
        """Goes back past all of these operations."""
        node = node if node in self.seen else self.into(node)
        while node is not None and name(node) in names:
            node = self.step(node, 0)
        return node

    def without_dropout(self, node: fx.Node | None) -> tuple[fx.Node | None, float]:
        """Goes past a dropout, and says how much it drops."""
        if node is None or name(node) != "dropout":
            return node, 0.0
        p, training = _argument(node, 1, "p"), _argument(node, 2, "training")
        if training is False or p == 0.0:
            return self.step(node, 0), 0.0
        drops = isinstance(p, float) and training in (None, True) and not _argument(node, 3, "inplace")
        return (self.step(node, 0), p) if drops else (None, 0.0)

    def is_closed(self) -> bool:
        """Whether nothing outside reads what is inside."""
        inside = {*self.seen, self.end}
        return all(user in inside for node in self.seen for user in node.users)
