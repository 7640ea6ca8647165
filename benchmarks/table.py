"""Tables and bar charts of results."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    # Where this is no terminal, rich would fold at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    for part in (f"\n{title}", table, caption):
        if part is not None:
            console.print(part, soft_wrap=isinstance(part, str), markup=False)


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str | None:
    return None if value is None else f"{value * scale:.{digits}f}"


def headline(environment: dict[str, Any]) -> str:
    parts = [environment["device"], f"torch {environment['torch']}"]
    if environment["triton"]:
        parts.append(f"triton {environment['triton']}")
    if environment["commit"]:
        parts.append(f"commit {environment['commit']}")
    return ", ".join([*parts, environment["date"][:10]])


COLOURS = ("#4477aa", "#66ccee", "#ccbb44", "#ee6677", "#228833", "#aa3377")


def bars(path: Path, title: str, panels: Sequence[tuple[str, Sequence[str], Sequence[float]]]) -> None:
    """One panel of horizontal bars each: (axis label, names, values), first name on top. Names that end alike, as those of
    one arm do, have one colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tallest = max(len(names) for _, names, _ in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 1.2 + 0.35 * tallest), squeeze=False)
    for axis, (label, names, values) in zip(axes[0], panels, strict=True):
        arms = list(dict.fromkeys(name.split()[-1] for name in names))
        several = 1 < len(arms) <= len(COLOURS) and len(arms) < len(names)
        colours = [COLOURS[arms.index(name.split()[-1]) if several else 0] for name in names]
        drawn = axis.barh(names, values, color=colours)
        axis.bar_label(drawn, [_short(value) for value in values], padding=3)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.margins(x=0.12, y=0.01)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"plot: {path}")


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.3g}"
