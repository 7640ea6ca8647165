"""The picture of an accuracy report: layers down, operands across, with the figures in the cells.

Colours mean the same in every picture: decibels from 10 to 40, shares from none, which is white, to what is worth a
look."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from te_inductor.errors import OptionError
from te_inductor.presentation.kinds import by_kind, chunks, kind, named

if TYPE_CHECKING:  # which imports this module
    from te_inductor.api.accuracy_figures import GemmAccuracy

MOST_ROWS = 42  # of a picture that is read without scrolling


class Panel(NamedTuple):
    title: str
    figure: str  # attribute of an operand
    colors: str  # a map of matplotlib's
    scale: tuple[float, float]
    worst: Any  # of several
    extend: str  # ends of the scale that are exceeded


PANELS = (
    Panel("SQNR (dB)", "sqnr_db", "RdYlBu", (10.0, 40.0), min, "both"),
    Panel("saturated (% of values)", "saturated", "Oranges", (0.0, 0.05), max, "max"),
    Panel("underflow (% of values)", "underflowed", "Oranges", (0.0, 0.2), max, "max"),
)
COLUMNS = (
    ("fprop", "input"),
    ("fprop", "weight"),
    ("dgrad", "grad_output"),
    ("dgrad", "weight"),
    ("wgrad", "grad_output"),
    ("wgrad", "input"),
)


def rows(gemms: Sequence["GemmAccuracy"], most: int = MOST_ROWS) -> dict[str, list[str]]:
    """The layers of each row, by the row's name: one, or, where there are too many, some of one kind in a run."""
    everyone = list(dict.fromkeys(gemm.fqn for gemm in gemms))
    if len(everyone) <= most:
        return {path or "(root)": [path] for path in everyone}
    kinds = by_kind(everyone)
    each = max(1, (most - sum(len(paths) == 1 for paths in kinds.values())) // max(1, len(kinds)))
    found = {}
    for paths in kinds.values():
        for chunk in chunks(paths, each):
            found[named(chunk, everyone)] = chunk
    return found


def table(gemms: Sequence["GemmAccuracy"], panel: Panel, layers: dict[str, list[str]]) -> list[list[float]]:
    """A row a row of the picture; NaN, which is left blank, where there is no such figure."""
    found: dict[tuple[str, str, str], float] = {}
    for gemm in gemms:
        for operand in (gemm.a, gemm.b):
            value = getattr(operand, panel.figure)
            if value is not None:
                key = gemm.fqn, gemm.gemm, operand.tensor
                found[key] = value if key not in found else panel.worst(found[key], value)
    cells = []
    for paths in layers.values():
        keys = [[(path, *column) for path in paths] for column in COLUMNS]
        of_row = [[found[key] for key in column if key in found] for column in keys]
        cells.append([panel.worst(values) if values else float("nan") for values in of_row])
    return cells


def write(gemms: Sequence["GemmAccuracy"], headline: str, path: Path) -> Path:
    """Draw it into a file.

    Raises:
        OptionError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise OptionError("heat_map found no matplotlib, expected it to draw the picture; pip install matplotlib")
    from matplotlib.figure import Figure

    layers = rows(gemms)
    folded = any(len(paths) > 1 for paths in layers.values())
    kinds = len({kind(gemm.fqn) for gemm in gemms})
    note = f"; {kinds} kinds of layers, a row is the worst of its layers" if folded else ""
    figure = Figure(figsize=(15, 3.2 + 0.27 * max(len(layers), 1)), layout="constrained")
    figure.suptitle(f"What quantization loses, operand by operand\n{headline}{note}", fontsize=11)
    names = [f"{name}  ({len(paths)})" if len(paths) > 1 else name for name, paths in layers.items()]
    for axes, panel in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
        low, high = panel.scale
        cells = table(gemms, panel, layers)
        axes.set_facecolor("#eeeeee")  # of cells without a figure
        image = axes.imshow(
            cells or [[float("nan")] * len(COLUMNS)], aspect="auto", cmap=panel.colors, vmin=low, vmax=high
        )
        share = panel.figure != "sqnr_db"
        bar = figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.9, extend=panel.extend)
        if share:
            bar.set_ticks([low, high / 2, high], labels=[f"{100 * tick:g}%" for tick in (low, high / 2, high)])
        for row, values in enumerate(cells):
            for column, value in enumerate(values):
                _write_cell(axes, column, row, value, panel)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xticks(range(len(COLUMNS)), [" ".join(one) for one in COLUMNS], rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_xticks([place + 0.5 for place in range(1, len(COLUMNS), 2)], minor=True)
        axes.grid(which="minor", color="white", linewidth=2)
        axes.tick_params(which="both", length=0)
    figure.savefig(path, dpi=110)
    return path


def _write_cell(axes: Any, column: int, row: int, value: float, panel: Panel) -> None:
    if value != value:
        return
    low, high = panel.scale
    place = min(max((value - low) / (high - low), 0.0), 1.0)
    share = panel.figure != "sqnr_db"
    dark = place > 0.6 if share else place < 0.12 or place > 0.88  # of the map's colours there
    text = ("0" if value == 0 else f"{100 * value:.2g}") if share else f"{value:.1f}"
    axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
