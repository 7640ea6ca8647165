"""Notebooks of the site, made of programs in cells: `# %%` begins one of code, `# %% [markdown]` one of text, as editors
read them too. The site's page shows what the cells print and draw, and the notebook can be downloaded beside it.

`python docs/notebooks.py examples/tour.py` runs a program's cells and writes their outputs as JSON."""

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CELL = re.compile(r"^# %%(?P<text> \[markdown\])?$", re.MULTILINE)


class Cell(NamedTuple):
    """A cell: Markdown, or code and what it printed and drew when it ran."""

    is_text: bool
    source: str
    printed: str = ""
    pictures: tuple[bytes, ...] = ()  # PNG


def cells(program: str) -> list[Cell]:
    """The cells of a program that has not run. What stands before the first one is for who reads the file."""
    _, *parts = CELL.split(program)
    kinds, sources = parts[::2], (part.strip("\n") for part in parts[1::2])
    return [
        Cell(True, re.sub(r"^# ?", "", source, flags=re.MULTILINE)) if kind else Cell(False, source)
        for kind, source in zip(kinds, sources, strict=True)
    ]


def executed(path: Path) -> list[Cell]:
    """The cells of a program that has run, in a process of its own, from the first to the last.

    Raises:
        CalledProcessError: a cell raised; its traceback is on the standard error.
    """
    command = [sys.executable, str(Path(__file__)), str(path)]
    environment = {**os.environ, "COLUMNS": "110", "MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    outputs = iter(json.loads(done.stdout))
    found = []
    for cell in cells(path.read_text()):
        if not cell.is_text:
            output = next(outputs)
            pictures = tuple(base64.b64decode(picture) for picture in output["pictures"])
            cell = cell._replace(printed=output["printed"], pictures=pictures)
        found.append(cell)
    return found


def run(path: Path) -> list[dict[str, Any]]:
    """Runs the cells of a program in this process: what each printed, and its pictures in base 64."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(cells(path.read_text())):
        if cell.is_text:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell.source, f"{path.name}, cell {number}", "exec"), namespace)
        outputs.append({"printed": printed.getvalue(), "pictures": _pictures()})
    return outputs


def _pictures() -> list[str]:
    """The figures that a cell has left open, which are closed."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    found = []
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, dpi=90)
        found.append(base64.b64encode(file.getvalue()).decode())
    pyplot.close("all")
    return found


def page(found: Sequence[Cell], target: Path) -> str:
    """The Markdown of a notebook's page at `target`, beside which its pictures and the notebook itself are written."""
    target.with_suffix(".ipynb").write_text(notebook(found))
    parts = []
    for number, cell in enumerate(found):
        parts.append(cell.source if cell.is_text else f"```python\n{cell.source}\n```")
        if number == 0:
            parts.append(f"{{download}}`The notebook <{target.stem}.ipynb>`")
        if cell.printed.strip():
            parts.append(f"```text\n{cell.printed.rstrip()}\n```")
        for place, picture in enumerate(cell.pictures):
            name = f"{target.stem}_{number}_{place}.png"
            target.with_name(name).write_bytes(picture)
            parts.append(f"![What the cell draws]({name})")
    return "\n\n".join(parts) + "\n"


def notebook(found: Sequence[Cell]) -> str:
    """The file of a notebook, in version 4.5 of its format."""
    made = []
    for number, cell in enumerate(found):
        one: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": cell.source}
        if cell.is_text:
            made.append({"cell_type": "markdown", **one})
            continue
        outputs: list[dict[str, Any]] = []
        if cell.printed:
            outputs.append({"output_type": "stream", "name": "stdout", "text": cell.printed})
        for picture in cell.pictures:
            data = {"image/png": base64.b64encode(picture).decode()}
            outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
        made.append({"cell_type": "code", "execution_count": None, "outputs": outputs, **one})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
