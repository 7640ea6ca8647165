"""Attention that a model writes out: products, a scale, a soft cap, masks, sinks, a softmax.

A sink is one more score of each head, which takes a part of the weights and has no value: gpt-oss concatenates it to the
scores and drops its weight. With Z the sum of the exponentials of the other scores, what is left of the output is
``Z / (Z + exp(sink))``, the sigmoid of ``log Z - sink``.

Scores may have three dimensions, of (batch * heads, L, S), where a model multiplies by `bmm` and `baddbmm`; how many heads
there are is then read from where it views them as four. They may be written in place: a node is then read as what wrote
it last before its reader."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.module_path import module_path
from te_inductor.passes.graph.node_kinds import has_shape
from te_inductor.passes.graph.operators import Kind, name
from te_inductor.passes.graph.tracing import method
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.writes import Writes, written_by
from te_inductor.passes.pre_grad.attention import added
from te_inductor.passes.pre_grad.attention.added import Added, Hiding
from te_inductor.passes.pre_grad.attention.expressions import is_one, number
from te_inductor.passes.pre_grad.attention.formulas import Reader
from te_inductor.passes.pre_grad.attention.masks import Scores
from te_inductor.passes.pre_grad.attention.site import Attention, AttentionCall

# What scores and weights go through, beside what computes each element by itself.
_THROUGH = Kind.POINTWISE | Kind.CAST | Kind.COPY | Kind.RESHAPE | Kind.PART
_OTHERS = frozenset("softmax dropout cat max".split())
_LEAST_SCALE = 2.0**-8  # by which a mask's smallest number still hides a score


def match(product: fx.Node, reader: Reader, writes: Writes) -> tuple[Attention, Sequence[fx.Node]] | None:
    """The attention that ends in a product, and the nodes that read its operands; None where it does not. It has a refusal
    where something is done to its scores that is not read, or where something else reads what is inside."""
    last = _Product.read(product)
    left, right = _factors(product) if last is None else (last.left, last.right)
    path = None if last is not None and last.added is not None else _path(left, {})
    if path is None or not any(name(node) == "softmax" for node in path):
        return None
    first = _Product.read(path[-1])
    if last is None or first is None:
        by_einsum = any(operators.read(one).name == "einsum" for one in (product, path[-1]))
        why = "its products are written as einsum" if by_einsum else "its products are none of three or four dimensions"
        return _site(product, left, left, right, refusal=Refusal(why)), ()
    site = _site(product, first.left, first.right, last.right)
    walk = _Walk(site, writes, path)
    try:
        with product.graph.inserting_before(product):
            _weights(walk.into(last.left, product), walk, reader)
        if not walk.is_closed():
            raise _Unread("something else reads its scores or its weights")
        if not walk.learns():
            raise _Unread("a part of it is computed where gradients are off")
    except _Unread as stop:
        site.refusal = stop.refusal
    return site, walk.read


def _site(product: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node, refusal: Refusal | None = None) -> Attention:
    return Attention(AttentionCall(product, q, k, v), module_path(product), by_hand=True, refusal=refusal)


class _Unread(Exception):
    """What a node does to scores or weights is not read; or another reason not to."""

    def __init__(self, why: fx.Node | Refusal | str) -> None:
        if isinstance(why, fx.Node):
            why = Refusal("%s is not read as a part of attention", why.name)
        self.refusal = Refusal(why) if isinstance(why, str) else why


@dataclass(frozen=True)
class _Product:
    """A product of matrices of three or four dimensions, ``beta * added + alpha * left @ right``."""

    left: fx.Node
    right: fx.Node
    added: fx.Node | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @staticmethod
    def read(node: fx.Node) -> "_Product | None":
        called = operators.read(node)
        if called.in_place or called.name not in ("matmul", "bmm", "baddbmm"):
            return None
        if called.name == "baddbmm":
            given = operators.arguments(node, ("first", "input", "self"), ("left", "batch1"), ("right", "batch2"))
        else:
            given = operators.arguments(node, ("left", "input", "self"), ("right", "other", "mat2"))
        factors = [number(given.pop(one, 1)) for one in ("alpha", "beta")]
        first, left, right = (given.pop(one, None) for one in ("first", "left", "right"))
        known = all(one is not None and one.is_number and one.is_finite for one in factors)
        if given or not known or not (is_tensor(left) and is_tensor(right)):
            return None
        made = [value(one) for one in (left, right, node)]
        plain = all(one.layout is torch.strided and not one.is_nested and one.dim() == made[0].dim() for one in made)
        return _Product(left, right, first, *map(float, factors)) if plain and made[0].dim() in (3, 4) else None  # type: ignore[arg-type]


def _factors(node: fx.Node) -> tuple[Any, Any]:
    """The operands of a product of two by `einsum`, or of any dimensions; None, twice, of any other node."""
    factors = [one for one in node.all_input_nodes if is_tensor(one) and value(one).dim() > 2]
    is_product = operators.read(node).name in ("einsum", "matmul", "bmm") and len(factors) == 2
    return (factors[0], factors[1]) if is_product else (None, None)


def _path(node: Any, known: dict[fx.Node, list[fx.Node] | None]) -> list[fx.Node] | None:
    """The nodes by which weights, or scores, are computed from a product, with both; None where they are not."""
    if not is_tensor(node):
        return None
    if node not in known:
        known[node] = None
        called, kind, _ = operators.read(node)
        goes = kind in _THROUGH or called in _OTHERS
        operands: Sequence[Any] = node.args[:3] if kind is Kind.POINTWISE or called == "max" else node.args[:1]
        operands = operands[0] if called == "cat" and isinstance(operands[0], list | tuple) else operands
        paths = (_path(one, known) for one in operands if goes)
        is_product = called == "einsum" or _factors(node)[0] is not None or _Product.read(node) is not None
        rest = [] if is_product else next((one for one in paths if one is not None), None)
        known[node] = None if rest is None else [node, *rest]
    return known[node]


def _weights(node: fx.Node, walk: "_Walk", reader: Reader) -> None:
    """What weights are made of, the last first: a dropout, a softmax, sinks, and the scores."""
    call, node = walk.call, walk.back(node)
    if name(node) == "dropout":
        node, call.dropout = walk.back(walk.step(node)), _dropped(node)
    has_sinks = _drops_last(node)
    node = walk.step(node) if has_sinks else node
    if operators.read(node).name != "softmax" or not _is_last(
        operators.arguments(node, "input", "dim").get("dim"), node
    ):
        raise _Unread(node)
    walk.largest = torch.finfo(value(node).dtype).max
    node = _without_largest(walk.step(node), walk)
    if has_sinks:
        given = operators.arguments(node, "tensors", "dim")
        pieces: Any = given.get("tensors")
        if operators.read(node).name != "cat" or not _is_last(given.get("dim"), node) or len(pieces) != 2:
            raise _Unread(node)
        if value(node).dim() != 4 or not statically_known_true(value(pieces[1]).shape[-1] == 1):
            raise _Unread(node)
        call.sinks = pieces[1]
        walk.read.append(node)
        node = walk.into(pieces[0], node)
    _scores(walk.back(node), walk, reader)


def _scores(node: fx.Node, walk: "_Walk", reader: Reader) -> None:
    """What is done to the product of q and k, the last first: masks, a bias, a soft cap, scales."""
    call, scores = walk.call, walk.sizes(value(node))
    while (product := _Product.read(node)) is None:
        node = walk.back(_masked(node, scores, walk, reader) or _softcap(node, walk) or _scaled(node, walk))
    if product.added is not None and product.beta != 0.0:
        if value(product.added).dim() == 0:
            raise _Unread(node)
        part = added.read(walk.as_scores(product.added, node), reader, scores)
        _merge(part, product.added, value(product.added).dtype, walk, product.beta)
    call.scale = walk.scale * product.alpha
    walk.read.append(node)
    dtype, turned = value(call.v).dtype, product.right
    walk.through.append(turned)
    q, k = product.left, turned.args[0] if operators.swaps(turned) else walk.view(turned, "transpose", -1, -2)
    q, k = _uncast(q, dtype, walk.read), _uncast(k, dtype, walk.read)  # type: ignore[arg-type]
    like = {(value(one).dtype, value(one).device) for one in (q, k, call.v, call.node)}
    if len(like) != 1:
        raise _Unread("q, k, v and the output differ in their dtype or device")
    call.q, call.k, call.v = (walk.as_heads(one, scores) for one in (q, k, call.v))


def _masked(node: fx.Node, scores: Scores, walk: "_Walk", reader: Reader) -> fx.Node | None:
    """The scores to which a node adds something, or puts something in the places of some."""
    called, _, in_place = operators.read(node)
    if called == "add" and len(node.args) == 2 and all(map(is_tensor, node.args)) and not node.kwargs:
        for place in (0,) if in_place else (0, 1):
            scored: Any = node.args[place]
            if _path(scored, {}) is not None and has_shape(value(scored), value(node).shape):
                mask: Any = node.args[1 - place]
                if in_place and value(mask).dtype is not value(node).dtype:
                    raise _Unread(node)
                _merge(added.read(walk.as_scores(mask, node), reader, scores), mask, value(mask).dtype, walk)
                return walk.step(node, place)
        raise _Unread(node)
    hidden = added.hidden_by(node, scores, reader, lambda mask: walk.as_scores(mask, node))
    if hidden is None:
        return None
    predicate, smallest, scored = hidden
    place = [*node.args].index(scored)
    if not has_shape(value(scored), value(node).shape):  # which is broadcast
        raise _Unread(node)
    hiding = Added([Hiding(predicate, smallest, "scores")])
    _merge(hiding, node.args[1 - place], value(node).dtype, walk)  # type: ignore[arg-type]
    return walk.step(node, place)


def _merge(part: Added | Refusal, given: fx.Node, dtype: torch.dtype, walk: "_Walk", factor: float = 1.0) -> None:
    """Note what is added to the scores in front of what has been read, in numbers of a dtype."""
    call = walk.call
    if isinstance(part, Refusal):
        raise _Unread(part)
    part.cast(dtype, walk.largest)
    scale = walk.scale * factor
    if call.softcap is not None and (part.bias is not None or part.masks):
        raise _Unread("a mask or a bias is added in front of a soft cap")
    if part.masks and (factor != 1.0 or (part.smallest and not _LEAST_SCALE <= scale <= 1.0)):
        raise _Unread(Refusal("the number that hides a score is multiplied by %s", scale))
    if part.replaces("scores") and call.added.bias is not None:
        raise _Unread("a bias is added to the number that hides a score")
    part.scale = scale
    merged = call.added.merged(part)
    if merged is None:
        raise _Unread("two biases are added, whose sum is rounded")
    call.added, call.given = merged, call.given or given


def _scaled(node: fx.Node, walk: "_Walk") -> fx.Node:
    """The scores that a node multiplies by a number, or divides."""
    called = operators.read(node).name
    by = next((number(one) for one in node.args if not is_tensor(one)), None)
    if called not in ("mul", "div") or by is None or not (by.is_number and by.is_finite and by.is_positive):
        raise _Unread(node)
    if node.kwargs or len(node.args) != 2 or not (is_tensor(node.args[0]) or called == "mul"):
        raise _Unread(node)
    walk.scale *= float(by) if called == "mul" else 1 / float(by)
    return walk.step(node, 0 if is_tensor(node.args[0]) else 1)


def _softcap(node: fx.Node, walk: "_Walk") -> fx.Node | None:
    """The scores of ``tanh(scores / cap) * cap``."""
    tanh: Any = node.args[0] if operators.read(node).name == "mul" else None
    if not is_tensor(tanh) or operators.read(tanh).name != "tanh":
        return None
    cap, tanh = number(node.args[1]), walk.step(node)
    inner = walk.step(tanh)
    same = operators.read(inner).name == "div" and not inner.kwargs and number(inner.args[1]) == cap
    if cap is None or not same or not (cap.is_number and cap.is_positive) or walk.call.softcap is not None:
        raise _Unread(node)
    if walk.scale != 1.0:
        raise _Unread("scores are scaled behind a soft cap")
    walk.call.softcap = float(cap)
    return walk.step(inner)


def _without_largest(node: fx.Node, walk: "_Walk") -> fx.Node:
    """What ``x - x.max(-1, keepdim=True).values`` is made of: a softmax does not see what each row subtracts."""
    largest: Any = node.args[1] if operators.read(node).name == "sub" and len(node.args) == 2 else None
    if not is_tensor(largest) or node.kwargs or not statically_known_true(value(largest).shape[-1] == 1):
        return node
    if name(largest) == "getitem" and largest.args[1] == 0:
        walk.seen.append(largest)
        largest = largest.args[0]
    if not isinstance(largest, fx.Node) or name(largest) not in ("max", "amax") or largest.args[0] is not node.args[0]:
        raise _Unread(node)
    walk.seen.append(largest)
    walk.into(node.args[0], largest)
    return walk.step(node)


def _drops_last(node: fx.Node) -> bool:
    index = node.args[1] if name(node) == "getitem" else None
    return (
        isinstance(index, tuple)
        and index[-1] == slice(None, -1, None)
        and all(one is Ellipsis or one == slice(None, None, None) for one in index[:-1])
        and (Ellipsis in index or len(index) == value(node).dim())
    )


def _dropped(node: fx.Node) -> float:
    """How much a dropout drops."""
    given = operators.arguments(node, "input", "p", ("training", "train"), "inplace")
    p, training = given.get("p"), given.get("training")
    if training is False or p == 0.0:
        return 0.0
    if not isinstance(p, float) or training not in (None, True) or given.get("inplace"):
        raise _Unread(node)
    return p


def _uncast(node: fx.Node, dtype: torch.dtype, read: list[fx.Node]) -> fx.Node:
    """What q or k was before it was cast to fp32: a kernel multiplies it as exactly."""
    if operators.read(node).kind is Kind.CAST and value(node).dtype is torch.float32 and is_tensor(node.args[0]):
        source: Any = node.args[0]
        if value(source).dtype is dtype and value(source).device == value(node).device:
            read.append(node)
            return source  # type: ignore[no-any-return]
    return node


def _is_last(dim: Any, node: fx.Node) -> bool:
    return isinstance(dim, int) and (dim == -1 or dim == value(node).dim() - 1)


class _Walk:
    """The way back from a product to its operands."""

    def __init__(self, site: Attention, writes: Writes, path: Sequence[fx.Node]) -> None:
        self.call, self.views, self.seen = site.call, site.views, list[fx.Node]()
        self.read = list[fx.Node]()  # the nodes that read q, k and sinks
        self.scale = 1.0  # of the scores, by what has been read
        self.through = list[fx.Node]()  # what lies between operands and the first product
        self.largest = math.inf  # the largest number of each dtype that scores are cast to behind what is read next
        self._writes = writes
        self._wide = next((value(node) for node in path if value(node).dim() == 4), None)

    def into(self, node: Any, reader: fx.Node) -> fx.Node:
        """A node as another one reads it: what wrote it last, if that wrote all of it in place."""
        if not is_tensor(node):
            raise _Unread(reader)
        self.seen.append(node)
        written = self._writes.since(node, reader)
        if written is None or (written and not _writes_all(written[-1], node)):
            raise _Unread(Refusal("the graph writes %s, which is a part of attention", node.name))
        wide = self._wide if value(node).dim() == 4 else None
        if wide is not None and not all(
            statically_known_true(a == b) for a, b in zip(wide.shape[:2], value(node).shape[:2], strict=True)
        ):
            raise _Unread(reader)
        self.seen += written[-1:]
        return written[-1] if written else node

    def step(self, node: fx.Node, place: int = 0) -> fx.Node:
        if place >= len(node.args):
            raise _Unread(node)
        return self.into(node.args[place], node)

    def back(self, node: fx.Node) -> fx.Node:
        """Goes back past what changes no more than a float's dtype, its memory, or how batch and heads are written."""
        while _is_same(node):
            self.largest = min(self.largest, torch.finfo(value(node).dtype).max)
            node = self.step(node)
        return node

    def sizes(self, scores: torch.Tensor) -> Scores:
        """The sizes of scores of three or four dimensions."""
        queries, keys = scores.shape[-2:]
        fake: Any = scores
        if self._wide is None:
            return Scores(scores.shape[0], 1, queries, keys, fake.fake_mode.shape_env)
        batch, heads = self._wide.shape[:2]
        return Scores(batch, heads, queries, keys, fake.fake_mode.shape_env)

    def view(self, node: fx.Node, called: str, *arguments: Any) -> fx.Node:
        """A view of an operand, put into the graph."""
        self.views.append(method(node, called, *arguments))
        return self.views[-1]

    def as_scores(self, node: fx.Node, of: fx.Node) -> fx.Node:
        """What is added to scores, or hides some, with a dimension for the heads."""
        if value(of).dim() == 4 or value(node).dim() < 3:
            return node
        return self.view(node, "unsqueeze", 0) if is_one(value(node).shape[0]) else self._with_heads(node)

    def as_heads(self, node: fx.Node, scores: Scores) -> fx.Node:
        """An operand as (B, H, tokens, width), also where a product broadcasts it."""
        node = node if value(node).dim() == 4 else self._with_heads(node)
        sizes = list(zip(value(node).shape, (scores.batch, scores.heads), strict=False))
        if all(statically_known_true(size == to) for size, to in sizes):
            return node
        if not all(isinstance(to, int) and (is_one(size) or size == to) for size, to in sizes):
            raise _Unread("the sizes of q, k and v are not known to be alike")
        return self.view(node, "expand", scores.batch, scores.heads, -1, -1)

    def _with_heads(self, node: fx.Node) -> fx.Node:
        if self._wide is None:
            return self.view(node, "unsqueeze", 1)
        heads = self._wide.shape[1]
        if not isinstance(heads, int) or value(node).shape[0] % heads:
            raise _Unread("the number of its heads is not known")
        return self.view(node, "unflatten", 0, (-1, heads))

    def is_closed(self) -> bool:
        """Whether nothing outside reads what is inside."""
        inside = {*self.seen, self.call.node, *self.views}
        return all(user in inside or _reads_sizes(user, node) for node in self.seen for user in node.users)

    def learns(self) -> bool:
        """Whether all of it has a gradient of what it is computed from, if its end has one."""
        inside = {*self.seen, *self.through, *self.read} if value(self.call.node).requires_grad else ()
        return all(
            value(node).requires_grad
            for node in inside
            if is_tensor(node) and any(is_tensor(one) and value(one).requires_grad for one in node.all_input_nodes)
        )


def _writes_all(write: fx.Node, node: fx.Node) -> bool:
    """Whether an operation writes a tensor in place, and no other part of its memory."""
    if not operators.read(write).in_place or not is_tensor(write) or written_by(write) != [write.args[0]]:
        return False
    one, other = value(write.args[0]), value(node)  # type: ignore[arg-type]
    alike = zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=False)
    return (
        one.dim() == other.dim()
        and one.dtype is other.dtype
        and statically_known_true(one.storage_offset() == other.storage_offset())
        and all(statically_known_true(a == b) for a, b in alike)
    )


def _reads_sizes(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node reads no more of another one than its sizes, its dtype and its device."""
    called, kind, _ = operators.read(user)
    is_like = called in ("expand_as", "view_as", "reshape_as", "type_as") and user.args[0] is not node
    return is_like or kind in Kind.SIZE | Kind.FILL


def _is_same(node: fx.Node) -> bool:
    """Whether a node has the numbers of its operand, rounded to another dtype at most, with batch and heads as one
    dimension or as two."""
    called, kind, in_place = operators.read(node)
    if in_place or not node.args or not is_tensor(node.args[0]) or not is_tensor(node):
        return False
    source: Any = node.args[0]
    made, given = value(node), value(source)
    if kind is Kind.CAST or called in ("contiguous", "clone"):
        floats = all(one.is_floating_point() and one.dtype.itemsize > 1 for one in (made, given))
        return floats and made.device == given.device and made.dim() == given.dim()
    kept = kind is Kind.RESHAPE and {made.dim(), given.dim()} <= {3, 4}
    return kept and all(statically_known_true(made.shape[at] == given.shape[at]) for at in (-2, -1))
