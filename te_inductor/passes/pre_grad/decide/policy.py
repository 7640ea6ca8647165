"""The policy of `options["policy"]`: which layers have a recipe of their own, by module path, or as a function says."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from te_inductor import recipes
from te_inductor.config import Fallback
from te_inductor.diagnostics import say
from te_inductor.errors import OptionError, wrong_type
from te_inductor.presentation.paths import HIDDEN
from te_inductor.recipes import Recipe


@dataclass(frozen=True)
class Entry:
    """A glob over module paths, or a function of a layer's module path and (M, N, K); and the recipe that it gives."""

    pattern: str | Callable[[str, tuple[int | None, int | None, int | None]], bool]
    recipe: Recipe | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return (
            self.pattern if isinstance(self.pattern, str) else getattr(self.pattern, "__qualname__", repr(self.pattern))
        )

    def matches(self, names: Sequence[str], sizes: tuple[Any, Any, Any]) -> bool:
        """Whether it speaks of this layer: a glob by any of the layer's names, a function by the first. Its function is
        given None for a size that is symbolic.

        Raises:
            OptionError: the function raised, or returned no bool.
        """
        if isinstance(self.pattern, str):
            return any(fnmatchcase(name, self.pattern) for name in names)
        fqn = names[0]
        m, n, k = (size if isinstance(size, int) else None for size in sizes)
        try:
            found = self.pattern(fqn, (m, n, k))
        except Exception as error:
            raise OptionError(
                f"policy function {self.name} raised {type(error).__name__} for {fqn or '(root)'} of M={m}, N={n},"
                f" K={k} (None is a symbolic size): {error}"
            ) from error
        if not isinstance(found, bool):
            raise OptionError(
                wrong_type(f"what policy function {self.name} returned for {fqn or '(root)'}", found, "a bool")
            )
        return found


class Policy:
    """The entries of parsed options, and which of them a layer has had."""

    def __init__(self, policy: Iterable[tuple[Any, object]], name: str = "recipe") -> None:
        """`name` is what errors call a recipe of them."""
        self.entries = [Entry(pattern, recipes.resolve(spec, name)) for pattern, spec in policy]
        self._used: set[Entry] = set()

    def first(self, names: Sequence[str], sizes: tuple[Any, Any, Any]) -> Entry | None:
        """The entry that would give the layer its recipe."""
        return next((entry for entry in self.entries if entry.matches(names, sizes)), None)

    def of(self, names: Sequence[str], sizes: tuple[Any, Any, Any]) -> Entry | None:
        """The entry that gives the layer its recipe, which then is used."""
        entry = self.first(names, sizes)
        self._used |= {entry} if entry else set()
        return entry

    @property
    def unused(self) -> list[str]:
        """The names of the others."""
        return [entry.name for entry in self.entries if entry not in self._used]

    def tell(self, said: Sequence[str], fallback: Fallback, which: str = "") -> None:
        """Says what there was to say of layers, and which entries match none; `which`: of those that this is about."""
        unmatched = f"matches no linear layer{which}{HIDDEN}"
        said = [*said, *(f"te_inductor: policy entry {name!r} {unmatched}" for name in self.unused)]
        if said:
            say("\n".join(said), fallback)
