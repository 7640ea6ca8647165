"""The effect of a compile option that changes which passes run, or how Inductor compiles their graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_inductor.config import Options
from te_inductor.presentation.report import Report


def _nothing(*_: object) -> None: ...


@dataclass(frozen=True)
class Effect:
    """What an option does beside what passes read of it; `passes/effects.py` has all of them."""

    is_asked: Callable[[Options], bool]
    tell: Callable[[Any, dict[str, Any]], None]  # changes what Inductor is told for the graph of a `Plan`
    check: Callable[[Options], None] = _nothing  # raises where the program tells Inductor otherwise
    finish: Callable[[Options, Report], None] = _nothing  # says what came of it, when the graph is compiled
    rows_alone: bool = False  # whether kernels are chosen as for a row by itself
    # Passes before autograd, functions of a `Plan`, each with those that run in its place.
    instead: Mapping[Callable[..., None], tuple[Callable[..., None], ...]] = field(default_factory=dict)
