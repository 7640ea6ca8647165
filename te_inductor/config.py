"""Compile options and environment variables: the only reader of either.

Own options (everything else in `options` goes to Inductor, unchanged):

==========  ===========================================  ==========================================================
option      values                                       default
==========  ===========================================  ==========================================================
recipe      a recipe's name or instance                  ``TE_INDUCTOR_RECIPE``, else ``"auto"``
policy      {glob or function: recipe name or instance}  ``{}``; the first entry that matches wins
fallback    ``"warn"``, ``"error"``, ``"silent"``        ``"warn"``
wgrad       ``"grad"``, ``"main_grad"``, ``"deferred"``  ``"grad"``; ``"main_grad"`` adds weight gradients to it in
                                                         fp32, ``"deferred"`` computes them in `backward_dw`
weights     ``"each_call"``, ``"once"``                  ``"each_call"``; ``"once"`` casts a weight again when it has
                                                         changed, and keeps its copies: 2 bytes a weight in training
amax_group  a DeviceMesh, a ProcessGroup, the name of    ``TE_INDUCTOR_AMAX_GROUP``, which is a name or ``"none"``,
            one, or ``"none"``                           else None: the ranks that share each parameter. Delayed
                                                         scaling reduces amaxes over it; ``"none"``: over no ranks
mode        as in ``torch.compile(mode=…)``              None; here because torch refuses mode= beside options=
==========  ===========================================  ==========================================================

A policy's globs are over module paths; its functions are called with a layer's module path and (M, N, K).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, cast

from te_inductor.errors import OptionError, unknown, wrong_type

Fallback = Literal["warn", "error", "silent"]
Weights = Literal["each_call", "once"]
Wgrad = Literal["grad", "main_grad", "deferred"]

OWN_OPTIONS = ("recipe", "policy", "fallback", "weights", "wgrad", "amax_group", "mode")
FALLBACKS = ("warn", "error", "silent")
WEIGHTS = ("each_call", "once")
WGRADS = ("grad", "main_grad", "deferred")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
ENV_RECIPE = "TE_INDUCTOR_RECIPE"
ENV_AMAX_GROUP = "TE_INDUCTOR_AMAX_GROUP"


@dataclass(frozen=True)
class Options:
    """Parsed options. `recipe` and the policy's values are specs (name or instance) that `recipes.resolve` reads,
    `amax_group` is one that `amax_groups.resolve` does."""

    recipe: object = "auto"
    recipe_name: str = "recipe"  # what errors call it
    policy: tuple[tuple[str | Callable[..., bool], object], ...] = ()
    fallback: Fallback = "warn"
    weights: Weights = "each_call"
    wgrad: Wgrad = "grad"
    amax_group: Any = None
    amax_group_name: str = "option 'amax_group'"
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)


def parse(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
    """Read `torch.compile`'s `mode` and `options`, and the environment.

    Raises:
        OptionError: unknown key (naming the nearest), wrong type, wrong value.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(wrong_type("options", options, 'a dict, such as {"recipe": "current"}'))
    given = dict(options or {})
    recipe, recipe_name = given.pop("recipe", None), "recipe"
    if recipe is None:
        recipe, recipe_name = os.environ.get(ENV_RECIPE) or "auto", f"recipe of the environment variable {ENV_RECIPE}:"
    group, group_name = given.pop("amax_group", None), "option 'amax_group'"
    if group is None:
        group, group_name = os.environ.get(ENV_AMAX_GROUP) or None, f"environment variable {ENV_AMAX_GROUP}"
    fallback = _choice(given, "fallback", FALLBACKS, "warn")
    weights, wgrad = _choice(given, "weights", WEIGHTS, "each_call"), _choice(given, "wgrad", WGRADS, "grad")
    policy = _parse_policy(given.pop("policy", {}))
    own_mode = given.pop("mode", None)
    if own_mode is not None and mode is not None and own_mode != mode:
        raise OptionError(f"mode={mode!r} beside options={{'mode': {own_mode!r}}}; give one of them")
    mode = mode if own_mode is None else own_mode
    if mode is not None and mode not in MODES:
        raise OptionError(unknown("mode", mode, MODES))
    return Options(
        recipe,
        recipe_name,
        policy,
        cast(Fallback, fallback),
        cast(Weights, weights),
        cast(Wgrad, wgrad),
        group,
        group_name,
        mode,
        _parse_inductor(given),
    )


def _choice(given: dict[str, Any], name: str, known: tuple[str, ...], default: str) -> object:
    value = given.pop(name, default)
    if value not in known:
        raise OptionError(unknown(f"value of option {name!r}", value, known))
    return value


def _parse_policy(policy: object) -> tuple[tuple[str | Callable[..., bool], object], ...]:
    if not isinstance(policy, Mapping):
        raise OptionError(wrong_type("option 'policy'", policy, "a dict of {module-path glob or function: recipe}"))
    for key in policy:
        if not (isinstance(key, str) or callable(key)):
            expected = "a module-path glob (a string) or a function of module path and (M, N, K)"
            raise OptionError(wrong_type("a key of option 'policy'", key, expected))
    return tuple(policy.items())


def _parse_inductor(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names and types of Inductor's options; torch's own message lists a thousand names and no nearest
    one."""
    if not given:
        return {}
    from torch._inductor import config as inductor

    known = inductor.get_config_copy()
    parsed = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise OptionError(wrong_type("an option's name", key, "a string"))
        name = key.replace("-", "_")
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.8)
            others = "" if near else "; other keys are Inductor's, which has none of this name"
            raise OptionError(unknown("option", key, [*OWN_OPTIONS, *near]) + others)
        expected = inductor.get_type(name)  # type: ignore[attr-defined]
        if isinstance(expected, type) and not isinstance(value, expected):
            raise OptionError(wrong_type(f"Inductor option {key!r}", value, f"{expected.__name__}"))
        parsed[name] = value
    return parsed
