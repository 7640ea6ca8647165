"""The site that `make docs` builds: its links, and that the reference holds the public names."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import te_inductor
from te_inductor import errors, recipes
from tests.forked import ROOT


def loaded(name: str):
    """A program of docs/, which is no package."""
    spec = spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = loaded("build_site")
PLACES = site.pages()


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("[a](../numerics.md#x)", "[a](../numerics.md#x)"),
        ("[a](../../README.md#recipes)", "[a](../index.md#recipes)"),
        ("[a](../../examples/trainer.py)", "[a](../examples.md#trainer)"),
        ("[a.py](../../te_inductor/backend.py)", "`a.py`"),
        ("[`a`](../../te_inductor/backend.py)", "`a`"),
        ("[one [two]](../../te_inductor/backend.py)", "`one [two]`"),
        ("[a](https://example.org/x.md) [b](#here)", "[a](https://example.org/x.md) [b](#here)"),
        ("![a](../pictures/accuracy.png)", "![a](../pictures/accuracy.png)"),
        ("```\n[a](../../te_inductor/backend.py)\n```", "```\n[a](../../te_inductor/backend.py)\n```"),
    ],
)
def test_links_of_the_site(link, found):
    assert site.relinked(link, ROOT / "docs/guides/training.md", PLACES) == found


def test_every_module_is_in_a_table():
    rows = dict(re.findall(r"^\| `(\w+\.py)` \| (.+) \|$", site.modules(), flags=re.MULTILINE))
    package = ROOT / "te_inductor"
    assert set(rows) == {path.name for path in package.rglob("*.py")} - {"__init__.py"}
    assert all(text.strip().endswith((".", ":")) for text in rows.values())


def test_every_page_is_in_the_contents():
    found = site.contents().split()
    assert {place.removesuffix(".md") for place in PLACES.values()} - {"index"} <= set(found)


@pytest.mark.parametrize("folder", ["start", "guides"])
def test_pages_are_in_the_order_of_the_readmes_tables(folder):
    tables = (ROOT / "README.md").read_text().partition("## Start here")[2]
    named = re.findall(rf"docs/({folder}/\w+)\.md", tables)
    assert named == [page for page in site.contents().split() if page.startswith(f"{folder}/")]


def test_a_picture_of_figures_is_drawn_from_a_table(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    drawing = loaded("draw")
    found = drawing.tables((ROOT / "docs/tables.md").read_text())
    shown = re.findall(r"pictures/(\w+)\.png", (ROOT / "docs/performance.md").read_text())
    assert sorted(shown) == sorted(drawing.PICTURES)
    for name, (draw, head) in drawing.PICTURES.items():
        draw(found[head], tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


PROGRAM = '''"""For who reads the file."""

# %% [markdown]
# # A title

# %%
x = 2
print(x, x + 1)

# %%
y = x * x
'''


def test_a_notebook_has_a_programs_cells_and_what_they_print(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    notebooks = loaded("notebooks")
    found = notebooks.executed(path)
    assert [cell.is_text for cell in found] == [True, False, False] and found[0].source == "# A title"
    assert [cell.printed for cell in found] == ["", "2 3\n", ""]
    text = notebooks.page(found, tmp_path / "program.md")
    assert "```python\nx = 2\nprint(x, x + 1)\n```\n\n```text\n2 3\n```" in text and "For who" not in text
    made = json.loads((tmp_path / "program.ipynb").read_text())
    assert [cell["cell_type"] for cell in made["cells"]] == ["markdown", "code", "code"]
    assert made["cells"][1]["outputs"] == [{"output_type": "stream", "name": "stdout", "text": "2 3\n"}]


def test_a_cell_that_fails_fails_the_build(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("# %%\n1 / 0\n")
    with pytest.raises(subprocess.CalledProcessError):
        loaded("notebooks").executed(path)


def test_every_link_leads_to_a_page(tmp_path):
    site.write(tmp_path, run=False)
    links = 0
    for page in tmp_path.rglob("*.md"):
        for match in site.LINK.finditer(site.FENCED.sub("", page.read_text())):
            name = match["target"].partition("#")[0]
            if name and "://" not in name:
                assert (page.parent / name).exists(), f"{page.name}: {match[0]}"
                links += 1
    assert links > 100


MODULES = {"__version__", "distributed", "eager_layers", "errors", "integrations", "recipes"}


@pytest.mark.parametrize(
    ("page", "module", "names"),
    [
        ("functions", te_inductor, set(te_inductor.__all__) - MODULES),
        ("recipes", recipes, set(recipes.__all__)),
        ("errors", errors, {name for name in vars(errors) if name.endswith(("Error", "Warning"))}),
    ],
)
def test_the_reference_holds_every_public_name(page, module, names):
    text = (ROOT / f"docs/api/{page}.md").read_text()
    assert names <= set(re.findall(r"\w+", text)), names - set(re.findall(r"\w+", text))


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("sphinx") is None, reason="Sphinx is not installed: make docs installs it")
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    command = [sys.executable, "docs/build_site.py", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site/api/functions.html").read_text()
    newest = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest.startswith(te_inductor.__version__) and f"te_inductor {newest}" in page
    assert 'id="te_inductor.explain"' in page and (tmp_path / "site/_static/site.css").exists()
