"""Reports as data: every site of a model, what runs there, and why not what was asked."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from te_inductor.presentation.printed import Printed
from te_inductor.presentation.statistics import Statistics
from te_inductor.presentation.tables import percent


@dataclass(frozen=True)
class Site:
    """One GEMM of one place in the model."""

    fqn: str  # module path, as in `model.named_modules()`
    pattern: str  # "linear" or "matmul"; "grouped_linear" of experts; "convolution"; "recurrent" of an LSTM or its like
    gemm: str  # "fprop", "dgrad", "wgrad"
    shapes: tuple[Any, int, int]  # (M, N, K) of this GEMM, as out[M, N] = a[M, K] b[K, N]; a symbolic size is a string
    recipe: str  # a recipe's name, or "none"
    kernel: str  # "cublaslt", "inductor", "emulated", "eager", "high_precision", "triton:" or "cutlass:" and which
    reason: str | None = None  # why it does not run as asked; None where it does
    merged: tuple[str, ...] = ()  # module paths of all sites that are one GEMM with this one, itself too
    flops: int | None = None  # of an fprop; None of other GEMMs, and where a size is not known before it runs
    wire: str | None = None  # of an fprop whose operands come from other ranks in the graph: in which format, and why
    outside: bool = False  # whether recipes are not for it, as for a router: its reason is no fallback then


@dataclass(frozen=True)
class AttentionSite:
    """One place of the model that computes attention."""

    fqn: str  # module path
    # What it is proven to be: "full", "causal", "causal, window", "causal, padded", "causal, bias", …; "dense" of a tensor.
    mask: str
    kernel: str
    reason: str | None = None  # why its mask stays a tensor; None where it does not
    slow: bool = False  # whether that costs a GPU as much as a layer


@dataclass(frozen=True)
class LossSite:
    """One loss of an output layer."""

    fqn: str  # of the output layer
    loss: str  # "cross_entropy", or "log_softmax" of which labels' are picked
    how: str  # "in chunks", "in chunks, without logits" where the program gets none, or "as_written"
    reason: str | None = None  # why it is as written


@dataclass(frozen=True)
class SavedSite:
    """One value that a forward saves for its backward, and that is wide enough to be saved in low precision."""

    fqn: str  # of the module that reads it
    maker: str  # of the module that makes it
    shape: tuple[Any, ...]  # a symbolic size is a string
    dtype: str
    bytes_before: int
    bytes_after: int  # of codes and scales
    reason: str | None = None  # why it is saved as it is
    outside: bool = False  # whether the options say so


class Unmet(NamedTuple):
    """An option that has no effect on a site in low precision, and the reason."""

    option: str
    fqn: str
    reason: str


@dataclass
class Flops:
    """FLOPs of the forward's matrix products, those of two activations and convolutions too; symbolic sizes are those of
    the trace."""

    low: int = 0  # in low precision
    total: int = 0
    unknown: int = 0  # products whose size is not known before they run, which are not in the others

    @property
    def share(self) -> float | None:
        """The part of them that is in low precision; None if there are no products."""
        return self.low / self.total if self.total else None

    def share_of(self, sites: Iterable[Site]) -> float | None:
        """The part of them that some sites have; None if it is not known."""
        known = [site.flops for site in sites if site.flops is not None]
        return sum(known) / self.total if known and self.total else None

    def add(self, flops: int | None, low: bool) -> None:
        if flops is None:
            self.unknown += 1
            return
        self.total += flops
        self.low += flops if low else 0

    def __str__(self) -> str:
        unknown = f" ({self.unknown} of unknown size are not counted)" if self.unknown else ""
        return f"{percent(self.share)} of the FLOPs of the forward's matrix products are in low precision{unknown}"


class Weighing(NamedTuple):
    """What FP8 saves and costs layers of one input in one call, with its backward, as the size rule counts it."""

    bf16_s: float  # seconds of their GEMMs in bf16
    saved_s: float  # of those by FP8
    cost_s: float  # of the casts
    launches: int  # how many kernels more than in bf16


@dataclass(frozen=True)
class WeighedLayers:
    """Layers of one input, what they weigh, and whether they are in FP8."""

    layers: tuple[str, ...]  # module paths
    low: bool
    weight: Weighing
    # In FP8 whatever they weigh: a policy entry names them, their weights come in FP8, or other ranks have them so.
    by_policy: bool = False


@dataclass(frozen=True)
class GraphWeight:
    """What the size rule weighed in one graph: layers whose sizes are known, on a device whose rates are."""

    layers: list[WeighedLayers]
    device_s: float  # seconds that the whole graph takes the device in bf16, without attention
    host_s: float | None  # that the host takes to launch it in FP8; None under CUDA graphs, and in C++
    rates: str  # where the rates come from

    @property
    def bf16_s(self) -> float:
        """Seconds of all GEMMs that were weighed, in bf16."""
        return sum(one.weight.bf16_s for one in self.layers)

    @property
    def gain_s(self) -> float:
        """Seconds that the layers in FP8 gain."""
        return sum(one.weight.saved_s - one.weight.cost_s for one in self.layers if one.low)


@dataclass(frozen=True)
class Expected:
    """What a call on another device is expected to take, by the sums of the size rule and of the memory rule: a
    prediction, for which nothing ran. Attention is in no sum. A call of layers that are trained has its backward."""

    device: str  # its name
    rates: str | None  # where the rates come from; None where there are none, and no times
    bf16_s: float | None  # seconds in bf16
    step_s: float | None  # seconds as it was decided
    by_host: bool  # whether that is what the host takes to launch it
    parameters_bytes: int
    gradients_bytes: int  # of the parameters that are trained, as autograd has them
    peak_bytes: int | None  # how many more than in bf16 a step takes at its peak; None where a size is not known
    without: str | None  # why the kernels are those without CUTLASS, which the device could run

    def __str__(self) -> str:
        lines = [f"expected on {self.device}, a prediction for which nothing ran:"]
        if self.step_s is None or self.bf16_s is None:
            lines.append("  step: unknown, as no layer was weighed by rates of this device")
        else:
            why = ", in which the host launches it" if self.by_host else ""
            times = f"{1e3 * self.step_s:.3g} ms{why}, in bf16 {1e3 * self.bf16_s:.3g} ms"
            lines.append(f"  step without attention: {times}; by rates {self.rates}")
        mib = 2**20
        memory = f"  parameters {self.parameters_bytes / mib:.0f} MiB"
        if self.gradients_bytes:
            memory += f", gradients {self.gradients_bytes / mib:.0f} MiB"
        if self.peak_bytes is not None and self.gradients_bytes:
            less = "less" if self.peak_bytes <= 0 else "more"
            memory += f", at the peak of a step {abs(self.peak_bytes) / mib:.0f} MiB {less} than in bf16"
        lines.append(memory)
        return "\n".join([*lines, *([f"  kernels: those without CUTLASS, as {self.without}"] if self.without else [])])


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """Every site of a model. `print(report)` shows a table, `report.table(details=True)` is one with each layer."""

    sites: list[Site] = field(default_factory=list)
    unused_policy: list[str] = field(default_factory=list)  # globs, names of functions: no site has their recipe
    unmet: list[Unmet] = field(default_factory=list)
    attention: list[AttentionSite] = field(default_factory=list)
    losses: list[LossSite] = field(default_factory=list)
    saved: list[SavedSite] = field(default_factory=list)  # where option 'saved' asks for low precision
    failure: str | None = None  # traceback of a failure inside our own passes
    flops: Flops = field(default_factory=Flops)
    speedup: str | None = None  # a sentence about what low precision saves, of `explain`
    weights: list[GraphWeight] = field(default_factory=list)  # what the size rule weighed, a graph each
    expected: Expected | None = None  # on the device that `explain` was asked about
    statistics: Statistics | None = None  # of the compiled model that `explain` was given

    @property
    def fallbacks(self) -> list[Site]:
        return [site for site in self.sites if site.reason is not None and not site.outside]

    def table(self, details: bool = False, columns: int | None = None) -> str:
        """The report as text: layers that differ in a number of their paths alone share a row, with `details` each has
        its own. As wide as the terminal (COLUMNS), or as `columns` says; in a pipe as wide as it needs."""
        from te_inductor.presentation import sites

        return sites.text(self, details, columns)

    def to_html(self) -> str:
        """A page for a browser, with a row for each layer."""
        from te_inductor.presentation import html

        return html.page_of_sites(self)

    def _headline(self) -> str:
        low = sum(site.kernel != "high_precision" for site in self.sites)
        failed = ", a pass failed" if self.failure else ""
        return f"{low} of {len(self.sites)} GEMMs in low precision, {len(self.fallbacks)} fell back{failed}"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from te_inductor.presentation import html

        return html.part_of_sites(self)


def merge(reports: Iterable[Report]) -> Report:
    """One report of several graphs; a policy entry is unused where no graph used it."""
    reports = list(reports)
    unused = list(reports[0].unused_policy) if reports else []
    lists = ("sites", "unmet", "attention", "losses", "saved", "weights")
    together: dict[str, Any] = {name: [one for each in reports for one in getattr(each, name)] for name in lists}
    return Report(
        **together,
        unused_policy=[entry for entry in unused if all(entry in report.unused_policy for report in reports)],
        failure="\n".join(report.failure for report in reports if report.failure) or None,
        flops=Flops(*(sum(getattr(report.flops, one.name) for report in reports) for one in fields(Flops))),
    )
