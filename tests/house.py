"""The figures of the package's structure: `python -m tests.house` prints them, `--list` with what they consist of.

Hops are counted on docs/walks.md, where they are written down by hand."""

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests import prose

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "te_inductor"
WALKS = ROOT / "docs/walks.md"
COMMITS = 40
HOP = re.compile(r"^\| \d+ \| \[`(?P<path>[\w/]+\.\w+)`\]\([^)]+\), `(?P<name>\w+)` \|", re.MULTILINE)


Node = TypeVar("Node", bound=ast.AST)


class Figure(NamedTuple):
    """A figure, and what it consists of, a line each."""

    value: object
    parts: Sequence[str] = ()


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The syntax trees of the package's files, by their paths in it."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def _nodes() -> dict[str, list[ast.AST]]:
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}


def nodes(kind: type[Node], *folders: str) -> Iterator[tuple[str, Node]]:
    """The nodes of a kind in the package's files, or in those of some folders, each with the path of its file."""
    for path, found in _nodes().items():
        if not folders or path.partition("/")[0] in folders:
            yield from ((path, node) for node in found if isinstance(node, kind))


def size(folder: Path) -> Figure:
    """The lines and the files of a folder, JSON apart."""
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".cu", ".h")]
    return Figure(f"{sum(len(path.read_text().splitlines()) for path in files)} / {len(files)}")


IMPORT = """
import sys, time, torch
known, begun = set(sys.modules), time.process_time()
import te_inductor
print(f"{time.process_time() - begun:.2f} s / {len(set(sys.modules) - known)}")
"""


def import_cost() -> Figure:
    """The seconds of `import te_inductor` beyond torch's, and the modules that it loads."""
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    return Figure(done.stdout.strip())


def functions() -> Iterator[tuple[int, str]]:
    """The lines and the name of each function that is no kernel and lies in none."""

    def visit(node: ast.AST, path: str) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if any(re.search(r"\b(jit|kernel)\b", ast.unparse(one)) for one in child.decorator_list):
                    continue
                yield child.end_lineno - child.lineno + 1, f"{path} {child.name}"
            yield from visit(child, path)

    for path, tree in trees().items():
        yield from visit(tree, path)


def longest_function() -> Figure:
    """The lines of the longest function that is no kernel."""
    found = sorted(functions(), reverse=True)
    return Figure(found[0][0], [f"{lines} {name}" for lines, name in found[:5]])


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules and folders of the package that a module imports, as paths without suffix."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "te_inductor":
            yield from (f"{node.module}.{alias.name}".replace(".", "/")[len("te_inductor/") :] for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name for alias in node.names if alias.name.startswith("te_inductor."))
            yield from (name.replace(".", "/")[len("te_inductor/") :] for name in names)


def folder_of(name: str) -> str:
    """The folder of what is imported by a name; a module of the package's root stands for itself."""
    while not (PACKAGE / f"{name}.py").exists() and not (PACKAGE / name).is_dir():
        name = name.rpartition("/")[0]  # the name of something in a module
        if not name:
            return "__init__"
    if (PACKAGE / name).is_dir():
        return name
    return name.rpartition("/")[0] or name


def imports_between_folders() -> dict[str, dict[str, set[str]]]:
    """The modules that make each folder import each other one, but what holds it or what it holds."""
    edges: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path, tree in trees().items():
        own = folder_of(path.removesuffix(".py").removesuffix("/__init__"))
        for name in imported(tree):
            other = folder_of(name)
            if not f"{other}/".startswith(f"{own}/") and not f"{own}/".startswith(f"{other}/"):
                edges[own][other].add(path)
    return edges


def cycles() -> Figure:
    """The pairs of folders that import each other."""
    edges = imports_between_folders()
    pairs = [(one, other) for one in sorted(edges) for other in sorted(edges[one]) if one < other]
    parts = [
        f"{one} <-> {other}: {', '.join(sorted(min(edges[one][other], edges[other][one], key=len)))}"
        for one, other in pairs
        if edges[other].get(one)
    ]
    return Figure(len(parts), parts)


def fields() -> Figure:
    """The fields of the largest records."""
    found = []
    for path, node in nodes(ast.ClassDef):
        marks = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
        if "dataclass" in marks or "NamedTuple" in marks:
            own = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            found.append((sum("ClassVar" not in ast.unparse(one) for one in own), f"{node.name} ({path})"))
    found.sort(reverse=True)
    return Figure(found[0][0], [f"{count} {name}" for count, name in found[:8]])


def files_a_commit() -> Figure:
    """The package's files that a commit touches, at the 90th percentile of the last commits that add a module."""
    command = ["git", "log", "--no-merges", "-M", "--name-status", "--format=%x00%h %s", "--", "te_inductor"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts = []
    for commit in log.split("\0")[1:]:
        subject, *rows = commit.strip().split("\n")
        if any(re.match(r"A\tte_inductor/.*\.py$", row) for row in rows):
            counts.append((sum("\t" in row for row in rows), subject))
        if len(counts) == COMMITS:
            break
    counts.sort()
    at = counts[(9 * len(counts) + 9) // 10 - 1][0]
    return Figure(at, [f"{count} {subject}" for count, subject in counts[::-1]])


def repeated(names: Iterator[tuple[str, str]]) -> Figure:
    """The names that stand in several places."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    parts = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    return Figure(len(parts), parts)


def repeated_stems() -> Figure:
    """The stems that several of the package's files have."""
    return repeated((Path(path).stem, path) for path in trees() if Path(path).stem != "__init__")


def repeated_classes() -> Figure:
    """The names that several of the package's classes have."""
    return repeated((node.name, path) for path, node in nodes(ast.ClassDef))


def fragments() -> Figure:
    """The docstrings and comments that begin as fragments."""
    found = [
        one for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.py") for one in prose.fragments(path)
    ]
    return Figure(len(found), [f"{one.path.relative_to(ROOT)}:{one.line} {one.text[:60]}" for one in found])


def walks() -> dict[str, list[tuple[str, str]]]:
    """The hops of each walk of docs/walks.md: a file of the package, and the function or class of it."""
    parts = re.split(r"^## (.+)$", WALKS.read_text(), flags=re.MULTILINE)[1:]
    found = {title: HOP.findall(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}
    return {title: hops for title, hops in found.items() if hops}


def hops(title: str) -> Figure:
    """The hops of one walk, and the files that they lie in."""
    found = walks()[title]
    return Figure(f"{len(found)} in {len({path for path, _ in found})}", [f"{path} {name}" for path, name in found])


FIGURES: dict[str, Callable[[], Figure]] = {
    "package, lines / files (JSON apart)": lambda: size(PACKAGE),
    "tests, lines / files": lambda: size(ROOT / "tests"),
    "import te_inductor, beyond torch, seconds / modules": import_cost,
    "longest function that is no kernel, lines": longest_function,
    "folders that import each other": cycles,
    "largest record, fields": fields,
    f"files of the package a commit that adds a module, p90 of {COMMITS}": files_a_commit,
    "file stems that repeat": repeated_stems,
    "class names that repeat": repeated_classes,
    "docstrings and comments that are fragments": fragments,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print what each figure consists of")
    arguments = parser.parse_args()
    walked = {f"hops in files, {title.lower()}": functools.partial(hops, title) for title in walks()}
    for name, count in (FIGURES | walked).items():
        figure = count()
        print(f"{name:68} {figure.value}")
        if arguments.list:
            print("".join(f"    {part}\n" for part in figure.parts), end="")


if __name__ == "__main__":
    main()
