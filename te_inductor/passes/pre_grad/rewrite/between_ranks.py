"""Tensors that layers have from other ranks in low precision: weights that the graph gathers (Note [Graph FSDP] in
ops/sharded_weight.py), and what is left of an exchange of rows that a layer does itself."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from te_inductor import compat, ops
from te_inductor.ops import LayerSpec
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.plan import Candidate
from te_inductor.passes.pre_grad.sites.exchanges import Exchanges
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.recipes import Quantizer


def without_gathers(sites: Iterable[Candidate]) -> None:
    """Have the rewrite of a site remove what gathers its weight in high precision."""
    for site in sites:
        if site.gathers and site.match.gather is not None:
            site.match = replace(site.match, before=site.match.gather.nodes)


@dataclass
class GatheredWeights:
    """The weights of a graph that are gathered in low precision. Of current scaling all scales of one kind are found at
    the graph's begin."""

    bodies: Bodies
    quantizers: dict[fx.Node, Quantizer] = field(default_factory=dict)  # by the node of the layer
    scales: dict[tuple[fx.Node, Quantizer, torch.dtype], list[fx.Node]] = field(default_factory=dict)

    def add(self, sites: Sequence[Candidate]) -> None:
        kinds: dict[Any, dict[fx.Node, None]] = {}
        for site in sites:
            if not site.gathers or site.match.gather is None or site.slots is None:
                continue
            gather, quantizer = site.match.gather, site.slots.weight
            self.quantizers[site.match.node] = quantizer
            if quantizer.granularity.whole and not site.delayed:
                shard = self.bodies.outer(gather.shard)
                mesh = compat.mesh_of_dtensor(value(shard))
                kinds.setdefault((quantizer, gather.dtype, mesh, value(shard).placements), {})[shard] = None  # type: ignore[attr-defined]
        for (quantizer, dtype, *_), shards in kinds.items():
            self._find_scales(list(shards), quantizer, dtype)

    def _find_scales(self, shards: list[fx.Node], quantizer: Quantizer, dtype: torch.dtype) -> None:
        graph, operands = self.bodies.root.graph, (shards, quantizer, dtype)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            found = graph.call_function(ops.shard_scales, operands)  # type: ignore[arg-type]
        with graph.inserting_after(found):
            for place, shard in enumerate(shards):
                pair = [graph.call_function(operator.getitem, (found, 2 * place + inverse)) for inverse in range(2)]
                self.scales[shard, quantizer, dtype] = pair

    def has(self, match: Match) -> bool:
        """Whether the graph gathers the layer's weight in low precision."""
        return match.node in self.quantizers and match.gather is not None

    def of(
        self, match: Match, weights: Sequence[fx.Node], spec: LayerSpec, known: list[fx.Node] | None = None
    ) -> Sequence[fx.Node]:
        """What a layer of a spec multiplies by: `weights`, or the gathered one. `known` is the scale and its reciprocal
        under delayed scaling."""
        if not self.has(match):
            return weights
        assert match.gather is not None  # `has` says so
        gather, quantizer, graph = match.gather, self.quantizers[match.node], match.node.graph
        scales = self.scales.get((self.bodies.outer(gather.shard), quantizer, gather.dtype))
        if known is None and scales is not None:
            known = [self.bodies.hand(node, graph) for node in scales]
        of_weight = LayerSpec(spec.slots, spec.scales)
        args: Any = (gather.shard, of_weight, gather.dtype, gather.backward_dtype)
        return [graph.call_function(ops.gather_weight, args, {} if known is None else {"known": known})]


def ask_for_sizes(sites: Iterable[Candidate]) -> None:
    """Have what asks for sizes of the rows that came ask a tensor of those sizes, whose values nobody reads."""
    for site in sites:
        part = site.match.part(Exchanges)
        found = None if part is None else part.arrives
        for node in part.sizes_of if part is not None else ():
            if found is None or found.waited not in node.all_input_nodes:  # done for another site
                continue
            graph = node.graph
            with graph.inserting_before(node):
                rows = graph.call_function(torch.sym_sum, (list(found.received),))
                shape = [rows, *value(found.rows).shape[1:]]
                like = graph.call_function(torch.ops.aten.new_empty.default, (found.rows, shape))
            like.meta = dict(found.waited.meta)
            node.replace_input_with(found.waited, like)
