"""The options that have an `Effect`. To add one: a file with an `EFFECT`, and its name here."""

from collections.abc import Iterable, Iterator

from te_inductor.config import Options
from te_inductor.passes.graph.effect import Effect
from te_inductor.passes.joint import low_precision_saves
from te_inductor.passes.pre_grad import Pass
from te_inductor.passes.pre_grad.decide import invariance

EFFECTS = (invariance.EFFECT, low_precision_saves.EFFECT)


def asked(options: Options) -> list[Effect]:
    """The effects of those that the options ask for."""
    return [effect for effect in EFFECTS if effect.is_asked(options)]


def under(options: Options, passes: Iterable[Pass]) -> Iterator[Pass]:
    """Yields passes before autograd, with those in the places of some that an option puts there."""
    instead = {one: others for effect in asked(options) for one, others in effect.instead.items()}
    for one in passes:
        yield from instead.get(one, (one,))
