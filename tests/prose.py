"""The openings of docstrings and comments, and which of them are fragments.

A docstring begins with a verb, or with a noun phrase and its article ("Returns the amax of each row", "The sites of a
graph"), or with a clause that stands for a noun ("Whether the weight is stored"). "Of names of one tensor." leaves the
reader to guess of what. So does a comment that begins so."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Words that begin no noun phrase and no verb: what they hang on would have to stand before them.
HANGING = frozenset(
    """above after again against along alongside also among and apart around as at because before behind below beneath
    beside besides between beyond but by down during else except for from however if in inside instead into
    likewise like near nor not of off on once only onto or otherwise outside over past per since so than
    that then therefore those through throughout till to toward towards under unless unlike until up upon via
    when where wherever which whichever while who whoever whom whose with within without""".split()
)
# A comment is a sentence, which may begin with its place or its condition ("In eager code, ...").
LEADING = frozenset(
    """after although at because before below beyond down except for from however if in inside instead near
    not on once only outside over since so then therefore through throughout under unless until up upon via
    when where wherever whichever while who whoever with within without""".split()
)
WORD = re.compile(r"[A-Za-z]+")


class Opening(NamedTuple):
    """The first words of a docstring or of a comment, and where they stand."""

    path: Path
    line: int
    text: str


def docstrings(path: Path) -> Iterator[Opening]:
    """The openings of a file's docstrings."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    for node in waiting:  # which grows by the statements inside of each
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield Opening(path, node.body[0].lineno, text)
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


def comments(path: Path) -> Iterator[Opening]:
    """The openings of a file's comments that have lines of their own; adjacent lines are one comment."""
    last = 0
    for line, text in enumerate(path.read_text().splitlines(), 1):
        if text.lstrip().startswith("#"):
            if line != last + 1:
                yield Opening(path, line, text.lstrip("# "))
            last = line


def is_fragment(text: str, hanging: frozenset[str] = HANGING) -> bool:
    """Whether a text begins with a word that hangs on something before it."""
    word = WORD.match(text)
    return word is not None and word[0].lower() in hanging


def fragments(path: Path) -> list[Opening]:
    """The docstrings and comments of a file that begin as fragments."""
    found = [opening for opening in docstrings(path) if is_fragment(opening.text)]
    return found + [opening for opening in comments(path) if is_fragment(opening.text, HANGING - LEADING)]
