"""The documentation's references: to notes in the sources, to files, to headings, to modules that a command runs.

A shared rationale stands once, under a line that is its title and nothing else, in a comment or a docstring, as that of
`lowerings/codegen/tiles.py` does; elsewhere it is referred to by that title.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import te_inductor

ROOT = Path(te_inductor.__file__).parents[1]
FOLDERS = ("te_inductor", "tests", "benchmarks", "examples", "docs")

DEFINITION = re.compile(r"^[ \t]*# Note \[([^\]\n]+)\][ \t]*$", re.MULTILINE)
REFERENCE = re.compile(r"\bNote\s+(?:#\s*)?\[([^\]]+)\]")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
URL = re.compile(r"\w+://\S+")
FILE = re.compile(r"(?<![\w./-])([\w.-]+(?:/[\w.-]+)*\.(?:py|cpp|md|toml|txt))\b(?![\w/])")
COMMAND = re.compile(r"python3? -m ((?:benchmarks|examples|tests|te_inductor)[\w.]*)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def sources() -> dict[str, str]:
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".md"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in [*found, *ROOT.glob("*.md")]}


def pages() -> list[Path]:
    return [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def note_errors(texts: Mapping[str, str]) -> Iterable[str]:
    """Titles that are referred to and have no definition, or that have several."""
    defined: dict[str, list[str]] = {}
    for where, text in texts.items():
        for title in DEFINITION.findall(text):
            defined.setdefault(title, []).append(where)
    for title, places in defined.items():
        if len(places) > 1:
            yield f"{title!r} is defined in {', '.join(places)}"
    for where, text in texts.items():
        for reference in REFERENCE.findall(DEFINITION.sub("", text)):
            title = re.sub(r"\s*\n[ \t]*#?[ \t]*", " ", reference)  # a reference may be wrapped, in a comment too
            if title not in defined:
                yield f"{where} refers to {title!r}, which nothing defines"


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def page_errors(text: str, folder: Path, root: Path = ROOT) -> Iterable[str]:
    """Links, files and modules that a page in `folder` names and that do not exist, and files that it names where it links
    to others."""
    for told, target in LINK.findall(text):
        if URL.match(target) or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name if name else None
        if path is not None and not path.exists():
            yield f"link {target}"
        elif path is not None and FILE.fullmatch(told) and Path(told).name != path.name:
            yield f"link {target}, called {told}"
        elif anchor:
            page = text if path is None else path.read_text()
            if anchor not in map(slug, HEADING.findall(page)):
                yield f"heading {target}"
    prose = URL.sub("", LINK.sub("", text))
    for name in FILE.findall(prose):
        if "/" in name:
            known = (root / name).exists() or (folder / name).exists()
        else:  # a bare name is that of any file of ours
            known = (root / name).exists() or any(True for part in FOLDERS for _ in (root / part).rglob(name))
        if not known:
            yield f"file {name}"
    for module in COMMAND.findall(prose):
        path = root / module.rstrip(".").replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            yield f"module {module}"


def test_every_reference_to_a_note_resolves():
    texts = sources()
    assert any(DEFINITION.search(text) for text in texts.values()), "no note was found at all"
    assert list(note_errors(texts)) == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    text = page.read_text()
    assert LINK.search(text) or FILE.search(text), "nothing was found to check"
    assert list(page_errors(text, page.parent)) == []


WORD = "Note"  # apart from its title, so that the samples are no notes of this file


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ({"a.py": f"# see {WORD} [Nowhere]"}, "which nothing defines"),
        ({"a.py": f"# {WORD} [Here]\n", "b.py": f"# see {WORD} [here]"}, "refers to 'here'"),
        ({"a.py": f"x = 1  # {WORD} [Behind code]\n"}, "which nothing defines"),
        ({"a.py": f"# {WORD} [Twice]\n", "b.py": f"    # {WORD} [Twice]\n"}, "is defined in a.py, b.py"),
        ({"a.py": f"# {WORD} [Twice]\n# {WORD} [Twice]\n"}, "is defined in a.py, a.py"),
    ],
)
def test_a_bad_note_is_found(texts, error):
    assert any(error in found for found in note_errors(texts))


def test_a_good_note_is_not():
    texts = {"a.py": f'"""Text.\n\n# {WORD} [Casts come last]\nWhy.\n"""', "b.md": f"{WORD} [Casts\ncome last]"}
    texts["c.py"] = f"# As {WORD}\n# [Casts come\n# last] says.\n"
    assert list(note_errors(texts)) == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[here](missing.md)", "link missing.md"),
        ("[here](../te_inductor/missing.py)", "link ../te_inductor/missing.py"),
        ("[here](performance.md#no-such-heading)", "heading performance.md#no-such-heading"),
        ("[performance.md](ledger.md)", "link ledger.md, called performance.md"),
        ("[here](#no-such-heading)", "heading #no-such-heading"),
        ("`te_inductor/missing.py` does it", "file te_inductor/missing.py"),
        ("see tests/missing.cpp.", "file tests/missing.cpp"),
        ("`missing.py`", "file missing.py"),
        ("`python -m benchmarks.missing --plot`", "module benchmarks.missing"),
    ],
)
def test_a_bad_page_is_found(text, error):
    assert list(page_errors(text, ROOT / "docs")) == [error]


def test_a_good_page_is_not():
    text = (
        "# One heading, here\n[a](performance.md) [b](#one-heading-here) [c](https://example.org/missing.py) "
        "[passes/pre_grad/sites/rule.py](../te_inductor/passes/pre_grad/sites/rule.py) `te_inductor/backend.py`,"
        " `backend.py`; python -m benchmarks.floor prints it."
    )
    assert list(page_errors(text, ROOT / "docs")) == []
