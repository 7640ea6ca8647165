"""What `accuracy_report` returns: figures as data, a table, a heat map."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from te_inductor.api import accuracy_picture
from te_inductor.presentation.kinds import kind, named
from te_inductor.presentation.paths import plain
from te_inductor.presentation.report import Site
from te_inductor.presentation.tables import Column, tabulated, wrapped


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
    """`print(report)` shows a table, `report.table(details=True)` one with every layer, `report.to_dict()` is for JSON,
    `report.heat_map(path)` writes a PNG."""

    gemms: list[GemmAccuracy] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)  # as `explain` has them: those in high precision too

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def table(self, details: bool = False, columns: int | None = None) -> str:
        """The report as text. Layers that differ in a number of their paths alone share a row, with the figures of the
        worst of them and the median; with `details` each layer has its rows. As wide as the terminal (COLUMNS), or as
        `columns` says; in a pipe as wide as it needs."""
        rows = _layer_rows(self.gemms) if details else _kind_rows(self.gemms)
        table = tabulated(_BY_LAYER if details else _BY_KIND, rows, columns)
        lines = [wrapped(line, columns, "") if line else "" for line in (_headline(self), _lowest(self.gemms))]
        return "\n\n".join(part for part in (lines[0], table if self.gemms else "", lines[1]) if part)

    def __str__(self) -> str:
        return self.table()

    def heat_map(self, path: str | Path) -> Path:
        """Write a PNG: a row a layer, a column an operand, a panel a figure. Where there are many layers, a row is the
        worst of several of one kind that follow each other. Needs matplotlib."""
        return accuracy_picture.write(self.gemms, _headline(self), Path(path))


_BY_LAYER = (
    Column("module"),
    Column("GEMM", whole=True),
    Column("recipe", whole=True, optional=True),
    Column("operand", whole=True),
    Column("format", optional=True),
    Column("amax", right=True, optional=True),
    Column("SQNR dB", right=True),
    Column("saturated", right=True),
    Column("underflow", right=True),
    Column("product dB", right=True),
)
_BY_KIND = (
    Column("layers"),
    Column("n", right=True),
    *_BY_LAYER[1:6],
    Column("SQNR dB, worst", right=True),
    Column("median", right=True, optional=True),
    *_BY_LAYER[7:9],
    Column("product dB, worst", right=True),
    Column("median", right=True, optional=True),
)
_LOWEST = 3  # products are named below the table


def _headline(report: AccuracyReport) -> str:
    layers = len({gemm.fqn for gemm in report.gemms})
    high = len({site.fqn for site in report.sites if site.kernel == "high_precision"})
    recipes = ", ".join(dict.fromkeys(gemm.recipe for gemm in report.gemms))
    return f"te_inductor: {layers} layers in low precision, {high} in high precision; recipes: {recipes or 'none'}"


def _lowest(gemms: Sequence[GemmAccuracy]) -> str:
    """The layers to look at first."""
    known = sorted((gemm for gemm in gemms if gemm.sqnr_db is not None), key=lambda gemm: gemm.sqnr_db or 0.0)
    named = [f"{plain(gemm.fqn) or '(root)'} {gemm.gemm} {gemm.sqnr_db:.1f} dB" for gemm in known[:_LOWEST]]
    return f"lowest products: {', '.join(named)}" if named else ""


def _layer_rows(gemms: Sequence[GemmAccuracy]) -> Iterator[tuple[str, ...]]:
    for gemm in gemms:
        for operand in (gemm.a, gemm.b):
            first = operand is gemm.a
            place = (plain(gemm.fqn) or "(root)", gemm.gemm, gemm.recipe) if first else ("", "", "")
            figures = (
                f"{operand.amax:.3g}",
                _shown(operand.sqnr_db),
                f"{operand.saturated:.2%}",
                f"{operand.underflowed:.2%}",
            )
            yield *place, operand.tensor, operand.format, *figures, _shown(gemm.sqnr_db) if first else ""


def _kind_rows(gemms: Sequence[GemmAccuracy]) -> Iterator[tuple[str, ...]]:
    everyone = list(dict.fromkeys(gemm.fqn for gemm in gemms))
    groups: dict[tuple[str, ...], list[GemmAccuracy]] = {}
    for gemm in gemms:
        groups.setdefault((kind(gemm.fqn), gemm.recipe, gemm.gemm, gemm.a.format, gemm.b.format), []).append(gemm)
    last = None
    for (_, recipe, gemm_name, *_), group in sorted(groups.items(), key=lambda one: everyone.index(one[1][0].fqn)):
        paths = list(dict.fromkeys(gemm.fqn for gemm in group))
        name = named(paths, everyone)
        for operands in ([gemm.a for gemm in group], [gemm.b for gemm in group]):
            first = operands[0] is group[0].a
            place = (name, str(len(paths))) if first and name != last else ("", "")
            last = name
            yield (
                *place,
                *((gemm_name, recipe) if first else ("", "")),
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
    worst, middle = min(values), median(values)
    return _shown(None if worst == float("inf") else worst), _shown(None if middle == float("inf") else middle)


def _shown(decibels: float | None) -> str:
    return "exact" if decibels is None else f"{decibels:.1f}"
