"""Masks that a graph takes as they are: buffers of the model, and inputs. Note [Masks that a graph takes] in
runtime/attention/bands.py."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import compat
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.attention.formulas import Index
from te_inductor.passes.pre_grad.attention.masks import KEY, QUERY
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.runtime.attention.bands import Band, Same, band_of

# From how many queries on an input is compared: each new tensor has the host wait for the device once.
INPUT_QUERIES = 512


@dataclass
class Inputs:
    """The inputs of a graph that masks are read from, each with the band that it holds."""

    plan: Plan
    bodies: Bodies
    _asked: dict[fx.Node, Band | str] = field(default_factory=dict)

    def band(self, node: fx.Node, index: Index) -> Band | None:
        """The band that a node holds which masks read at an index; None of what is no mask of queries and keys, or is
        computed by the graph."""
        if node.op != "placeholder" or node.graph is not self.bodies.root.graph or len(index) < 2:
            return None
        row, column = (one.free_symbols for one in index[-2:])
        if not any(QUERY in one and KEY in other for one, other in ((row, column), (column, row))):
            return None
        if node not in self._asked:
            self._asked[node] = self._found(node)
        found = self._asked[node]
        return found if isinstance(found, Band) else None

    def hold_any(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether any of these is a mask that the graph takes, of which a guard has asked what it hides."""
        return any(isinstance(self._asked.get(node), Band) for node in nodes)

    def told(self, node: fx.Node) -> str:
        """What a mask's values come from, as reports have it."""
        why = "which the graph writes" if self.plan.writes.anywhere(node) else self._asked.get(node)
        return f"{node.name}, {why}" if isinstance(why, str) else node.name

    def _found(self, node: fx.Node) -> Band | str:
        """The band, which a guard then asks for at each call; or why there is none."""
        plan, is_buffer = self.plan, compat.is_of_a_module(node)
        tensor = self.bodies.held(node, plan.inputs)
        if not isinstance(tensor, torch.Tensor) or plan.options.attention == "as_written":
            return "which is not known before the call"
        if value(node).requires_grad:
            return "which is learned"
        if plan.writes.anywhere(node):
            return "which the graph writes"
        if not is_buffer and not statically_known_true(value(node).shape[-2] >= INPUT_QUERIES):
            return f"an input of fewer than {INPUT_QUERIES} queries, which is not compared at each call"
        if not is_buffer and plan.options.in_cuda_graphs():
            return "an input, which is not compared at each call under CUDA graphs; compile the whole model"
        band = band_of(tensor)
        if not compat.guard_on_tensor(node, Same(band, is_buffer), "te_inductor_holds_the_same_mask"):
            return "which nobody compares at each call"
        if band is None and not is_buffer:
            return "an input that holds no triangle, window or padding; compile the model as a whole"
        return band or "which holds no triangle or window"
