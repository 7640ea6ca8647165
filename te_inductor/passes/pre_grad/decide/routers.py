"""Routers: linear layers whose outputs choose experts. A choice turns on differences of logits that FP8 would round
away, for a product that costs next to nothing, so they stay in high precision unless a policy entry names them. An arg
max alone is no sign of one: classifiers end in it. One of which grouped products' offsets are made is."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from torch import fx

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.aliases import name
from te_inductor.passes.pre_grad.match.rule import Match

MOST = 2048  # experts; what chooses among more is a vocabulary's head
# What logits go through on their way to the choice.
_BETWEEN = frozenset(
    "softmax sigmoid softplus sqrt log_softmax to float type type_as bfloat16 half view reshape flatten unsqueeze"
    " squeeze contiguous detach add __add__ iadd sub mul __mul__ imul div truediv masked_fill where sum getitem scatter"
    " clone dropout _softmax _log_softmax _to_copy _unsafe_view index add_ mul_ div_ masked_fill_".split()
)
_CHOICES = frozenset("topk argsort sort".split())


def refusal(match: Match, routers: AbstractSet[fx.Node]) -> Refusal | None:
    """Why a router is left alone, one of `routers` or one whose outputs are chosen from; None of any other layer."""
    if match.groups or match.sizes[1] > MOST or not (match.node in routers or _chooses(match.node)):
        return None
    return Refusal("a router: its outputs choose experts (a policy entry overrides this)")


def of_groups(matches: Iterable[Match], products: AbstractSet[fx.Node]) -> set[fx.Node]:
    """The products of which sizes of experts' groups are made, whatever stands between them: such as an arg max."""
    pending = list({match.groups.ends for match in matches if match.groups and match.groups.ends is not match.x})
    seen, found = set(pending), set()
    while pending:
        node = pending.pop()
        if node in products:
            found.add(node)
            continue
        inputs = [one for one in node.all_input_nodes if one not in seen]
        seen.update(inputs)
        pending += inputs
    return found


def _chooses(node: fx.Node) -> bool:
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if name(user) in _CHOICES:
                return True
            if name(user) in _BETWEEN and user not in seen:
                seen.add(user)
                pending.append(user)
    return False
