"""The texts of the package's errors and warnings, as its sources have them, with … for what is filled in."""

import ast
import functools
import re
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping

from tests.house import trees

HOLE = "…"
# What says in the same words, of any option, field or argument, that it is unknown or of a wrong type.
GENERAL = ("wrong_type", "unknown")
BEGINNING = re.compile(r"te_inductor(\.autocast)?: ")
ASSERTIONS = "api/assertions.py"
# Tables for people, which begin as warnings do, and the texts of a FallbackError.
APART = ("command/", "presentation/", "api/accuracy_figures.py", ASSERTIONS)
Names = Mapping[str, ast.AST]


@functools.cache
def _nodes(path: str) -> list[ast.AST]:
    return list(ast.walk(trees()[path]))


@functools.cache
def _once(path: str | None) -> dict[str, ast.AST]:
    """The functions and assigned values of a module, or of the package, of which one alone has the name."""
    found: list[tuple[str, ast.AST]] = []
    for node in (node for name in trees() if path in (None, name) for node in _nodes(name)):
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.append((node.targets[0].id, node.value))
    times = Counter(name for name, _ in found)
    return {name: node for name, node in found if times[name] == 1}


def names(path: str) -> Names:
    """What a module may mean by a name: what the module itself, or else the package, calls so once."""
    return ChainMap(_once(path), _once(None))  # type: ignore[arg-type]


def _called(node: ast.AST) -> str | None:
    """The name of a function that is called, or of a value that is read."""
    name = node.func if isinstance(node, ast.Call) else node
    return name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", None)


def _said(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function returns, and what it puts into lists on the way."""
    inside = list(ast.walk(function))
    returned = [node.value for node in inside if isinstance(node, ast.Return) and node.value is not None]
    calls = [node for node in inside if isinstance(node, ast.Call) and _called(node) in ("append", "insert")]
    return [*returned, *(call.args[-1] for call in calls)]


def text(node: ast.AST, known: Names, depth: int = 2) -> str:
    """The literal text of an expression: that of the constants and functions that it names, too."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part, known, depth) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text(node.value, known, depth) if isinstance(node.value, ast.Name) else HOLE
    if isinstance(node, ast.BinOp):
        return text(node.left, known, depth) + text(node.right, known, depth)
    if isinstance(node, ast.FunctionDef):
        return HOLE.join(text(part, known, depth) for part in _said(node))
    name = _called(node)
    found = text(known[name], known, depth - 1) if depth and name in known else HOLE
    given = node.args if isinstance(node, ast.Call) else []
    return found + "".join(HOLE + text(one, known, depth) for one in given)


def errors(name: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each error of a class, but for the general ones."""
    for path in trees():
        for node in _nodes(path):
            if isinstance(node, ast.Call) and _called(node) == name and node.args:
                said = node.args[0]
                if not (isinstance(said, ast.Call) and _called(said) in GENERAL):
                    yield f"{path}:{node.lineno}", text(said, names(path))


def _beginning(path: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each sentence that begins with the package's name. Ranges of a profile have names that
    do, of two words."""
    pieces = {part for node in _nodes(path) if isinstance(node, ast.JoinedStr) for part in node.values}
    pieces |= {node.value for node in _nodes(path) if isinstance(node, ast.Expr)}  # docstrings
    for node in _nodes(path):
        first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
        if node not in pieces and isinstance(first, ast.Constant) and BEGINNING.match(str(first.value)):
            said = BEGINNING.sub("", text(node, names(path)))
            if len(said.split()) > 3:
                yield f"{path}:{node.lineno}", said


def assertions() -> Iterator[tuple[str, str]]:
    """The place and the text of each line that `assert_low_precision` may raise."""
    return _beginning(ASSERTIONS)


def warnings() -> Iterator[tuple[str, str]]:
    """The place and the text of each warning."""
    for path in trees():
        if not path.startswith(APART):
            yield from _beginning(path)


def says(fragment: str, said: str) -> bool:
    """Whether a text has a fragment's parts, in order, between which it says …"""
    parts = [re.escape(part.strip()) for part in fragment.split(HOLE) if part.strip()]
    return re.search(".*".join(parts), said, re.DOTALL) is not None
