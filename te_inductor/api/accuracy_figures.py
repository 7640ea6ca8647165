"""What `accuracy_report` returns: figures as data, a table, a heat map."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from te_inductor.errors import OptionError
from te_inductor.presentation.paths import by_kind, chunks, grouped, kind, named, plain
from te_inductor.presentation.printed import Printed
from te_inductor.presentation.report import Site
from te_inductor.presentation.tables import Column


@dataclass(frozen=True)
class OperandAccuracy:
    """One operand of one GEMM, as it was quantized."""

    tensor: str  # "input", "weight", "grad_output"
    format: str  # element and what shares a scale, such as "e4m3 1x32"
    amax: float
    sqnr_db: float | None  # signal over quantization noise, 10 log10; None where nothing was lost, or there was nothing
    saturated: float  # share of values beyond the largest that their scale can hold
    underflowed: float  # share of the values that are not 0 that became 0


@dataclass(frozen=True)
class GemmAccuracy:
    """One GEMM of one layer, all of its calls together."""

    fqn: str  # module path, as in `model.named_modules()`
    gemm: str  # "fprop", "dgrad", "wgrad"
    shapes: tuple[Any, int, int]  # (M, N, K); a symbolic size is a string
    recipe: str
    a: OperandAccuracy
    b: OperandAccuracy
    sqnr_db: float | None  # of the product


@dataclass(frozen=True, repr=False)
class AccuracyReport(Printed):
    """`print(report)` shows a table, `report.table(details=True)` one with every layer, `report.to_dict()` is for JSON,
    `report.heat_map(path)` writes a PNG."""

    gemms: list[GemmAccuracy] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)  # as `explain` has them: those in high precision too

    def _headline(self) -> str:
        layers = len({gemm.fqn for gemm in self.gemms})
        high = len({site.fqn for site in self.sites if site.kernel == "high_precision"})
        recipes = ", ".join(dict.fromkeys(gemm.recipe for gemm in self.gemms))
        return f"te_inductor: {layers} layers in low precision, {high} in high precision; recipes: {recipes or 'none'}"

    def _closing(self) -> str:
        """The layers to look at first."""
        known = sorted((gemm for gemm in self.gemms if gemm.sqnr_db is not None), key=lambda gemm: gemm.sqnr_db or 0.0)
        lowest = [f"{plain(gemm.fqn) or '(root)'} {gemm.gemm} {gemm.sqnr_db:.1f} dB" for gemm in known[:_LOWEST]]
        return f"lowest products: {', '.join(lowest)}" if lowest else ""

    def _cells(self, details: bool) -> tuple[list[Column], list[list[str]]]:
        places = _BY_LAYER if details else range(len(_BY_KIND))
        heads = [_BY_KIND[place] for place in places]
        if details:
            heads = [head._replace(name=_OF_LAYER.get(head.name, head.name)) for head in heads]
        return heads, [[row[place] for place in places] for row in _rows(self.gemms, details)]

    def heat_map(self, path: str | Path) -> Path:
        """Write a PNG: a row a layer, a column an operand, a panel a figure. Where there are many layers, a row is the
        worst of several of one kind that follow each other. Needs matplotlib."""
        return write_picture(self.gemms, self._headline(), Path(path))


_BY_KIND = (
    Column("layers"),
    Column("n", right=True),
    Column("GEMM", whole=True),
    Column("recipe", whole=True, optional=True),
    Column("operand", whole=True),
    Column("format", optional=True),
    Column("amax", right=True, optional=True),
    Column("SQNR dB, worst", right=True),
    Column("median", right=True, optional=True),
    Column("saturated", right=True),
    Column("underflow", right=True),
    Column("product dB, worst", right=True),
    Column("median", right=True, optional=True),
)
# The table of single layers has no number of them and no median.
_OF_LAYER = {"layers": "module", "SQNR dB, worst": "SQNR dB", "product dB, worst": "product dB"}
_BY_LAYER = [place for place, column in enumerate(_BY_KIND) if column.name not in ("n", "median")]
_LOWEST = 3  # products are named below the table


def _rows(gemms: Sequence[GemmAccuracy], details: bool) -> Iterator[tuple[str, ...]]:
    """Two rows for each GEMM of a kind of layers, or, with `details`, of a layer."""
    everyone = list(dict.fromkeys(gemm.fqn for gemm in gemms))

    def key(gemm: GemmAccuracy) -> object:
        return kind(gemm.fqn), gemm.recipe, gemm.gemm, gemm.a.format, gemm.b.format

    alike = sorted(grouped(gemms, key).values(), key=lambda group: everyone.index(group[0].fqn))
    last = None
    for group in [[gemm] for gemm in gemms] if details else alike:
        paths = list(dict.fromkeys(gemm.fqn for gemm in group))
        name = named(paths, everyone)
        for operands in ([gemm.a for gemm in group], [gemm.b for gemm in group]):
            first = operands[0] is group[0].a
            shown = first and (details or name != last)
            last = name
            yield (
                *((name, str(len(paths))) if shown else ("", "")),
                *((group[0].gemm, group[0].recipe) if first else ("", "")),
                operands[0].tensor,
                operands[0].format,
                f"{max(one.amax for one in operands):.3g}",
                *_worst_and_median([one.sqnr_db for one in operands]),
                f"{max(one.saturated for one in operands):.2%}",
                f"{max(one.underflowed for one in operands):.2%}",
                *(_worst_and_median([gemm.sqnr_db for gemm in group]) if first else ("", "")),
            )


def _worst_and_median(decibels: Sequence[float | None]) -> tuple[str, str]:
    values = [float("inf") if one is None else one for one in decibels]
    worst, middle = ("exact" if one == float("inf") else f"{one:.1f}" for one in (min(values), median(values)))
    return worst, middle


# ---- The picture: layers down, operands across, with the figures in the cells. Colours mean the same in every picture:
# decibels from 10 to 40, shares from none, which is white, to what is worth a look.

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
OPERANDS = (
    ("fprop", "input"),
    ("fprop", "weight"),
    ("dgrad", "grad_output"),
    ("dgrad", "weight"),
    ("wgrad", "grad_output"),
    ("wgrad", "input"),
)


def picture_rows(gemms: Sequence[GemmAccuracy], most: int = MOST_ROWS) -> dict[str, list[str]]:
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


def picture_cells(gemms: Sequence[GemmAccuracy], panel: Panel, layers: dict[str, list[str]]) -> list[list[float]]:
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
        keys = [[(path, *column) for path in paths] for column in OPERANDS]
        of_row = [[found[key] for key in column if key in found] for column in keys]
        cells.append([panel.worst(values) if values else float("nan") for values in of_row])
    return cells


def write_picture(gemms: Sequence[GemmAccuracy], headline: str, path: Path) -> Path:
    """Draw it into a file.

    Raises:
        OptionError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise OptionError("heat_map found no matplotlib, expected it to draw the picture; pip install matplotlib")
    from matplotlib.figure import Figure

    layers = picture_rows(gemms)
    folded = any(len(paths) > 1 for paths in layers.values())
    kinds = len({kind(gemm.fqn) for gemm in gemms})
    note = f"; {kinds} kinds of layers, a row is the worst of its layers" if folded else ""
    figure = Figure(figsize=(15, 3.2 + 0.27 * max(len(layers), 1)), layout="constrained")
    figure.suptitle(f"What quantization loses, operand by operand\n{headline}{note}", fontsize=11)
    names = [f"{name}  ({len(paths)})" if len(paths) > 1 else name for name, paths in layers.items()]
    for axes, panel in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
        low, high = panel.scale
        cells = picture_cells(gemms, panel, layers)
        axes.set_facecolor("#eeeeee")  # of cells without a figure
        image = axes.imshow(
            cells or [[float("nan")] * len(OPERANDS)], aspect="auto", cmap=panel.colors, vmin=low, vmax=high
        )
        share = panel.figure != "sqnr_db"
        bar = figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.9, extend=panel.extend)
        if share:
            bar.set_ticks([low, high / 2, high], labels=[f"{100 * tick:g}%" for tick in (low, high / 2, high)])
        for row, values in enumerate(cells):
            for column, value in enumerate(values):
                _write_cell(axes, column, row, value, panel)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xticks(range(len(OPERANDS)), [" ".join(one) for one in OPERANDS], rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_xticks([place + 0.5 for place in range(1, len(OPERANDS), 2)], minor=True)
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
