"""What is added to attention's scores: masks, which are 0 and a number that hides a score, and a bias beside them, such
as that of ALiBi or of T5.

A bias stays the tensor that the program computes, in the dtype in which it rounds it: computed again from positions it
would be another number, of which a softmax sees the difference."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import name
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.pre_grad.attention import masks
from te_inductor.passes.pre_grad.attention.expressions import Expr, is_one, number, truth
from te_inductor.passes.pre_grad.attention.formulas import Reader
from te_inductor.passes.pre_grad.attention.masks import Scores


@dataclass(frozen=True)
class Hiding:
    """A mask: a number that hides a score where a predicate does not hold."""

    predicate: Expr  # over masks.PLACES
    smallest: bool  # whether it is the smallest number, not minus infinity
    replaces: str = ""  # "bias" or "scores": in whose place it stands, where it is not added


@dataclass
class Added:
    """What is added to scores: a bias, and masks."""

    masks: list[Hiding] = field(default_factory=list)  # the last one first
    bias: fx.Node | None = None  # that broadcasts to the scores
    unread: Refusal | None = None  # why the bias is none of the masks
    scale: float = 1.0  # what the bias is multiplied by
    infinite: torch.dtype | None = None  # of which a cast behind a mask makes minus infinity of the smallest number

    @property
    def predicate(self) -> Expr:
        """The condition under which no mask hides a score."""
        return sympy.And(*(one.predicate for one in self.masks))

    @property
    def smallest(self) -> bool:
        """Whether the smallest number hides any."""
        return any(one.smallest for one in self.masks)

    def cast(self, dtype: torch.dtype, largest: float) -> None:
        """Note that what is added, of a dtype, is cast to one with this largest number."""
        if self.smallest and torch.finfo(dtype).max > largest:
            self.infinite = dtype

    def replaces(self, what: str) -> bool:
        """Whether a mask's number stands in the place of the bias, or of the scores."""
        return any(one.replaces == what for one in self.masks)

    def merged(self, other: "Added") -> "Added | None":
        """Both; None where both have a bias, whose sum is rounded."""
        if self.bias is not None and other.bias is not None:
            return None
        whole = self if other.bias is None else other
        return replace(whole, masks=self.masks + other.masks, infinite=self.infinite or other.infinite)


def of_mask(node: fx.Node, reader: Reader, scores: Scores) -> Added | Refusal:
    """What a mask of torch's attention is: Booleans that say which scores count, or numbers that are added to them."""
    if value(node).dtype is not torch.bool:
        return read(node, reader, scores)
    whole = masks.read(node, reader, scores)
    return _of_whole(whole) if isinstance(whole, masks.Mask) else whole


def read(node: fx.Node, reader: Reader, scores: Scores) -> Added | Refusal:
    """What a tensor is that is added to scores."""
    if not value(node).dtype.is_floating_point:
        return Refusal("%s is added to the scores, of %s", reader.told(node), value(node).dtype)
    whole = masks.read(node, reader, scores)
    if isinstance(whole, masks.Mask) and not value(node).requires_grad:
        return _of_whole(whole)
    if isinstance(whole, masks.Mask):  # as of ``x - x.detach()``
        whole = Refusal("the mask has a gradient")
    if reader.is_written(node):
        return whole
    if name(node) in ("contiguous", "clone") and is_tensor(node.args[0]):
        return read(node.args[0], reader, scores)  # type: ignore[arg-type]
    parts = _sum(node, reader, scores) or _filled(node, reader, scores)
    if parts is not None:
        return parts
    return Added(bias=node, unread=whole) if _broadcasts(node, scores) else whole


def _of_whole(mask: masks.Mask) -> Added:
    return Added([] if mask.is_full else [Hiding(sympy.And(*mask.conditions), mask.smallest)])


def _sum(node: fx.Node, reader: Reader, scores: Scores) -> Added | None:
    if name(node) != "add" or node.kwargs or len(node.args) != 2 or not all(map(is_tensor, node.args)):
        return None
    found = [read(one, reader, scores) for one in node.args]  # type: ignore[arg-type]
    one, other = found
    return one.merged(other) if isinstance(one, Added) and isinstance(other, Added) else None


def _filled(node: fx.Node, reader: Reader, scores: Scores) -> Added | None:
    hidden = hidden_by(node, scores, reader)
    if hidden is None:
        return None
    predicate, smallest, operand = hidden
    inner = read(operand, reader, scores)
    return Added([Hiding(predicate, smallest, "bias")]).merged(inner) if isinstance(inner, Added) else None


def hidden_by(
    node: fx.Node, scores: Scores, reader: Reader, shaped: Callable[[fx.Node], fx.Node] = lambda mask: mask
) -> tuple[Expr, bool, fx.Node] | None:
    """Finds where `masked_fill` or `where` leaves scores, or what is added to them, as they are, whether it is the smallest
    number that stands elsewhere, and the tensor. `shaped` gives a mask the dimensions of scores."""
    mask: Any
    operand: Any
    called = operators.read(node).name
    if called == "masked_fill" and len(node.args) == 3:
        operand, mask, fill = node.args
    elif called == "where" and len(node.args) == 3:
        mask, operand, fill = node.args
    else:
        return None
    if not (is_tensor(mask) and is_tensor(operand) and value(mask).dtype is torch.bool and value(mask).dim() <= 4):
        return None
    lowest = _lowest(fill, value(node).dtype, reader)
    if lowest is None:
        return None
    held = truth(reader.read(shaped(mask)).broadcast(scores.sizes, masks.PLACES))
    return (held if called == "where" else ~held), lowest, operand


def _lowest(fill: Any, dtype: torch.dtype, reader: Reader) -> bool | None:
    """Whether a number hides a score as the smallest one, not as minus infinity; None where it does not."""
    if is_tensor(fill):
        found = reader.read(fill)
        filled = found.at(()) if not found.shape else None
    else:
        filled = number(fill)
    if filled == -sympy.oo:
        return False
    return True if filled is not None and filled == sympy.Rational(torch.finfo(dtype).min) else None


def _broadcasts(node: fx.Node, scores: Scores) -> bool:
    """Whether each of a float tensor's sizes is one, or that of the scores."""
    tensor = value(node)
    sizes = scores.sizes[4 - tensor.dim() :]
    return (
        tensor.dtype.is_floating_point
        and 1 <= tensor.dim() <= 4
        and all(is_one(size) or statically_known_true(size == to) for size, to in zip(tensor.shape, sizes, strict=True))
    )
