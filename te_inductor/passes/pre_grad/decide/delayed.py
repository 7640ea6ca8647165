"""The sites that can have delayed scaling's state."""

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.bodies import Bodies
from te_inductor.passes.graph.owners import owner_of
from te_inductor.passes.pre_grad.sites.rule import Match


def refusal(match: Match, bodies: Bodies, transforms: str | None) -> Refusal | None:
    """Why a site can keep no state; `transforms` of torch.func that it is in let nothing outside of them be written."""
    if transforms is not None:
        return Refusal("delayed scaling inside a transform of torch.func (%s), which keeps no state", transforms)
    if not bodies.reaches(match.node.graph):
        return Refusal("delayed scaling inside a control-flow body, which its state does not reach")
    owner = owner_of(match.weight, bodies)
    if owner is None:
        return Refusal("delayed scaling keeps its state with a parameter, and the weight comes from none")
    return None
