"""A loss as a part of the output layer that it reads, and the rule of such a site."""

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from te_inductor import compat, ops
from te_inductor.diagnostics import Refusal
from te_inductor.ops import LayerSpec
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.loss.reading import Reading, Sums
from te_inductor.passes.pre_grad.sites.part import SitePart
from te_inductor.passes.pre_grad.sites.rule import Emit, Match, Rule, replace_layer
from te_inductor.recipes import Slots
from te_inductor.recipes.losses import slots_of_loss

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class LossPart(SitePart):
    """The loss that reads a layer's result, which nothing else does."""

    reading: Reading

    knows_gradient: ClassVar[bool] = True

    def is_taken(self, low: bool) -> bool:
        """Whether it is computed in chunks, of a layer in low precision or not."""
        return low or bool(self.reading.outputs)

    def rows(self, x: fx.Node) -> fx.Node:
        """The rows of x whose logits the loss reads, (…, K)."""
        for index in self.reading.parts:
            x = x.graph.call_function(operator.getitem, (x, index))
        return x

    def operand(self, match: Match, x: fx.Node) -> fx.Node:
        """The same as (N, K)."""
        x = self.rows(x)
        return x.graph.call_function(_ATEN.reshape.default, (x, [-1, value(match.x).shape[-1]]))

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        slots = slots_of_loss(spec.slots)
        assert slots is not None  # the pass has asked
        return dataclasses.replace(spec, slots=slots, loss=self.reading.loss), {"labels": self.labels(graph)}

    def labels(self, graph: fx.Graph) -> fx.Node:
        """The labels (N,), at the graph's insertion point."""
        found = _local(self.reading.labels, graph)
        if value(self.reading.labels).dim() == 1:
            return found
        return graph.call_function(_ATEN.reshape.default, (found, [-1]))

    def describe(self, slots: Slots) -> list[str]:
        return [] if self.reading.loss.shared is None else ["two numbers a token of the loss of words that ranks share"]

    def refuse_taken(self, match: Match, deferred: bool) -> Refusal | None:
        if not self.reading.sums:
            return None
        return Refusal("gradients of the logarithms of a loss's sums have a part that no GEMM computes")

    def may_merge(self, match: Match, slots: Slots) -> bool:
        return False


class LossOfLinear(Rule):
    """Cross entropy of a linear layer's result."""

    pattern: ClassVar[str] = "linear, cross_entropy"

    def rewrite(self, match: Match, emit: Emit) -> None:
        """Puts the loss where its results are read first, as its labels may be made behind the layer."""
        with match.end.graph.inserting_before(_place(match)):
            [losses] = emit([match], match.operand(), [match.matrices()])
            _replace(match, losses)


def _place(match: Match) -> fx.Node:
    """The node that the loss is put in front of, as its labels are."""
    part = match.part(LossPart)
    assert part is not None  # what the match is of
    place = part.reading.place
    for node in part.reading.late_labels() or ():
        place.prepend(node)
    return place


def rewrite_in_high_precision(match: Match) -> None:
    """The same in the precision of the program."""
    part = match.part(LossPart)
    assert part is not None  # what the match is of
    with match.end.graph.inserting_before(_place(match)):
        given = (match.operand(), match.matrices(), match.bias, part.labels(match.node.graph), part.reading.loss)
        made: Any = (*given, value(match.node).dtype)
        results = match.node.graph.call_function(ops.output_loss, made)
        _replace(match, match.node.graph.call_function(operator.getitem, (results, 0)))


def _replace(match: Match, losses: fx.Node) -> None:
    """Puts what the program makes of its tokens' losses in the place of the site, at the graph's insertion point."""
    part = match.part(LossPart)
    assert part is not None  # what the match is of
    reading, graph = part.reading, match.node.graph
    for node in reading.outputs:
        node.replace_all_uses_with(_empty(match, node), lambda user: user.op == "output")
    for one in reading.sums:
        sums = _shaped(part, match, graph.call_function(operator.getitem, (losses.args[0], 1)), one)
        one.node.replace_all_uses_with(sums, lambda user: user not in match.behind)
        if one.node not in match.behind:
            graph.erase_node(one.node)
    for node in reversed(reading.aside):
        graph.erase_node(node)
    found = losses
    if reading.reduction in ("mean", "sum"):
        found = graph.call_function(_ATEN.sum.default, (losses,))
    elif value(reading.labels).dim() > 1:
        found = graph.call_function(_ATEN.view_as.default, (losses, _local(reading.labels, graph)))
        if value(reading.call).dim() < value(reading.labels).dim():
            found = graph.call_function(_ATEN.squeeze.dim, (found, -1))
    if reading.reduction == "picked":
        found = graph.call_function(_ATEN.neg.default, (found,))
    if reading.reduction == "mean":
        kept = graph.call_function(_ATEN.ne.Scalar, (_local(reading.labels, graph), reading.loss.ignored))
        found = graph.call_function(_ATEN.div.Tensor, (found, graph.call_function(_ATEN.sum.default, (kept,))))
    dtype = value(reading.call).dtype
    if dtype != torch.float32:
        found = graph.call_function(_ATEN.to.dtype, (found, dtype))
    if reading.loss.shared is not None:
        found = graph.call_function(ops.replicated, (found, match.weight))
    replace_layer(match, found)


def _local(node: fx.Node, graph: fx.Graph) -> fx.Node:
    """What this rank has of a tensor, which is all of it, at the graph's insertion point."""
    return node if compat.mesh_of_dtensor(value(node)) is None else graph.call_function(ops.local_of, (node,))


def has_known_sizes(match: Match, sums: Sums) -> bool:
    """Whether the sizes of a `logsumexp` are known, or those of the rows of x."""
    sizes = _sizes(sums)
    if len(sizes) == 1 or all(isinstance(size, int) for size in sizes):
        return True
    return not sums.is_reshaped and value(match.x).shape[:-1] == value(match.node).shape[:-1]


def _sizes(sums: Sums) -> tuple[Any, ...]:
    """The sizes of the tokens alone."""
    sizes = tuple(value(sums.node).shape)
    return sizes[:-1] if sums.keeps_dim else sizes


def _shaped(part: LossPart, match: Match, found: fx.Node, sums: Sums) -> fx.Node:
    """The logarithms of sums (N,) as the program has them."""
    graph, sizes = match.node.graph, _sizes(sums)
    if all(isinstance(size, int) for size in sizes):
        found = graph.call_function(_ATEN.view.default, (found, list(sizes)))
    elif len(sizes) > 1:
        like = graph.call_function(_ATEN.select.int, (part.rows(match.x), -1, 0))
        found = graph.call_function(_ATEN.view_as.default, (found, like))
    if sums.keeps_dim:
        found = graph.call_function(_ATEN.unsqueeze.default, (found, -1))
    return graph.call_function(_ATEN.to.dtype, (found, value(sums.node).dtype))


def _empty(match: Match, logits: fx.Node) -> fx.Node:
    """What stands in the graph's output for logits (…, V) that are left out: a tensor of sizes (…, 0)."""
    sizes, x = value(logits).shape[:-1], _local(match.x, match.node.graph)
    if all(isinstance(size, int) for size in sizes):
        return match.node.graph.call_function(_ATEN.new_empty.default, (x, [*sizes, 0]))
    nothing = match.node.graph.call_function(_ATEN.slice.Tensor, (x, -1, 0, 0))
    return match.node.graph.call_function(_ATEN.empty_like.default, (nothing,))
