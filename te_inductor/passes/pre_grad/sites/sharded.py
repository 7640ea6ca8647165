"""Weights that the graph itself gathers from their shards: Note [Graph FSDP] in ops/sharded_weight.py."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.distributed.parallel import is_shard
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.pre_grad.sites.part import Gather
from te_inductor.passes.pre_grad.sites.rule import Match

SHARED = Refusal("something else reads it too, in high precision")


def with_gather(match: Match) -> Match:
    """The layer with what gathers its weight, if anything does: ``shard.redistribute(…).to_local(…)``."""
    local = match.weight
    if compat.mesh_of_dtensor(value(local)) is not None or not _calls(local, "to_local"):
        return match
    whole = local.args[0]
    if not (isinstance(whole, fx.Node) and is_tensor(whole) and _calls(whole, "redistribute")):
        return match
    shard = whole.args[0]
    if not (isinstance(shard, fx.Node) and is_tensor(shard) and isinstance(value(shard), torch.nn.Parameter)):
        return match
    found: Any = value(shard)
    if not any(placement.is_shard() for placement in found.placements):
        return match  # nothing is gathered
    gather = Gather(shard, value(local).dtype, _backward_dtype(whole, found.dtype), (local, whole))
    return match.having(replace(gather, refusal=_refusal(match, gather)))


def _calls(node: fx.Node, method: str) -> bool:
    call = compat.method_call(node)
    return call is not None and call[0] == method


def _backward_dtype(whole: fx.Node, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the gradient of a shard of this dtype is reduced."""
    _, _, options = compat.method_call(whole) or ("", (), {})
    return options.get("backward_dtype") or dtype


def _refusal(match: Match, gather: Gather) -> Refusal | None:
    shard: Any = value(gather.shard)
    local, whole = gather.nodes
    sharded = [placement for placement in shard.placements if not placement.is_replicate()]
    if match.transposed or match.dims > 2:
        return Refusal("it is not that of a linear layer")
    if len(sharded) != 1 or not is_shard(sharded[0]) or sharded[0].dim != 0:
        return Refusal("its shards are placed as %s, expected rows along one dimension of a mesh", shard.placements)
    ranks = shard.device_mesh.size(shard.placements.index(sharded[0]))
    if not statically_known_true(shard.shape[0] % ranks == 0):
        return Refusal("its %s rows are sharded unevenly over %d ranks", shard.shape[0], ranks)
    made: Any = value(whole)
    if not all(placement.is_replicate() for placement in made.placements):
        return Refusal("what is gathered of it is placed as %s", made.placements)
    _, args, options = compat.method_call(local) or ("", (), {})
    placements = options.get("grad_placements") or ()
    if args or len(placements) != len(shard.placements) or not all(map(_is_sum, placements)):
        return Refusal("its gradient is placed as %s, expected partial sums", placements or None)
    if len(whole.users) > 1 or len(local.users) > 1:
        return SHARED
    return None


def _is_sum(placement: Any) -> bool:
    return bool(placement.is_partial()) and placement.reduce_op == "sum"
