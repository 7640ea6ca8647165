"""The text of what the size rule weighed: what layers save and cost in FP8, which were left, and the sum."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from te_inductor.presentation.paths import grouped, kind, named
from te_inductor.presentation.tables import Column, digits, paragraph, tabulated

if TYPE_CHECKING:
    from te_inductor.presentation.report import GraphWeight, Report

COLUMNS = (
    Column("layers of one input"),
    Column("n", right=True),
    Column("GEMMs in bf16", right=True),
    Column("FP8 saves", right=True),
    Column("casts cost", right=True),
    Column("", whole=True),
)


def text(report: "Report", columns_wide: int | None) -> str:
    """A table, and a line for each graph; empty where nothing was weighed."""
    if not any(graph.layers for graph in report.weights):
        return ""
    sources = " and ".join(dict.fromkeys(graph.rates for graph in report.weights))
    title = paragraph(f"The size rule, in ms of one call, by rates {sources}:", columns_wide)
    sums = [paragraph(_sum(graph), columns_wide) for graph in report.weights if graph.layers]
    return "\n".join([title, tabulated(COLUMNS, rows(report), columns_wide), *sums])


def rows(report: "Report") -> Iterator[tuple[str, ...]]:
    """A row for layers that differ in a number of their paths alone, of all graphs."""
    weighed = [one for graph in report.weights for one in graph.layers]
    everyone = [path for one in weighed for path in one.layers]
    for group in grouped(weighed, lambda one: (*map(kind, one.layers), one.low)).values():
        names = [named(paths, everyone) for paths in zip(*(one.layers for one in group), strict=True)]
        sums = (sum(one.weight[place] for one in group) for place in range(3))
        yield _shortened(names), str(len(group)), *(_ms(one, "< ") for one in sums), "FP8" if group[0].low else "left"


def _shortened(names: Sequence[str]) -> str:
    """Names of layers, of which those behind the first are without a path that they share with it."""
    path = names[0].rpartition(".")[0] + "."
    return ", ".join([names[0], *(name.removeprefix(path) for name in names[1:])])


def _sum(graph: "GraphWeight") -> str:
    line = f"{_gain(graph)}; in bf16 the graph takes the device at least {_ms(graph.device_s)} ms"
    return line if graph.host_s is None else f"{line}, and the host {_ms(graph.host_s)} ms to launch it in FP8"


def _gain(graph: "GraphWeight") -> str:
    """What FP8 gains, or how much more it costs than it saves: the latter where layers run in FP8 by request."""
    bf16 = _ms(graph.bf16_s)
    if not any(one.low for one in graph.layers):
        return f"no layer is in FP8; these GEMMs take {bf16} ms in bf16"
    if graph.gain_s >= 0:
        return f"FP8 gains {_ms(graph.gain_s)} of {bf16} ms ({graph.gain_s / graph.bf16_s:.0%}) of these GEMMs"
    asked = any(one.by_policy and one.low and one.weight.saved_s < one.weight.cost_s for one in graph.layers)
    why = ", as a policy entry or an FP8 gather of weights asks for it" if asked else ""
    return f"FP8 costs {_ms(-graph.gain_s)} ms more than it saves{why}; these GEMMs take {bf16} ms in bf16"


def _ms(seconds: float, less: str = "less than ") -> str:
    """Milliseconds; times below 1 us are all one."""
    return f"{less}0.001" if 0 < seconds < 1e-6 else digits(1e3 * seconds)
