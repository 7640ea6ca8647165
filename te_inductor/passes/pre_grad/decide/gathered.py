"""The recipe of a site whose weight FSDP2 gathered in low precision: the one that it was cast for."""

from te_inductor.diagnostics import Refusal
from te_inductor.ops.gathered_weight import GatheredWeight
from te_inductor.passes.pre_grad.plan import Candidate
from te_inductor.recipes import Recipe

_REMEDY = "give torch.compile and low_precision_all_gather the same recipe and policy"


def recipe_of(candidate: Candidate, weight: GatheredWeight) -> Recipe | None:
    """Of a site that has the recipe which the options ask for; where that is another one, notes so as an option that
    does not reach the site. None where the options keep the site in high precision."""
    wanted, found = candidate.recipe, weight.recipe
    if wanted is None:
        candidate.unmet["recipe"] = Refusal(
            "its weight was gathered in low precision, for %r, and is multiplied in high precision; %s",
            *(found.name, _REMEDY),
        )
        return None
    if wanted != found:
        name = repr(found.name) if wanted.name != found.name else str(found)
        candidate.unmet["recipe"] = Refusal("its weight was gathered for %s, which it runs in; %s", name, _REMEDY)
    return found
