"""Has the backward gather again what low precision gathers of parameters, where the user's own passes say so of gathers
in high precision: Note [Graph FSDP] in ops/sharded_weight.py.

Such a pass, torchtitan's for instance, marks what is gathered of an input of the graph alone. A gather in low precision
takes a scale besides."""

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from te_inductor.ops.casts import ONE_WAY
from te_inductor.passes.graph.node_kinds import is_view_or_cast

_collectives = torch.ops._c10d_functional
_COPIES = (torch.ops.aten.clone.default,)
_SAID = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE)


def mark(graph: fx.Graph) -> None:
    chains = [_chain(wait) for wait in graph.find_nodes(op="call_function", target=_collectives.wait_tensor.default)]
    low = [chain for chain in chains if any(node.target in ONE_WAY for node in chain)]
    others = [chain[0] for chain in chains if chain and chain not in low]
    policies = {wait.meta.get("recompute") for wait in others}
    if not low or len(policies) != 1 or not policies <= set(_SAID):  # of checkpoints, which have their own way
        return
    [policy] = policies
    marks = {name: others[0].meta[name] for name in ("recompute", "ac_graph_id") if name in others[0].meta}
    for chain in low:
        for node in (*chain, *(_views(chain[0]) if policy is CheckpointPolicy.MUST_RECOMPUTE else ())):
            if "recompute" not in node.meta or node.target in _COPIES:
                node.meta |= marks


def _chain(wait: fx.Node) -> list[fx.Node]:
    """What makes a gathered tensor of an input of the graph, the last first; empty where it is something else."""
    node: fx.Node = wait.args[0]  # type: ignore[assignment]
    if node.target is not _collectives.all_gather_into_tensor.default:
        return []
    found = [wait]
    while node.op != "placeholder":
        item = isinstance(node.args[0], fx.Node) and (len(node.all_input_nodes) == 1 or node.target in ONE_WAY)
        if not item:
            return []
        found.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return found


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """Views and copies of what was gathered, which the backward's products read."""
    for user in node.users:
        if is_view_or_cast(user) or user.target in _COPIES:
            yield user
            yield from _views(user)
