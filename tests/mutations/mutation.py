"""A fault, and where it belongs."""

import functools
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """It is found by the text that it replaces, which occurs once in the package, whichever module that is in."""

    name: str  # what is wrong in the mutant
    text: str  # of the package, once
    becomes: str
    first: tuple[str, ...]  # arguments of pytest: the tests that should find it


@functools.cache
def _sources(package: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in package.rglob("*.py")}


def place_of(text: str, package: Path) -> Path | None:
    """The one module that has it, once."""
    found = [path for path, source in _sources(package).items() for _ in range(source.count(text))]
    return found[0] if len(found) == 1 else None
