"""The passes that find losses behind output layers, and put losses in high precision in their places.

Logits may be DTensors that are sharded by words, those of an output layer of `ColwiseParallel(use_local_output=False)`,
as `loss_parallel` wants it. Each rank computes its own words' part: Note [Loss of chunks] in runtime/eager/losses.py.
"""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import fx

from te_inductor import compat, targets
from te_inductor.diagnostics import Refusal
from te_inductor.distributed.parallel import is_shard
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.values import is_gathered, value
from te_inductor.passes.pre_grad.loss import reading
from te_inductor.passes.pre_grad.loss.reading import Reading
from te_inductor.passes.pre_grad.loss.site import LossOfLinear, LossPart, has_known_sizes, rewrite_in_high_precision
from te_inductor.passes.pre_grad.plan import Candidate, Plan
from te_inductor.passes.pre_grad.sites.part import TensorParallel
from te_inductor.passes.pre_grad.sites.rule import Match
from te_inductor.presentation.report import LossSite, Unmet
from te_inductor.recipes.losses import SharedWords, slots_of_loss
from te_inductor.runtime.omitted_logits import OmittedOutput

# From how many words on a loss is computed in chunks. By the tokens, of which there may be more on one rank than on
# another, ranks would have other quantizers, and wait for each other in the reduction of their amaxes.
LEAST_WORDS = 2**14


def match_losses(plan: Plan) -> None:
    """Find losses whose logits nothing else reads, or nothing but the program, which does without them."""
    graph = plan.gm.graph
    sites = {site.match.node: site for site in plan.candidates}
    in_grad_mode = Bodies(plan.gm).in_grad_mode()
    losses = [found for found in map(reading.read, graph.nodes) if found is not None]
    parts = {node for found in losses for node in found.own}
    for found in losses:
        node, site = found.call, sites.get(found.product)
        if site is None or node in parts:
            continue  # nothing says that there is an output layer, or the loss is one row's of another one
        refusal = _refusal_of_layer(site.match) or _refusal_of_words(found) or found.refusal
        if refusal is None:
            match, found = _opened(site.match, found)
            refusal = _refusal(plan, site, match, found, in_grad_mode)
        if refusal is None:
            site.rule = LossOfLinear()
            site.match = match.having(LossPart(found), behind=(*found.steps, node))
            plan.outcome.omitted.extend(_places(graph, found))
        elif plan.options.logits == "omit" and value(node).requires_grad:
            plan.outcome.report.unmet.append(Unmet("logits", site.fqn, str(refusal)))
        plan.products.losses.append((site, found, refusal))


def report_losses(plan: Plan) -> None:
    """Write down how each loss is computed."""
    for site, found, refusal in plan.products.losses:
        how, why = "in chunks, without logits" if found.outputs else "in chunks", refusal
        if refusal is None and not site.low and not found.outputs:
            why = Refusal("the output layer stays in high precision")
        how = how if why is None else "as_written"
        form = "log_softmax" if found.reduction == "picked" else "cross_entropy"
        plan.outcome.report.losses.append(LossSite(site.fqn, form, how, None if why is None else str(why)))


def rewrite_losses(plan: Plan) -> None:
    """Put losses in high precision in their places, where that leaves logits out."""
    for site in plan.candidates:
        part = site.match.part(LossPart)
        if part is not None and part.is_taken(site.low) and not site.low:
            rewrite_in_high_precision(site.match)


def _refusal_of_layer(match: Match) -> Refusal | None:
    """Why no loss of such a layer is computed in chunks."""
    if (of_part := match.first_refusal(lambda part: part.refuse_loss())) is not None:
        return of_part
    between_ranks = match.part(TensorParallel)
    others = [part for part in match.parts if part is not between_ranks]
    if others or match.dims > 2 or (between_ranks is None and (match.before or match.behind)):
        return Refusal("tensors of the output layer go between ranks, or it is none")
    return None


def _refusal(plan: Plan, site: Candidate, match: Match, found: Reading, in_grad_mode: set[fx.Node]) -> Refusal | None:
    """Why the loss needs its logits, of its layer as the match has it."""
    operands = [one for one in (match.x, match.weight, match.bias) if one is not None]
    if found.product in plan.products.inlined:
        return Refusal("the output layer is a sum of products, or a convolution, which may be put back")
    if is_gathered(match.weight):
        return Refusal("the weight of the output layer is gathered in low precision")
    if site.stored:
        return Refusal("the weight of the output layer is stored in low precision")
    place = found.place
    readers = (found.call, place, *(one.node for one in found.sums))
    if any((found.product in in_grad_mode) != (node in in_grad_mode) for node in readers):
        return Refusal(
            "gradients are recorded of some of the output layer, its loss and what reads its sums, not of all"
        )
    late = found.late_labels()
    if late is None:
        return Refusal("its labels are made behind what reads the logarithms of its sums")
    if plan.writes.between([*operands, found.product, *found.steps], found.product, found.call):
        return Refusal("the graph writes what the loss is made of")
    written = any(plan.writes.between([one.node], found.product, None) for one in found.sums)
    if written or plan.writes.between([found.labels, *late], place, found.call):
        return Refusal("the graph writes its labels, or the logarithms of its sums")
    if not all(has_known_sizes(match, one) for one in found.sums):
        return Refusal("the logarithms of its sums have sizes that only the call knows")
    if site.low and site.slots is not None and slots_of_loss(site.slots) is None:
        return Refusal("the products of recipe %r have no backward of a loss", site.recipe.name if site.recipe else "")
    if found.outputs:
        refusal = _kept(plan, found)
        if refusal is not None:
            return refusal
    elif not _gains(site):
        return Refusal("its logits stay in the graph, and only low precision on a GPU gains by chunks of them")
    elif (words := value(found.product).shape[-1]) < LEAST_WORDS:
        return Refusal("a vocabulary of %d words, too few to gain by chunks", words)
    return None


def _gains(site: Candidate) -> bool:
    """Whether a device gains by computing a loss in chunks where no logits leave the graph."""
    return site.low and targets.of(value(site.match.weight).device).is_gpu


def _kept(plan: Plan, found: Reading) -> Refusal | None:
    """Why the program gets its logits."""
    if plan.options.logits == "keep":
        saved = "" if found.logits_bytes is None else f", of {found.logits_bytes / 2**20:.0f} MiB"
        return Refusal("the program gets its logits%s: options={'logits': 'omit'} leaves them out", saved)
    if not value(found.call).requires_grad:
        return Refusal("the program gets its logits, which are left out in training alone")
    static = all(isinstance(size, int) for node in found.outputs for size in value(node).shape)
    alike = all(value(node).shape[:-1] == value(found.product).shape[:-1] for node in found.outputs)
    return None if static or alike else Refusal("the program gets logits of a size that only the call knows")


def _places(graph: fx.Graph, found: Reading) -> list[OmittedOutput]:
    """Returns the places among the graph's outputs where logits are left out."""
    [results] = graph.output_node().args
    outputs = results if isinstance(results, tuple | list) else (results,)
    words = value(found.product).shape[-1]
    return [OmittedOutput(place, words, value(one).dtype) for place, one in enumerate(outputs) if one in found.outputs]


def _refusal_of_words(found: Reading) -> Refusal | None:
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


def _opened(match: Match, found: Reading) -> tuple[Match, Reading]:
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
