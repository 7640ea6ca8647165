"""What `accuracy_report` returns: figures as data, a table, a heat map."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from te_inductor.diagnostics import Site, tabulated


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


@dataclass(frozen=True)
class AccuracyReport:
    """`print(report)` shows a table, `report.to_dict()` is for JSON, `report.heat_map(path)` writes a PNG."""

    gemms: list[GemmAccuracy] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)  # as `explain` has them: those in high precision too

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        columns = (
            "module",
            "GEMM",
            "recipe",
            "operand",
            "format",
            "amax",
            "SQNR dB",
            "saturated",
            "underflow",
            "product dB",
        )
        return tabulated(_headline(self), columns, _rows(self.gemms))

    def heat_map(self, path: str | Path) -> Path:
        """Write a PNG: a row a layer, a column an operand, a panel a figure. Needs matplotlib."""
        from matplotlib.figure import Figure

        layers = list(dict.fromkeys(gemm.fqn for gemm in self.gemms))
        figure = Figure(figsize=(13, 2.2 + 0.28 * len(layers)), layout="constrained")
        for axes, (title, name) in zip(figure.subplots(1, len(_PANELS), sharey=True), _PANELS.items(), strict=True):
            table = _table(self.gemms, layers, name)
            image = axes.imshow(table, aspect="auto", cmap="viridis" if name == "sqnr_db" else "magma_r")
            figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.9)
            axes.set_title(title)
            axes.set_xticks(range(len(_COLUMNS)), [" ".join(column) for column in _COLUMNS], rotation=60, ha="right")
            axes.set_yticks(range(len(layers)), [layer or "(root)" for layer in layers])
        figure.savefig(path, dpi=120)
        return Path(path)


_HEADINGS = "module,GEMM,recipe,operand,format,amax,SQNR dB,saturated,underflow,product dB".split(",")
_PANELS = {"SQNR (dB)": "sqnr_db", "saturated (share)": "saturated", "underflow (share)": "underflowed"}
_COLUMNS = [
    ("fprop", "input"),
    ("fprop", "weight"),
    ("dgrad", "grad_output"),
    ("dgrad", "weight"),
    ("wgrad", "grad_output"),
    ("wgrad", "input"),
]


def _table(gemms: Sequence[GemmAccuracy], layers: Sequence[str], name: str) -> list[list[float]]:
    """A row a layer; NaN, which is left blank, where there is no such figure."""
    found = {(gemm.fqn, gemm.gemm, operand.tensor): operand for gemm in gemms for operand in (gemm.a, gemm.b)}
    cells = [[getattr(found.get((layer, *column)), name, None) for column in _COLUMNS] for layer in layers]
    return [[float("nan") if cell is None else cell for cell in row] for row in cells]


def _headline(report: AccuracyReport) -> str:
    layers = len({gemm.fqn for gemm in report.gemms})
    high = len({site.fqn for site in report.sites if site.kernel == "high_precision"})
    return f"te_inductor: {layers} layers in low precision, {high} in high precision"


def _rows(gemms: Sequence[GemmAccuracy]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for gemm in gemms:
        for operand in (gemm.a, gemm.b):
            first = operand is gemm.a
            place = (gemm.fqn or "(root)", gemm.gemm, gemm.recipe) if first else ("", "", "")
            figures = (
                f"{operand.amax:.3g}",
                _shown(operand.sqnr_db),
                f"{operand.saturated:.2%}",
                f"{operand.underflowed:.2%}",
            )
            rows.append((*place, operand.tensor, operand.format, *figures, _shown(gemm.sqnr_db) if first else ""))
    return rows


def _shown(decibels: float | None) -> str:
    return "exact" if decibels is None else f"{decibels:.1f}"
