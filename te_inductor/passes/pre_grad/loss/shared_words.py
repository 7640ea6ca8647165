"""Losses of logits that are DTensors, sharded by words: an output layer of `ColwiseParallel(use_local_output=False)`,
as `loss_parallel` wants it. Each rank computes its own words' part: Note [Loss of chunks] in runtime/eager/losses.py.
"""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import fx

from te_inductor import compat
from te_inductor.diagnostics import Refusal
from te_inductor.distributed.parallel import is_shard
from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.loss.reading import Reading
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.passes.pre_grad.sites.tensor_parallel import TensorParallel
from te_inductor.recipes.losses import SharedWords


def refusal(found: Reading) -> Refusal | None:
    """Why ranks do not compute their words' parts of a loss; None of logits that are no DTensor."""
    mesh = compat.mesh_of_dtensor(value(found.product))
    if mesh is None:
        return None
    if not all(map(_is_by_words, (found.product, *found.between))):
        return Refusal(
            "the output layer is tensor parallel, and its logits are gathered: leave them as they are sharded"
            " (ColwiseParallel(use_local_output=False)), and run the step inside of loss_parallel()"
        )
    if found.call.target not in (F.cross_entropy, F.nll_loss):
        return Refusal("its words are shared by ranks, and it is written otherwise than F.cross_entropy")
    if not _is_whole(found.call, mesh) or not (_is_plain(found.labels) or _is_whole(found.labels, mesh)):
        return Refusal("its words are shared by ranks, and its labels or its results are sharded too")
    if found.loss.smoothing:
        return Refusal("its words are shared by ranks, and its labels are smoothed")
    if found.loss.sums:
        return Refusal("its words are shared by ranks, and the logarithms of its sums are read too")
    return None


def opened(match: Match, found: Reading) -> tuple[Match, Reading]:
    """The output layer and its loss, with what they are among the ranks that share its words. The layer reads x as it is
    behind a gather, which is saved for the backward anyway."""
    part = match.part(TensorParallel)
    if part is None:
        return match, found
    assert part.parallel is not None  # as its refusals say
    shared = SharedWords(part.parallel.group, part.parallel.ranks, value(match.node).shape[-1])
    gathered = match.before[:1] if part.parallel.gathers else ()
    x, before = (gathered[0], ()) if gathered else (match.x, match.before)
    whole = match.having(part.of_words, x=x, before=before, behind=())
    return whole, replace(found, loss=replace(found.loss, shared=shared))


def _is_plain(node: fx.Node) -> bool:
    return compat.mesh_of_dtensor(value(node)) is None


def _is_by_words(node: fx.Node) -> bool:
    """Whether a tensor (…, V) is sharded along V."""
    tensor: Any = value(node)
    if _is_plain(node) or len(tensor.placements) != 1:
        return False
    [placement] = tensor.placements
    return is_shard(placement) and placement.dim % tensor.dim() == tensor.dim() - 1


def _is_whole(node: fx.Node, mesh: Any) -> bool:
    tensor: Any = value(node)
    return compat.mesh_of_dtensor(tensor) == mesh and all(one.is_replicate() for one in tensor.placements)
