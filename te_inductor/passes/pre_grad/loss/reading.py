"""Cross entropy as models write it, read from a graph: from the loss back to the product that makes its logits."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Call, Kind
from te_inductor.passes.graph.values import is_tensor, is_wrapped, value
from te_inductor.passes.pre_grad.loss import forms
from te_inductor.recipes.losses import Loss

# What leaves each row of logits as it is, in the same order.
_KEEPS_ROWS = Kind.RESHAPE | Kind.COPY | Kind.CAST
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sums:
    """A `logsumexp` of the logits that the softmax of a loss is of, whose result something else reads."""

    node: fx.Node
    keeps_dim: bool  # its last dimension is of one
    is_reshaped: bool  # its other dimensions may be no longer those of the product


@dataclass(frozen=True)
class Reading:
    """A loss, and how its logits come about: ``reduction(loss(rows of the product's result, labels))``."""

    call: fx.Node  # of the loss
    product: fx.Node
    between: tuple[fx.Node, ...]  # the product and what the loss has of its own, the first first
    own: tuple[fx.Node, ...] = ()  # what the loss computes in front of its last node
    labels: Any = None  # (…), or (…, 1)
    reduction: str = "mean"  # or "none", "sum"; "picked": the logarithms of the labels' probabilities
    loss: Loss = field(default_factory=Loss)
    parts: tuple[Any, ...] = ()  # indices that take some of the product's rows, one after the other
    outputs: tuple[fx.Node, ...] = ()  # what the program gets of the logits
    aside: tuple[fx.Node, ...] = ()  # what stands between the product and those, in the graph's order
    sums: tuple[Sums, ...] = ()  # in the graph's order
    refusal: Refusal | None = None  # why it needs its logits

    @property
    def steps(self) -> tuple[fx.Node, ...]:
        """All nodes between the product and the loss, the first first."""
        return (*self.between, *self.own)

    @property
    def place(self) -> fx.Node:
        """The first of the loss and what reads its sums, which all results have to be in front of."""
        inside = {*self.steps, self.call}
        return min([self.call, *(user for one in self.sums for user in one.node.users if user not in inside)])

    def refused(self, *why: object) -> "Reading":
        """The loss with a reason."""
        return replace(self, refusal=Refusal(*why))  # type: ignore[arg-type]

    def late_labels(self) -> tuple[fx.Node, ...] | None:
        """The views and copies that make the labels behind that place, in order; None where something else does."""
        place, node, found = self.place, self.labels, []
        while not node < place:
            _, kind, in_place = operators.read(node)
            if kind not in Kind.RESHAPE | Kind.PART | Kind.COPY or in_place or len(node.all_input_nodes) != 1:
                return None
            found.append(node)
            [node] = node.all_input_nodes
        return tuple(reversed(found))

    @property
    def logits_bytes(self) -> int | None:
        """What the logits take; None where that is not known."""
        made = value(self.product)
        sizes = [size for size in made.shape if isinstance(size, int)]
        return math.prod(sizes) * made.element_size() if len(sizes) == made.dim() else None


def read(call: fx.Node) -> Reading | None:
    """The loss that a node computes; None of a node that is no loss of a product."""
    form = forms.form(call) if is_tensor(call) else None
    way = None if form is None else _way(form.logits)
    if form is None or way is None:
        return None
    product, between = way
    found = Reading(call, product, between, form.own, form.labels, form.reduction)
    if form.refusal is not None:
        return found.refused(form.refusal)
    if is_wrapped(call):
        return found.refused("it is inside a transform of torch.func")
    if value(form.logits).device != value(product).device:
        return found.refused("its logits go to another device")
    if value(form.labels).dtype != torch.int64:
        dtype = str(value(form.labels).dtype).removeprefix("torch.")
        return found.refused("its labels are %s, not classes of int64", dtype)
    if not isinstance(form.ignored, int | None) or not isinstance(form.smoothing, float | int):
        return found.refused("its ignored label, or its smoothing, is known at the call alone")
    words, factors = value(product).shape[-1], _factors(between)
    if factors is None or not isinstance(words, int):
        return found.refused(
            "between the output layer and the loss is more than casts, views, a factor and a cap by tanh"
        )
    parts = _rows(product, between, words)
    if parts is None or value(form.logits).shape[-1] != words:
        return found.refused("between the output layer and the loss, words of the vocabulary are moved or left out")
    return _with_outputs(replace(found, loss=Loss(form.ignored, float(form.smoothing), *factors), parts=parts))


def _way(node: Any) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The product that makes logits, and what stands between."""
    between: list[fx.Node] = []
    while is_tensor(node):
        if Call.read(node) is not None:
            return node, tuple(reversed(between))
        if node.op not in ("call_function", "call_method"):
            return None
        between.append(node)
        node = next((one for one in node.all_input_nodes if is_tensor(one)), None)
    return None


def _moves_nothing(node: fx.Node) -> bool:
    """Whether it redistributes a DTensor that is placed so already."""
    call = compat.method_call(node)
    if call is None or call[0] != "redistribute":
        return False
    source, made = (value(one) for one in (node.all_input_nodes[0], node))
    return source.placements == made.placements and source.dtype == made.dtype  # type: ignore[attr-defined]


def _factors(between: tuple[fx.Node, ...]) -> tuple[float, float | None] | None:
    """What logits are multiplied with in front of a cap, and behind it, if there is one; None of anything else."""
    inner, outer = 1.0, None
    for node in between:
        called, kind, in_place = operators.read(node)
        if in_place:
            return None
        if called in ("mul", "div"):
            first, second = node.args[:2] if len(node.args) == 2 else (None, None)
            if called == "mul" and isinstance(first, int | float):
                first, second = second, first
            if not isinstance(first, fx.Node) or not isinstance(second, int | float) or node.kwargs:
                return None
            factor = float(second) if called == "mul" else 1 / second if second else 0.0
            inner, outer = (inner * factor, None) if outer is None else (inner, outer * factor)
        elif called == "tanh":
            if outer is not None:
                return None
            outer = 1.0
        elif (kind not in _KEEPS_ROWS | Kind.PART and not _moves_nothing(node)) or value(node).dtype not in _DTYPES:
            return None
    known = all(math.isfinite(one) and one != 0 for one in (inner, 1.0 if outer is None else outer))
    return (inner, outer) if known else None


def _rows(product: fx.Node, between: tuple[fx.Node, ...], words: int) -> tuple[Any, ...] | None:
    """The indices that take rows of the product's result; None where rows do not stay whole. What is reshaped keeps its
    order, so that rows of one width are the same before and behind."""
    parts: list[Any] = []
    reshaped = False
    for node in between:
        called, kind, _ = operators.read(node)
        if kind is Kind.RESHAPE:
            reshaped = True
        elif kind is Kind.PART:
            index = node.args[1] if called == "getitem" else None
            index = index if isinstance(index, tuple) else (index,)
            if reshaped or not all(one is Ellipsis or isinstance(one, slice | int) for one in index):
                return None
            whole = [one for one in index if one is not Ellipsis]
            reaches = Ellipsis in index or len(whole) == value(node).dim() + sum(isinstance(one, int) for one in index)
            if reaches and (not whole or index[-1] is not Ellipsis) and index[-1] != slice(None):
                return None
            parts.append(index)
        if value(node).shape[-1] != words and not (reshaped and node is not between[-1]):
            return None
    return tuple(parts)


def _with_outputs(read: Reading) -> Reading:
    """The loss with what the program gets of its logits, refused where anything else reads these."""
    way = [read.product, *read.steps]
    inside = {*read.steps, read.call}
    outputs: dict[fx.Node, None] = {}
    aside: dict[fx.Node, None] = {}
    sums: dict[fx.Node, Sums] = {}
    pending = [(node, user) for node in way for user in node.users if user not in inside]
    while pending:
        source, user = pending.pop()
        # One that the loss has of its own, and something else reads, or another one.
        summed = next((node for node in (source, user) if operators.read(node).name == "logsumexp"), None)
        if summed is not None:
            found = _sums(read, summed)
            if isinstance(found, Refusal):
                return replace(read, refusal=found)
            sums[summed] = found
            continue
        if user.op == "output":
            outputs[source] = None
            continue
        _, kind, in_place = operators.read(user)
        if kind not in _KEEPS_ROWS | Kind.PART | Kind.SAME or in_place or not is_tensor(user):
            return read.refused("%s reads its logits too", user.name)
        aside[user] = None
        pending += [(user, behind) for behind in user.users]
    words = value(read.product).shape[-1]
    if any(value(node).shape[-1:] != (words,) for node in outputs):
        return read.refused("the program gets a part of its logits")
    loss = replace(read.loss, sums=bool(sums))
    return replace(
        read,
        loss=loss,
        outputs=tuple(outputs),
        aside=tuple(sorted(aside)),
        sums=tuple(sums[one] for one in sorted(sums)),
    )


def _sums(read: Reading, node: fx.Node) -> Sums | Refusal:
    """A `logsumexp` of some of the logits, or why it is not of those that the loss reads."""
    found = forms.log_sums(node)
    way = None if found is None else _way(found[0])
    if found is None or way is None or way[0] is not read.product or value(node).device != value(read.product).device:
        return Refusal("%s reads its logits too", node.name)
    product, between = way
    read_alike = value(found[0]).shape[-1] == value(product).shape[-1] and value(node).dtype in _DTYPES
    same_rows = _rows(product, between, value(product).shape[-1]) == read.parts
    if not read_alike or not same_rows or _factors(between) != (read.loss.inner, read.loss.outer) or is_wrapped(node):
        return Refusal("%s reads its logits too, but not as the loss does", node.name)
    if read.loss.smoothing:
        return Refusal("%s reads its logits too, beside a loss whose labels are smoothed", node.name)
    keeps_dim = value(node).dim() == value(found[0]).dim()
    return Sums(node, keeps_dim, any(operators.read(one).kind is Kind.RESHAPE for one in between))
