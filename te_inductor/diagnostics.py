"""What runs where, and why not: refusals, sites, reports, the one warning of a compile, and the log.

``TORCH_LOGS="+te_inductor"`` shows every decision as it is made.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from te_inductor.errors import FallbackError, FallbackWarning
from te_inductor.presentation.paths import plain

log = logging.getLogger("te_inductor")
_T = TypeVar("_T")


class Refusal:
    """Why a site stays as it is. The text is formatted only when it is read."""

    def __init__(self, template: str, *args: object) -> None:
        self.template, self.args = template, args

    def __str__(self) -> str:
        return self.template % self.args

    def __repr__(self) -> str:
        return f"Refusal({str(self)!r})"


@dataclass(frozen=True)
class Site:
    """One GEMM of one place in the model."""

    fqn: str  # module path, as in `model.named_modules()`
    pattern: str  # "linear" or "matmul"; "grouped_linear" of experts; "convolution"
    gemm: str  # "fprop", "dgrad", "wgrad"
    shapes: tuple[Any, int, int]  # (M, N, K) of this GEMM, as out[M, N] = a[M, K] b[K, N]; a symbolic size is a string
    recipe: str  # a recipe's name, or "none"
    kernel: str  # "cublaslt", "inductor", "emulated", "eager", "high_precision", "triton:" or "cutlass:" and which
    reason: str | None = None  # why it does not run as asked; None where it does
    merged: tuple[str, ...] = ()  # module paths of all sites that are one GEMM with this one, itself too
    flops: int | None = None  # of an fprop; None of other GEMMs, and where a size is not known before it runs
    wire: str | None = None  # of an fprop whose operands come from other ranks in the graph: in which format, and why
    outside: bool = False  # whether no recipe is for such a product: its reason is no fallback then


@dataclass(frozen=True)
class AttentionSite:
    """One place of the model that computes attention."""

    fqn: str  # module path
    # What it is proven to be: "full", "causal", "causal, window", "causal, padded", "causal, bias", …; "dense" of a tensor.
    mask: str
    kernel: str
    reason: str | None = None  # why its mask stays a tensor; None where it does not
    slow: bool = False  # whether that costs a GPU as much as a layer


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
        return f"{_percent(self.share)} of the FLOPs of the forward's matrix products are in low precision{unknown}"


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
    by_policy: bool = False  # in FP8 whatever they weigh: a policy entry names them, or their weights come in FP8


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


HIDDEN = ", or earlier entries match the same"  # of a policy entry that matches nothing


@dataclass(frozen=True)
class Report:
    """Every site of a model. `print(report)` shows a table, `report.table(details=True)` is one with each layer."""

    sites: list[Site] = field(default_factory=list)
    unused_policy: list[str] = field(
        default_factory=list
    )  # entries whose recipe no site has: globs, names of functions
    unmet: list[Unmet] = field(default_factory=list)
    attention: list[AttentionSite] = field(default_factory=list)
    failure: str | None = None  # traceback of a failure inside our own passes
    flops: Flops = field(default_factory=Flops)
    speedup: str | None = None  # a sentence about what low precision saves, of `explain`
    weights: list[GraphWeight] = field(default_factory=list)  # what the size rule weighed, a graph each

    @property
    def fallbacks(self) -> list[Site]:
        return [site for site in self.sites if site.reason is not None and not site.outside]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def table(self, details: bool = False, columns: int | None = None) -> str:
        """The report as text: layers that differ in a number of their paths alone share a row, with `details` each has
        its own. As wide as the terminal (COLUMNS), or as `columns` says; in a pipe as wide as it needs."""
        from te_inductor.presentation import sites

        return sites.text(self, details, columns)

    def to_html(self) -> str:
        """A page for a browser, with a row for each layer."""
        from te_inductor.presentation import html

        return html.page_of_sites(self)

    def __str__(self) -> str:
        return self.table()


def merge(reports: Iterable[Report]) -> Report:
    """One report of several graphs; a policy entry is unused where no graph used it."""
    reports = list(reports)
    unused = list(reports[0].unused_policy) if reports else []
    return Report(
        sites=[site for report in reports for site in report.sites],
        unused_policy=[entry for entry in unused if all(entry in report.unused_policy for report in reports)],
        unmet=[unmet for report in reports for unmet in report.unmet],
        attention=[site for report in reports for site in report.attention],
        failure="\n".join(report.failure for report in reports if report.failure) or None,
        weights=[weight for report in reports for weight in report.weights],
        flops=Flops(
            *(sum(getattr(report.flops, one.name) for report in reports) for one in fields(Flops)),
        ),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _grouped(items: list[_T], key: Any) -> Iterable[tuple[Any, list[_T]]]:
    groups: dict[Any, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.items()


def announce(report: Report, fallback: str) -> None:
    """Warn once of all that does not run as asked, or raise, or keep silent: what `options["fallback"]` says.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    for site in report.sites:
        log.debug("%s", site)
    text = summary(report)
    if text is None:
        return
    left_out = {site.fqn for site in report.sites if site.recipe == "none"}  # as somebody asked
    unmet = [unmet for unmet in report.unmet if unmet.fqn not in left_out]
    if fallback == "error" and not (report.fallbacks or unmet or report.failure):
        fallback = (
            "warn"  # a policy entry that this graph does not use may be used by the next one, behind a graph break
        )
    say(text, fallback)


def say(text: str, fallback: str) -> None:
    """Warn, raise or keep silent: what `options["fallback"]` says.

    Raises:
        FallbackError: with ``fallback="error"``.
    """
    if fallback == "error":
        raise FallbackError(text)
    if fallback == "warn":
        warnings.warn(text, FallbackWarning, stacklevel=_users_level())


# contextlib is among them: its decorators stand between their callers and what they decorate.
_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)


def _users_level() -> int:
    """The `stacklevel` at which `say` names the user's line: that of the first caller in neither this package nor torch,
    which calls a backend while a call of the user's waits; as `skip_file_prefixes` has it from Python 3.12 on."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level if not _is_ours(frame.f_code.co_filename) else 2


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) or file.startswith("<")  # code that torch writes has no file


def summary(report: Report) -> str | None:
    """The text of the warning, None where everything runs as asked."""
    lines = []
    places = {(site.fqn, site.pattern) for site in report.sites if not site.outside}
    for emulated, verb in ((False, "stay in high precision"), (True, "are emulated")):
        fallen = [site for site in report.fallbacks if (site.kernel == "emulated") == emulated]
        if fallen:
            count = len({(site.fqn, site.pattern) for site in fallen})
            lines.append(f"te_inductor: {count} of {len(places)} linear sites {verb}:")
        for reason, group in _grouped(fallen, lambda site: site.reason):
            share = report.flops.share_of(group)
            part = "" if share is None else f" ({_percent(share)} of FLOPs)"
            lines.append(f"  {reason}: {shown(site.fqn for site in group)}{part}")
    if report.flops.total and any(site.kernel == "high_precision" for site in report.fallbacks):
        lines.append(f"te_inductor: {report.flops}")
    for entry in report.unused_policy if places else ():  # an optimizer's graph is not what a policy is about
        known = sorted({fqn for fqn, _ in places})
        lines.append(
            f"te_inductor: policy entry {entry!r} matches no linear site of this graph{HIDDEN}"
            f" (sites: {', '.join(known[:4])}{', …' * (len(known) > 4)}){nearest(entry, known)}"
        )
    for (option, reason), unmet in _grouped(report.unmet, lambda one: (one.option, one.reason)):
        lines.append(f"te_inductor: option {option!r} does not reach, because {reason}: {shown(u.fqn for u in unmet)}")
    for reason, attention in _grouped([site for site in report.attention if site.slow], lambda one: one.reason):
        names = shown(site.fqn for site in attention)
        lines.append(
            f"te_inductor: attention reads its mask as a tensor, several times slower, because {reason}: {names}"
        )
    if report.failure:
        lines.append(f"te_inductor: compiled without low precision, because a pass of ours failed:\n{report.failure}")
    return "\n".join(lines) or None


def nearest(entry: str, fqns: Iterable[str]) -> str:
    """What a policy entry that matches nothing may have been meant to match: a path by another root, or one like it."""
    parts = entry.split(".")
    shorter = [".".join(parts[place:]) for place in range(1, len(parts))]
    for glob in [*shorter, f"*.{entry}"]:
        found = next((fqn for fqn in fqns if fnmatchcase(fqn, glob)), None)
        if found is not None:
            return f"; nearest: {found!r}, which {glob!r} matches, as paths start at the module whose code was compiled"
    close = get_close_matches(entry, fqns, n=1)
    return f"; nearest: {close[0]!r}" if close else ""


def uncompiled(failure: str) -> str:
    """The text of the warning about a graph whose code Inductor could not write to a file."""
    return (
        "te_inductor: a graph runs uncompiled, as files could not be written; set TORCHINDUCTOR_CACHE_DIR to a"
        f" folder that can be written\n{failure}"
    )


def without_state(fqns: Iterable[str]) -> str:
    """The text of the warning about delayed scaling that has to cast and has recorded no amax yet."""
    return (
        "te_inductor: delayed scaling has seen no step of these sites. This graph runs without gradients, so it records no"
        " amaxes, and casts by each tensor's own amax, which is as slow as recipe 'current':"
        f" {shown(fqns)};"
        " train first, or load what te_inductor.state_dict returned with te_inductor.load_state_dict"
    )


def without_amaxes(fqns: Iterable[str], calls: int) -> str:
    """The text of the warning about training in which delayed scaling never sees some tensor."""
    return (
        f"te_inductor: after {calls} calls delayed scaling has no amax of some tensors of these sites, as their gradients"
        " were zero, or no backward ran. Until it has, all of their graph casts by each tensor's own amax, which is as"
        f" slow as recipe 'current': {shown(fqns)};"
        " call the model under torch.no_grad() where no backward follows, and leave layers that get no gradient out by"
        " the option 'policy'"
    )


def misfitting(counts: Iterable[tuple[str, tuple[int, int, int, int]]]) -> str:
    """The text of the warning about scales of delayed scaling that did not suit their tensors; `counts` are
    `runtime.state.misfits.Misfits`, by tensor."""
    found = sorted((first, name, cut, coarse, steps) for name, (steps, cut, coarse, first) in counts if first)
    lines = [
        f"  {name}: from its step {first} on, values were cut off in {cut} and digits lost in {coarse} of {steps} steps"
        for first, name, cut, coarse, steps in found[:8]
    ]
    lines += [f"  and {len(found) - 8} more tensors"] if len(found) > 8 else []
    return (
        "te_inductor: delayed scaling cast tensors with scales that did not suit them, as their amaxes were far from those"
        " of earlier steps (said once):\n"
        + "\n".join(lines)
        + "\nClip outliers in front of these layers. Where magnitudes change from step to step, give the layers recipe"
        " 'current', which needs no history, by the option 'policy', or pass DelayedScaling(margin=…) against values cut"
        " off, and a shorter amax_history_len against lost digits"
    )


def state_was_lost(fqns: Iterable[str]) -> str:
    """The text of the warning about training that resumes without its scales."""
    return (
        "te_inductor: delayed scaling starts without history at sites whose parameters were trained before, as the"
        f" optimizer's state tells: {shown(fqns)}; save te_inductor.state_dict(model) in each checkpoint, and load it"
        " with te_inductor.load_state_dict(model, state) before training goes on"
    )


def amaxes_stay_local(reason: str) -> str:
    """The text of the warning about ranks that do not reduce the amaxes of delayed scaling together."""
    return (
        f"te_inductor: amaxes of delayed scaling are not reduced over ranks, as {reason}; each rank scales by its own;"
        f" pass {_LOCAL} where that is meant"
    )


_LOCAL = "options={'amax_group': 'none'} or DelayedScaling(reduce_amax=False)"


def amaxes_have_no_group(fqns: Iterable[str]) -> str:
    """The text of the warning about delayed scaling on several ranks that reduces nothing, as nobody says over what."""
    return (
        "te_inductor: amaxes of delayed scaling are not reduced over ranks, as the parameters of these sites are neither"
        f" sharded (FSDP2, DTensor) nor in a DistributedDataParallel: {shown(fqns)}; each rank scales by its own; pass"
        f" options={{'amax_group': …}}, a DeviceMesh, a ProcessGroup or its name, to reduce them, or {_LOCAL} where that"
        " is meant"
    )


COMPUTED_AGAIN = (
    "te_inductor: a checkpoint around a compiled module runs its forward again, which under delayed scaling is another"
    " step: it records its amaxes twice, and its gradients belong to a forward with the next step's scales; compile the"
    " function that calls torch.utils.checkpoint, not the module that it is given, or use a recipe without state"
)


CUT_BY_DDP = (
    "te_inductor: Dynamo cuts graphs where DistributedDataParallel's buckets of gradients end, 25 MB by default, and each"
    " piece is compiled by itself: casts are not fused with what lies in another piece, and layers that read one input"
    " are not one GEMM. Where blocks are compiled one by one, set torch._dynamo.config.optimize_ddp = False; where the"
    " whole model is, give DistributedDataParallel a bucket_cap_mb of a few blocks"
)


def shown(fqns: Iterable[str]) -> str:
    """Module paths for a message: the first ones, and how many more there are."""
    names = list(dict.fromkeys(plain(fqn) or "(root)" for fqn in fqns))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
