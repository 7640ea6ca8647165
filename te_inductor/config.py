"""Compile options and environment variables: the only reader of either.

`OPTIONS` has the package's own; everything else in `options` goes to Inductor, unchanged.

An option that is None is as one that is not given. Before its default such an option has the value of its environment
variable, ``TE_INDUCTOR_`` and its name in capitals. A policy is a JSON object there, of globs and names of recipes, and
`backward` may be one, of GEMMs; an empty variable is none.

TE_INDUCTOR_TABLES is of the environment alone: a folder of tables that ``te-inductor tune`` has written.

A policy's globs are over module paths; its functions are called with a layer's module path and (M, N, K).
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from te_inductor.errors import OptionError, unknown, wrong_type

Fallback = Literal["warn", "error", "silent"]
Weights = Literal["each_call", "once"]
Wgrad = Literal["grad", "main_grad", "deferred"]
Attention = Literal["auto", "as_written"]
Logits = Literal["keep", "omit"]
Guard = Literal["warn", "heal", "off"]
Saved = Literal["high_precision", "low_precision"]


def _parse_policy(policy: object, source: str | None) -> tuple[tuple[str | Callable[..., bool], object], ...]:
    if source is not None:
        return _parse_json(str(policy), source, "recipe", '{"lm_head": "none"}')
    if not isinstance(policy, Mapping):
        raise OptionError(wrong_type("option 'policy'", policy, "a dict of {module-path glob or function: recipe}"))
    for key in policy:
        if not (isinstance(key, str) or callable(key)):
            expected = "a module-path glob (a string) or a function of module path and (M, N, K)"
            raise OptionError(wrong_type("a key of option 'policy'", key, expected))
    return tuple(policy.items())


def _parse_saved(saved: Any, source: str | None) -> Saved | tuple[tuple[str, Saved], ...]:
    name, known = source or "option 'saved'", get_args(Saved)
    if source is not None and saved.lstrip().startswith("{"):
        saved = dict(_parse_json(saved, source, "precision", '{"*.mlp": "low_precision"}'))
    entries: Any = tuple(saved.items()) if isinstance(saved, Mapping) else (("*", saved),)
    for glob, value in entries:
        if not isinstance(glob, str):
            raise OptionError(wrong_type(f"a key of {name}", glob, "a module-path glob (a string)"))
        if value not in known:
            raise OptionError(unknown(f"value of {name}", value, known))
    return entries if isinstance(saved, Mapping) else saved  # type: ignore[no-any-return]


def _parse_json(text: str, source: str, what: str, example: str) -> tuple[tuple[str, Any], ...]:
    expected = f"expected a JSON object of module-path globs and {what}s, such as {example}"
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)
    except ValueError as error:
        raise OptionError(f"{source} is no JSON ({error}): {text!r:.80}; {expected}") from None
    if not isinstance(pairs, tuple):
        raise OptionError(f"{source} is {text!r:.80}; {expected}")
    globs = [glob for glob, _ in pairs]
    for glob, value in pairs:
        if not isinstance(value, str):
            raise OptionError(f"{source} gives {glob!r} the {what} {json.dumps(value):.80}; expected a {what}'s name")
        if globs.count(glob) > 1:
            raise OptionError(f"{source} has {glob!r} twice; expected each glob once, as the first that matches wins")
    return pairs


def _parse_switch(value: object, source: str | None) -> bool:
    """A bool, or what a variable has for one."""
    found = value if source is None else {"0": False, "false": False, "1": True, "true": True}.get(str(value).lower())
    if not isinstance(found, bool):
        called = "option 'batch_invariant'" if source is None else source
        raise OptionError(wrong_type(called, value, "True or False" if source is None else "true or false"))
    return found


@dataclass(frozen=True)
class Option:
    """A compile option: what `te_inductor.list_options()` returns, what the reader below reads, and a row of the table in
    docs/guides/options.md."""

    name: str
    values: str  # that it may have
    default: object
    price: str  # of the values that are no default, or of the default where that has one
    choices: tuple[str, ...] = ()  # the values of a choice, the default first
    not_of_programs: str = ""  # why a program that is lowered cannot have it, and what to do instead
    reader: Callable[[Any, str | None], object] | None = field(default=None, repr=False)  # as `read`

    @property
    def variable(self) -> str:
        """The environment variable that it comes from where it is not given."""
        return f"TE_INDUCTOR_{self.name.upper()}"

    def read(self, value: Any, source: str | None) -> object:
        """The value that was given, or that a variable has, which errors then name."""
        if self.reader is not None:
            return self.reader(value, source)
        if self.choices and value not in self.choices:
            own = self.name if self.default is None else f"value of option {self.name!r}"  # `mode` is torch's too
            raise OptionError(unknown(own if source is None else f"value of {source}", value, self.choices))
        return value


def _choices(name: str, price: str, *values: str, not_of_programs: str = "") -> Option:
    return Option(name, ", ".join(f'"{value}"' for value in values), values[0], price, values, not_of_programs)


AOT = "torch._inductor.aoti_compile_and_package(inductor_configs=…)"
OPTIONS = {
    one.name: one
    for one in (
        Option(
            "recipe",
            '"current", "delayed", "rowwise", "block", "mxfp8", "mxfp4", "nvfp4", "nvfp4_weight_only" (for stored weights),'
            ' "none", "auto" (which is current), or an instance such as te_inductor.recipes.Float8CurrentScaling() or'
            " CustomRecipe(factory)",
            "auto",
            "what a recipe loses in accuracy; casts, which the size rule weighs",
        ),
        Option(
            "policy",
            "{glob or function: recipe}; the first entry that matches a layer wins",
            {},
            "a layer that an entry names is in low precision also where that is slower",
            reader=_parse_policy,
        ),
        Option(
            "backward",
            '"high_precision", "dequantized", a recipe as above, or {"dgrad": …, "wgrad": …} of these',
            None,
            '"high_precision": GEMMs of the backward as fast as without this package, inputs of layers saved as there;'
            ' "dequantized": the same GEMMs, and kernels that write their operands',
            not_of_programs="a program has none",
        ),
        _choices("fallback", "none", "warn", "error", "silent"),
        _choices(
            "weights",
            '"once": its copies, 2 bytes a weight in training',
            *("each_call", "once"),
            not_of_programs="te_inductor.quantize_(model, recipe) before torch.export stores weights in low precision",
        ),
        _choices(
            "wgrad",
            '"main_grad": 4 bytes a weight, which the program brings',
            *("grad", "main_grad", "deferred"),
            not_of_programs="weight gradients are outputs of the graph",
        ),
        _choices("attention", "none", "auto", "as_written"),
        _choices("logits", '"omit": reading the logits is an error', "keep", "omit"),
        Option(
            "batch_invariant",
            "False, True",
            False,
            "True: forward GEMMs by one kernel, and attention that stores its scores; on a CPU code without vectors",
            not_of_programs="a program is compiled by other options than ours",
            reader=_parse_switch,
        ),
        Option(
            "saved",
            '"high_precision", "low_precision", or {glob: one of these}',
            "high_precision",
            '"low_precision": gradients of norms, of activations and of the layers that read them have one more rounding to'
            " E4M3",
            not_of_programs="a program saves nothing for a backward",
            reader=_parse_saved,
        ),
        Option(
            "amax_group",
            'a DeviceMesh, a ProcessGroup, the name of one, or "none"',
            None,
            "one all-reduce of all amaxes in the forward, and one in the backward",
            not_of_programs="it is for delayed scaling, which keeps state",
        ),
        _choices(
            "guard",
            '"heal": the first call of each graph compiles two, and each call has the host read what the last one counted,'
            " and a layer that is moved has its graph compiled anew",
            *("warn", "heal", "off"),
            not_of_programs="it is for delayed scaling, which keeps state",
        ),
        Option(
            "mode",
            '"default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"',
            None,
            "as in torch.compile: the memory of CUDA graphs, the time of measuring",
            ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            f"give what AOTInductor is to do to {AOT}",
        ),
    )
}
OWN_OPTIONS = tuple(OPTIONS)
TABLES = "TE_INDUCTOR_TABLES"  # of no compile: a folder of tables that `te-inductor tune` has written


@dataclass(frozen=True)
class Options:
    """Parsed options, each by its name. `recipe` and the policy's values are specs (name or instance) that
    `recipes.resolve` reads, `backward` is one that `recipes.backward_precision` does, `amax_group` one that
    `amax_groups.resolve` does."""

    recipe: object = "auto"
    policy: tuple[tuple[str | Callable[..., bool], object], ...] = ()
    fallback: Fallback = "warn"
    weights: Weights = "each_call"
    wgrad: Wgrad = "grad"
    attention: Attention = "auto"
    logits: Logits = "keep"
    guard: Guard = "warn"
    saved: Saved | tuple[tuple[str, Saved], ...] = "high_precision"
    backward: object = None
    batch_invariant: bool = False
    amax_group: Any = None
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(
        default_factory=dict
    )  # of each that no option gave: what errors call its variable

    def called(self, name: str) -> str:
        """What errors call an option."""
        return self.sources.get(name, f"option {name!r}")

    def recipe_called(self, name: str) -> str:
        """What errors call a recipe that an option has."""
        return f"recipe of the {self.sources[name]}:" if name in self.sources else "recipe"

    @property
    def saves_low(self) -> list[str]:
        """The globs of modules for which a forward saves in low precision."""
        entries = (("*", self.saved),) if isinstance(self.saved, str) else self.saved
        return [glob for glob, value in entries if value == "low_precision"]

    def in_cuda_graphs(self) -> bool:
        """Whether Inductor records CUDA graphs."""
        import torch
        from torch._inductor import config

        patches = torch._TorchCompileInductorWrapper(self.mode, dict(self.inductor), None).config
        return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))


def parse(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
    """Read `torch.compile`'s `mode` and `options`, and the environment.

    Raises:
        OptionError: unknown key (naming the nearest), wrong type, wrong value.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(wrong_type("options", options, 'a dict, such as {"recipe": "current"}'))
    given = dict(options or {})
    own_mode = given.get("mode")
    if own_mode is not None and mode is not None and own_mode != mode:
        raise OptionError(f"mode={mode!r} beside options={{'mode': {own_mode!r}}}; give one of them")
    given["mode"] = mode if own_mode is None else own_mode
    found, sources = {}, {}
    for name, option in OPTIONS.items():
        value, source = _take(given, name)
        if source is not None:
            sources[name] = source
        if value is not None:
            found[name] = option.read(value, source)
    return Options(**found, inductor=_parse_inductor(given), sources=sources)  # type: ignore[arg-type]


def tables() -> Path | None:
    """The folder of the user's tables of measured GEMMs."""
    folder = os.environ.get(TABLES)
    return Path(folder).absolute() if folder else None


def unknown_variables() -> list[str]:
    """What to say of variables that are named as ours are and that nothing reads."""
    known = [*(option.variable for option in OPTIONS.values()), TABLES]
    ours = (name for name in os.environ if name.startswith("TE_INDUCTOR_") and name not in known)
    return [unknown("environment variable", name, known) for name in sorted(ours)]


def _take(given: dict[str, Any], name: str) -> tuple[Any, str | None]:
    """An option, or else its environment variable, and what errors call the variable; None where there is neither."""
    value = given.pop(name, None)
    if value is not None:
        return value, None
    variable = OPTIONS[name].variable
    text = os.environ.get(variable)
    return (text, f"environment variable {variable}") if text else (None, None)


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
