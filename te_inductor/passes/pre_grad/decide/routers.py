"""Routers: linear layers whose outputs choose experts. A choice turns on differences of logits that FP8 would round
away, for a product that costs next to nothing, so they stay in high precision unless a policy entry names them; that is no
fallback. An arg max alone is no sign of one: classifiers end in it. One of which grouped products' offsets are made is.

A model may choose by something else than a product, such as distances. Then the last product before it is a layer like
any other. A router's outputs are scores, one a candidate, and each stays in its place until one of them is chosen: what
makes other numbers of them, by reducing them, by taking a part, or with a matrix of parameters, is no longer scores of
that product."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import torch
from torch import fx
from torch.utils import _pytree as pytree

from te_inductor.diagnostics import Outside, Refusal
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.operators import Kind
from te_inductor.passes.graph.owners import from_parameter
from te_inductor.passes.graph.values import is_tensor, value
from te_inductor.passes.graph.walks import reached
from te_inductor.passes.pre_grad.sites.rule import Match

MOST = 2048  # experts; what chooses among more is a vocabulary's head
# What logits go through on their way to the choice: each stays a score of its candidate.
_BETWEEN = Kind.PERMUTE | Kind.RESHAPE | Kind.SAME | Kind.CAST | Kind.COPY
_BETWEEN_TOO = frozenset("softmax log_softmax dropout sum getitem index scatter".split())


def refusal(match: Match, routers: AbstractSet[fx.Node]) -> Refusal | None:
    """Why a router is left alone, one of `routers` or one whose outputs are chosen from; None of any other layer."""
    if match.dims > 2 or match.sizes[1] > MOST or not (match.node in routers or _chooses(match.node)):
        return None
    return Outside("a router: its outputs choose experts (a policy entry overrides this)")


def of_groups(matches: Iterable[Match], products: AbstractSet[fx.Node]) -> set[fx.Node]:
    """The products of whose scores sizes of experts' groups are made, whatever chooses: such as an arg max."""
    chosen = {node for match in matches for part in match.parts for node in part.chosen_by(match)}
    seen = reached(chosen, lambda node: () if node in products else node.all_input_nodes).keys()
    return {node for node in seen if node in products and is_tensor(node) and _is_chosen_from(node, seen)}


def _is_chosen_from(product: fx.Node, among: AbstractSet[fx.Node]) -> bool:
    """Whether one of these nodes chooses of a product's outputs as they are: makes an integer or a truth of each, or of
    all candidates'."""
    candidates = value(product).shape[-1]

    def results(user: fx.Node) -> list[torch.Tensor]:
        return [one for one in pytree.tree_leaves(user.meta.get("example_value")) if torch.is_tensor(one)]

    def scores(node: fx.Node) -> list[fx.Node]:
        users = [user for user in node.users if user in among and not _brings_a_matrix(user)]
        return [user for user in users if any(_holds(one, candidates) for one in results(user))]

    read = (user for node in reached([product], scores) for user in node.users if user in among)
    return any(not one.is_floating_point() for user in read for one in results(user))


def _holds(scores: torch.Tensor, candidates: int) -> bool:
    last = scores.shape[-1] if scores.dim() > 1 else None
    return type(last) is type(candidates) is int and last == candidates  # asking a symbol would be a guard


def _brings_a_matrix(node: fx.Node) -> bool:
    return any(is_tensor(one) and value(one).dim() > 1 and from_parameter(one) for one in node.all_input_nodes)


def _computes(node: fx.Node) -> bool:
    """Whether it makes another score of each, and no truth."""
    return operators.read(node).kind is Kind.POINTWISE and is_tensor(node) and value(node).is_floating_point()


def _chooses(node: fx.Node) -> bool:
    def scores(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if _keeps_scores(user)]

    return any(operators.read(user).kind is Kind.CHOICE for one in reached([node], scores) for user in one.users)


def _keeps_scores(node: fx.Node) -> bool:
    called, kind, _ = operators.read(node)
    return kind in _BETWEEN or called in _BETWEEN_TOO or _computes(node)
