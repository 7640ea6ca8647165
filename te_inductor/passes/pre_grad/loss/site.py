"""A loss as a part of the output layer that it reads, and the rule of such a site."""

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from te_inductor import ops
from te_inductor.ops import LayerSpec
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.loss.reading import Reading
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

    def operand(self, match: Match, x: fx.Node) -> fx.Node:
        """The rows of x whose logits the loss reads, (N, K)."""
        for index in self.reading.parts:
            x = x.graph.call_function(operator.getitem, (x, index))
        return x.graph.call_function(_ATEN.reshape.default, (x, [-1, value(match.x).shape[-1]]))

    def emit(self, spec: LayerSpec, graph: fx.Graph) -> tuple[LayerSpec, dict[str, Any]]:
        slots = slots_of_loss(spec.slots)
        assert slots is not None  # the pass has asked
        return dataclasses.replace(spec, slots=slots, loss=self.reading.loss), {"labels": self.labels(graph)}

    def labels(self, graph: fx.Graph) -> fx.Node:
        """The labels (N,), at the graph's insertion point."""
        found: fx.Node = self.reading.labels
        if value(found).dim() == 1:
            return found
        return graph.call_function(_ATEN.reshape.default, (found, [-1]))

    def may_merge(self, match: Match, slots: Slots) -> bool:
        return False


class LossOfLinear(Rule):
    """Cross entropy of a linear layer's result."""

    pattern: ClassVar[str] = "linear, cross_entropy"

    def rewrite(self, match: Match, emit: Emit) -> None:
        """Puts the loss in the place of its call, as its labels may be made behind the layer."""
        with match.end.graph.inserting_before(match.end):
            [losses] = emit([match], match.operand(), [match.matrices()])
            _replace(match, losses)


def rewrite_in_high_precision(match: Match) -> None:
    """The same in the precision of the program."""
    part = match.part(LossPart)
    assert part is not None  # what the match is of
    with match.end.graph.inserting_before(match.end):
        given = (match.operand(), match.matrices(), match.bias, part.labels(match.node.graph), part.reading.loss)
        made: Any = (*given, value(match.node).dtype)
        _replace(match, match.node.graph.call_function(ops.output_loss, made))


def _replace(match: Match, losses: fx.Node) -> None:
    """Puts what the program makes of its tokens' losses in the place of the site, at the graph's insertion point."""
    part = match.part(LossPart)
    assert part is not None  # what the match is of
    reading, graph = part.reading, match.node.graph
    for node in reading.outputs:
        node.replace_all_uses_with(_empty(match, node), lambda user: user.op == "output")
    for node in reversed(reading.aside):
        graph.erase_node(node)
    found = losses
    if reading.reduction in ("mean", "sum"):
        found = graph.call_function(_ATEN.sum.default, (losses,))
    elif value(reading.labels).dim() > 1:
        found = graph.call_function(_ATEN.view_as.default, (losses, reading.labels))
        if value(reading.call).dim() < value(reading.labels).dim():
            found = graph.call_function(_ATEN.squeeze.dim, (found, -1))
    if reading.reduction == "picked":
        found = graph.call_function(_ATEN.neg.default, (found,))
    if reading.reduction == "mean":
        kept = graph.call_function(_ATEN.ne.Scalar, (reading.labels, reading.loss.ignored))
        found = graph.call_function(_ATEN.div.Tensor, (found, graph.call_function(_ATEN.sum.default, (kept,))))
    dtype = value(reading.call).dtype
    if dtype != torch.float32:
        found = graph.call_function(_ATEN.to.dtype, (found, dtype))
    replace_layer(match, found)


def _empty(match: Match, logits: fx.Node) -> fx.Node:
    """What stands in the graph's output for logits (…, V) that are left out: a tensor of sizes (…, 0)."""
    sizes = value(logits).shape[:-1]
    if all(isinstance(size, int) for size in sizes):
        return match.node.graph.call_function(_ATEN.new_empty.default, (match.x, [*sizes, 0]))
    nothing = match.node.graph.call_function(_ATEN.slice.Tensor, (match.x, -1, 0, 0))
    return match.node.graph.call_function(_ATEN.empty_like.default, (nothing,))
