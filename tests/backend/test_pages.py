"""What the pages for users promise: short lines, a short README, and Python that runs as it is written.

Every block fenced as ``python`` of the README, docs/start and docs/guides runs here, on the CPU, one after the other in
a namespace of its page and in an empty folder. Words behind ``python`` say what a block needs (``python gpu``); where
that is missing, the block is compiled to bytecode and does not run. A block fenced as ``text output`` is what the block
before it prints."""

import contextlib
import io
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import te_inductor
from te_inductor.errors import FallbackWarning

ROOT = Path(te_inductor.__file__).parents[1]
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
EXECUTED = [README, *(page for page in PAGES if page.parent.name in ("start", "guides"))]
# What a block may need, and whether it is here; a package takes half a minute of C++, which test_packages.py spends.
NEEDS = {"gpu": False, "package": False, "torch-2.13": torch.__version__ >= (2, 13)} | {
    name: find_spec(name) is not None
    for name in ("accelerate", "autoparallel", "lightning", "matplotlib", "peft", "torchtitan", "transformers")
}

WIDTH = 120
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its words behind the fence, its text, and the line of the page that its text begins at."""

    info: tuple[str, ...]
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    found = FENCE.finditer(page)
    return [Block(tuple(one["info"].split()), one["text"], page[: one.start("text")].count("\n") + 1) for one in found]


def long_lines(page: str) -> list[int]:
    """Numbers of the lines above `WIDTH` characters that are no table's row and no fenced text."""
    prose = FENCE.sub(lambda block: "\n" * block.group().count("\n"), page)
    lines = enumerate(prose.split("\n"), 1)
    return [number for number, line in lines if len(line) > WIDTH and not line.lstrip().startswith("|")]


def run(page: str, path: Path) -> None:
    """Run the Python of a page; an error's traceback shows the page's own lines."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page):
        if block.info[:1] == ("python",):
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            assert set(block.info[1:]) <= set(NEEDS), (
                f"{path.name}:{block.line}: {block.info[1:]}, known are {[*NEEDS]}"
            )
            if not all(NEEDS[word] for word in block.info[1:]):
                continue
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            printed = out.getvalue()
        elif block.info == ("text", "output"):
            assert printed.strip() == block.text.strip(), (
                f"{path.name}:{block.line}: the block before it printed\n{printed}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page):
    assert long_lines(page.read_text()) == []


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 180


@pytest.fixture
def no_process_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("without_tracing", "no_process_group_is_left")
@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_python_runs_as_written(page, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)  # a page that shows one catches it
        run(page.read_text(), page)


def test_a_long_line_is_found():
    line = "x" * (WIDTH + 1)
    assert long_lines(f"short\n```text\n{line}\n```\n| {line} |\n{line}\n") == [6]


def test_what_a_page_runs():
    run(
        "```python\nx = 1\n```\n```python gpu\n1 / 0\n```\n```python\nprint(x)\n```\n```text output\n1\n```\n",
        Path("a.md"),
    )


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("```python\n1 / 0\n```\n", ZeroDivisionError),
        ("```python gpu\n1 +\n```\n", SyntaxError),
        ("```python tpu\npass\n```\n", AssertionError),
        ("```python\nprint(1)\n```\n```text output\n2\n```\n", AssertionError),
    ],
)
def test_what_a_page_must_not_run(page, error):
    with pytest.raises(error):
        run(page, Path("a.md"))
