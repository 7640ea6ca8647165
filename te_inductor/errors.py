"""Every error and warning class of the package, and the sentences they share.

A message says what was found, what was expected, and what to do about it.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TEInductorError(Exception):
    """Base of every error that a user can fix. Never raised for a failure of this package's own passes."""


class OptionError(TEInductorError, ValueError):
    """A compile option is unknown, has a wrong type, or a wrong value."""


class RecipeError(TEInductorError, ValueError):
    """A recipe name is unknown, an object is no recipe, or a recipe's field is refused."""


class FallbackError(TEInductorError, RuntimeError):
    """Raised in place of the warning when `options={"fallback": "error"}` and a site does not run as asked."""


class DoubleBackwardError(TEInductorError, RuntimeError):
    """The gradient of a low-precision gradient was asked for."""


class StateError(TEInductorError, ValueError):
    """The state of delayed scaling does not fit the model, or a backward would read it after it has changed."""


class MainGradError(TEInductorError, ValueError):
    """A parameter's `main_grad` is gone, or is not a contiguous fp32 tensor of its shape on its device."""


class DeferredWgradError(TEInductorError, RuntimeError):
    """An optimizer would miss weight gradients that wait for `backward_dw`, or `backward_dw` got a wrong argument, or
    what it would add to was set to zero since."""


class StoredWeightError(TEInductorError, RuntimeError):
    """The program asks to train a stored weight or to change it in place, a weight cannot be stored, or the parts of a
    saved one do not fit its shape."""


class CheckpointError(TEInductorError, ValueError):
    """A checkpoint cannot be read, or does not fit the model; the text lists every key with what was expected."""


class GatherError(TEInductorError, ValueError):
    """FSDP2 cannot gather a model's weights in low precision, a gathered weight is used as it cannot be, or ranks would
    read each other's tensors otherwise than they are sent."""


class OmittedLogitsError(TEInductorError, RuntimeError):
    """The program reads logits that were left out, as `options={"logits": "omit"}` says."""


class LaunchError(TEInductorError, ValueError):
    """A kernel of ours would need more programs than CUDA runs at one launch."""


class FallbackWarning(UserWarning):
    """Something does not run as asked; the text lists sites by reason.

    There is one warning for each graph, and one more if its compile fails.
    """


NOT_EXPORTED = (
    "the exported program runs in high precision; te_inductor.lower(program, options=…) puts low precision into it, and"
    " te_inductor.quantize_(model, 'rowwise'), or 'nvfp4_weight_only', stores weights before the export"
)

NOT_SAVED = (
    "aot_compile with backend 'te', whose graphs get state and other tensors at each call, expected torch's own backends;"
    " carry the compile caches instead (torch.compiler.save_cache_artifacts), or te_inductor.lower an exported program"
)

NOT_KEPT = (
    "torch._dynamo.config.caching_precompile is True (variable TORCH_CACHING_PRECOMPILE) beside backend 'te', expected"
    " False: that cache of whole functions asks for neither backend nor options, so that it would run what another one has"
    " compiled; the other compile caches work"
)


def unknown(kind: str, found: object, known: Iterable[str]) -> str:
    """`unknown <kind> 'x'; did you mean 'y'?`, or the whole list where nothing is near."""
    names = sorted(known)
    folded = {name.lower(): name for name in names}
    near = get_close_matches(found.lower(), folded, n=1, cutoff=0.6) if isinstance(found, str) else []
    remedy = f"did you mean {folded[near[0]]!r}?" if near else f"expected one of {', '.join(names)}"
    return f"unknown {kind} {found!r}; {remedy}"


def wrong_type(name: str, found: object, expected: str) -> str:
    return f"{name} is {with_article(type(found).__name__)} ({found!r:.80}), expected {expected}"


def with_article(noun: str) -> str:
    """Returns a noun behind its article."""
    return f"{'an' if noun[:1] in 'aeiouAEIOU' else 'a'} {noun}"
