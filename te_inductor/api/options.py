"""The compile options as types, and as a list to look at."""

from collections.abc import Callable, Mapping
from typing import TypedDict

from te_inductor.config import OPTIONS, Attention, Fallback, Guard, Logits, Option, Saved, Weights, Wgrad
from te_inductor.recipes import BackwardPrecision, Recipe

Glob = str | Callable[..., bool]  # a glob over module paths, or a function of a path and (M, N, K)
Policy = Mapping[str, str | Recipe] | Mapping[Callable[..., bool], str | Recipe] | Mapping[Glob, str | Recipe]


class CompileOptions(TypedDict, total=False):
    """The package's own keys of ``torch.compile(model, backend="te", options=...)``, as type checkers know them. torch's
    annotation is a `dict`: write ``options=dict[str, Any](options)`` there. Options of Inductor's are none of its keys."""

    recipe: str | Recipe
    backward: str | Recipe | BackwardPrecision | Mapping[str, str | Recipe]
    policy: Policy
    fallback: Fallback
    weights: Weights
    wgrad: Wgrad
    attention: Attention
    logits: Logits
    guard: Guard
    batch_invariant: bool
    saved: Saved | Mapping[str, Saved]
    amax_group: object
    mode: str


def list_options() -> list[Option]:
    """The package's own compile options, each with its name, what values it may have, its default, what it costs, and the
    environment variable that it comes from where it is not given."""
    return [*OPTIONS.values()]
