"""Every error and warning class of the package, and the sentences they share.

A message says what was found, what was expected, and what to do about it.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TEInductorError(Exception):
    """Base of every error that the user can mend. Never raised for a failure of our own passes."""


class OptionError(TEInductorError, ValueError):
    """A compile option is unknown, has a wrong type, or a wrong value."""


class RecipeError(TEInductorError, ValueError):
    """A recipe name is unknown, an object is no recipe, or a recipe's field is refused."""


class FallbackError(TEInductorError, RuntimeError):
    """Raised in place of the warning when `options={"fallback": "error"}` and a site does not run as asked."""


class DoubleBackwardError(TEInductorError, RuntimeError):
    """The gradient of a low-precision gradient was asked for."""


class StateError(TEInductorError, ValueError):
    """State of delayed scaling that does not fit the model it is loaded into, or that a backward would read too
    late."""


class MainGradError(TEInductorError, ValueError):
    """A parameter's `main_grad` is gone, or no tensor that its gradient can be added to in a GEMM's layout."""


class DeferredWgradError(TEInductorError, RuntimeError):
    """Weight gradients wait for `backward_dw` where an optimizer would miss them, or it was called with something
    else."""


class StoredWeightError(TEInductorError, RuntimeError):
    """A weight that is stored in low precision was to be trained or changed in place, or cannot be stored so."""


class FallbackWarning(UserWarning):
    """Something does not run as asked; the text lists sites by reason. One a graph, and one more if its compile
    fails."""


def unknown(kind: str, found: object, known: Iterable[str]) -> str:
    """`unknown <kind> 'x'; did you mean 'y'?`, or the whole list where nothing is near."""
    names = sorted(known)
    near = get_close_matches(str(found), names, n=1, cutoff=0.6)
    remedy = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
    return f"unknown {kind} {found!r}; {remedy}"


def wrong_type(name: str, found: object, expected: str) -> str:
    return f"{name} is a {type(found).__name__} ({found!r:.80}), expected {expected}"
