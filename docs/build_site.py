"""The site: `python docs/build_site.py out/site`, which `make docs` calls. A warning is an error.

Pages are those of this folder, the README and those of `TOP`, copied into a temporary folder with the links
that a site needs: a page's file becomes its page, an example its section of docs/examples.md, any other file of the
repository its name. The reference comes from docstrings, and so do the tables of docs/modules.md. Examples in cells
are run, and become notebooks: notebooks.py."""

import ast
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # also where this file is loaded by its path
import notebooks

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
NOTEBOOKS = {ROOT / "examples/tour.py": "notebooks/tour.md"}
TOP = ("changelog", "contributing", "security")
FENCED = re.compile(r"(^```.*?^```[ \t]*$)", re.MULTILINE | re.DOTALL)


def pages() -> dict[Path, str]:
    """The place in the site of each page, by its file."""
    found = {path: str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))}
    top = {ROOT / "README.md": "index.md"} | {ROOT / f"{name.upper()}.md": f"{name}.md" for name in TOP}
    return top | NOTEBOOKS | found


def relinked(text: str, page: Path, places: dict[Path, str]) -> str:
    """A page's text with the site's links. Fenced blocks stay as they are."""
    here = Path(places[page]).parent

    def replace(match: re.Match[str]) -> str:
        name, _, anchor = match["target"].partition("#")
        if not name or "://" in name:
            return match[0]
        path = Path(os.path.normpath(page.parent / name))
        if path in places:
            place, anchor = places[path], f"#{anchor}" if anchor else ""
        elif path.parent == ROOT / "examples":
            place, anchor = "examples.md", f"#{path.stem}"
        else:
            return match["text"] if match["text"].startswith("`") else f"`{match['text']}`"
        return f"[{match['text']}]({os.path.relpath(place, here)}{anchor})"

    parts = FENCED.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def examples() -> str:
    """The sections of docs/examples.md: each example's docstring is part of its source."""
    found = [path for path in sorted((ROOT / "examples").glob("*.py")) if path not in NOTEBOOKS]
    found = [path for path in found if path.stem != "__init__"]
    return "\n".join(f"## {path.stem}\n\n```python\n{path.read_text()}```\n" for path in found)


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, on one line of a table."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return re.split(r"(?<=\.) (?=[A-Z`])", " ".join(text.split()))[0].replace("|", r"\|")


def modules() -> str:
    """The sections of docs/modules.md: a folder of the package each, and a row for each of its modules."""
    package, sections = ROOT / "te_inductor", []
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        rows = [
            f"| `{path.name}` | {summary(path)} |" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"
        ]
        head = f"## {folder.relative_to(ROOT)}\n\n{summary(folder / '__init__.py')}\n"
        sections.append("\n".join([head, *(["| module | what it holds |", "|---|---|", *rows] if rows else []), ""]))
    return "\n".join(sections)


def contents() -> str:
    """The lists of pages at the site's left. Those to start with and guides are in the order of the README's tables,
    others behind them."""
    text = (ROOT / "docs/site/contents.txt").read_text()
    for folder in ("start", "guides"):
        rows = re.findall(r"^\|.*\|$", (ROOT / "README.md").read_text().partition("\n## Start here\n")[2], re.MULTILINE)
        found = re.findall(rf"\(docs/({folder}/\w+)\.md", "\n".join(rows))
        files = sorted(f"{folder}/{path.stem}" for path in (ROOT / "docs" / folder).glob("*.md"))
        text = text.replace(folder.upper(), "\n".join(dict.fromkeys([*found, *files])))
    return text


def write(folder: Path, run: bool = True) -> None:
    """Sphinx's source folder; with `run`, notebooks have their outputs."""
    places = pages()
    for path, place in places.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in NOTEBOOKS:
            found = notebooks.executed(path) if run else notebooks.cells(path.read_text())
            target.write_text(relinked(notebooks.page(found, target), path, places))
            continue
        text = relinked(path.read_text(), path, places)
        if place == "index.md":
            text += "\n" + contents()
        if place == "examples.md":
            text += "\n" + examples()
        if place == "modules.md":
            text += "\n" + modules()
        target.write_text(text)
    for name in ("site", "pictures"):
        shutil.copytree(ROOT / "docs" / name, folder / name)
    shutil.copyfile(ROOT / "docs/conf.py", folder / "conf.py")


def main() -> int:
    if sys.argv[1:] == ["--modules"]:
        print(modules())
        return 0
    from sphinx.cmd.build import main as sphinx_build

    run = "--without-outputs" not in sys.argv[1:]
    [out] = [given for given in sys.argv[1:] if not given.startswith("--")] or [str(ROOT / "out/site")]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), run)
        shutil.rmtree(out, ignore_errors=True)
        return sphinx_build(["-W", "--keep-going", "-q", "-b", "html", "-d", f"{folder}/.trees", folder, out])


if __name__ == "__main__":
    sys.exit(main())
