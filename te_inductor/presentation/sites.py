"""The text of `explain`'s report: a row for the layers of one kind, or for each layer, and what stays in high
precision."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from te_inductor.presentation import saved, weights
from te_inductor.presentation.paths import HIDDEN, by_kind, grouped, kind, named, nearest, plain, shown
from te_inductor.presentation.tables import Column, paragraph, percent, tabulated, wrapped

if TYPE_CHECKING:
    from te_inductor.presentation.report import AttentionSite, Report, Site, Unmet

BY_KIND = (
    Column("layers"),
    Column("n", right=True),
    Column("M x N x K", whole=True, optional=True),
    Column("FLOPs", right=True),
    Column("recipe", whole=True),
    Column("GEMM", optional=True),
    Column("kernel"),
)
BY_LAYER = (
    Column("module"),
    Column("pattern", optional=True),
    Column("GEMM", optional=True),
    Column("M x N x K", whole=True, optional=True),
    Column("FLOPs", right=True),
    Column("recipe"),
    Column("kernel"),
    Column("why not", prose=True),
)
_ALL = "fprop, dgrad, wgrad"
_ASKED = "recipe 'none', as the options, the policy or autocast say"


def text(report: "Report", details: bool, columns_wide: int | None) -> str:
    """Headline, table, and what is to be known beside it."""
    heads, rows = (BY_LAYER, layer_rows(report)) if details else (BY_KIND, kind_rows(report))
    parts = [paragraph(headline(report), columns_wide)]
    parts += [tabulated(heads, rows, columns_wide)] if report.sites else []
    reasons = [] if details else high_precision(report)
    if reasons:
        parts.append("\n".join(["High precision:", *(wrapped(line, columns_wide) for line in reasons)]))
    parts += [weights.text(report, columns_wide), saved.text(report, details, columns_wide)]
    parts.append("\n".join(line if "\n" in line else paragraph(line, columns_wide) for line in tail(report)))
    return "\n\n".join(part for part in parts if part)


def headline(report: "Report") -> str:
    """How much runs in low precision."""
    low = sum(site.kernel != "high_precision" for site in report.sites)
    line = f"te_inductor: {low} of {len(report.sites)} GEMMs in low precision, {len(report.fallbacks)} fell back"
    return line if report.flops.share is None else f"{line}\n{report.flops}"


def attention(report: "Report") -> list[str]:
    """What each mask is proven to be and which kernel computes attention by it, and why not another."""
    found = grouped(report.attention, lambda site: (site.mask, site.kernel, site.reason))
    fqns = [site.fqn for site in report.attention]
    return [
        f"attention, mask {mask}: {kernel}{f', because {reason}' if reason else ''}: {_names_of(sites, fqns)}"
        for (mask, kernel, reason), sites in found.items()
    ]


def losses(report: "Report") -> list[str]:
    """How each loss of an output layer is computed, and why not without its logits."""
    return [
        f"{site.loss} of {site.fqn or 'a product'}: {site.how}{f', because {site.reason}' if site.reason else ''}"
        for site in report.losses
    ]


def tail(report: "Report") -> list[str]:
    """Options without effect, what goes between ranks, the estimate, and a failure of ours."""
    fqns = [site.fqn for site in report.sites]
    lines = [
        f"policy entry {entry!r} matches no linear site{HIDDEN}{nearest(entry, fqns)}" for entry in report.unused_policy
    ]
    for (option, reason), unmet in grouped(report.unmet, lambda one: (one.option, one.reason)).items():
        lines.append(f"option {option!r} does not reach {_names_of(unmet, fqns)}: {reason}")
    wired = grouped((site for site in report.sites if site.wire is not None), lambda site: site.wire)
    lines += [f"{_names_of(sites, fqns)}: {wire}" for wire, sites in wired.items()]
    lines += attention(report) + losses(report)
    lines += [report.speedup] if report.speedup else []
    lines += [str(report.expected)] if report.expected else []
    lines += [str(report.statistics)] if report.statistics else []
    return lines + ([report.failure] if report.failure else [])


def high_precision(report: "Report") -> list[str]:
    """A line a reason: the layers that stay in high precision, or are emulated, and their share."""
    fqns = [site.fqn for site in report.sites]
    asked = (site.kernel == "high_precision" and site.recipe == "none" for site in report.sites)
    high = (site for site, none in zip(report.sites, asked, strict=True) if site.reason is not None or none)
    lines = []
    for reason, sites in grouped(high, lambda site: site.reason or _ASKED).items():
        share = report.flops.share_of(sites)
        part = "" if share is None else f" ({share:.1%} of FLOPs)"
        lines.append(f"{_names_of(sites, fqns)}{part}: {reason}")
    return lines


def kind_rows(report: "Report") -> Iterator[tuple[str, ...]]:
    """A row for layers that differ in a number of their paths alone; one more where their GEMMs have other kernels."""
    everyone = [site.fqn for site in report.sites]
    for group in kinds(report.sites):
        first = group[0][0]
        paths = list(dict.fromkeys(sites[0].fqn for sites in group))
        share = percent(report.flops.share_of(site for sites in group for site in sites))
        cells, said = (named(paths, everyone), str(len(paths)), _sizes(first), share), ""
        for gemms, recipe, kernel in _kernels(group[0]):
            yield *cells, "" if recipe == said else recipe, gemms, kernel
            cells, said = ("",) * len(cells), recipe  # type: ignore[assignment]


def layer_rows(report: "Report") -> Iterator[tuple[str, ...]]:
    """One row a layer; its GEMMs share a row where they share everything but sizes."""
    alike = attrgetter("fqn", "pattern", "recipe", "kernel", "reason")
    for group in grouped(report.sites, alike).values():
        first, [(gemms, _, kernel)] = group[0], _kernels(group)
        share = percent(report.flops.share_of(group))
        name = plain(first.fqn) or "(root)"
        yield name, first.pattern, gemms, _sizes(first), share, first.recipe, kernel, first.reason or ""


def kinds(sites: Iterable["Site"]) -> list[list[list["Site"]]]:
    """Groups of layers of one kind, of which each GEMM is the same; a layer is the list of its sites."""
    layers = grouped(sites, lambda site: (site.fqn, site.pattern)).values()

    def same(own: list["Site"]) -> tuple[object, ...]:
        gemms = ((one.gemm, one.shapes, one.recipe, one.kernel, one.reason, len(one.merged)) for one in own)
        return kind(own[0].fqn), own[0].pattern, tuple(gemms)

    return list(grouped(layers, same).values())


def _kernels(sites: Sequence["Site"]) -> list[tuple[str, str, str]]:
    """GEMMs that have one recipe and one kernel, "all" of them where they are three, and the names of both."""

    def kernel(site: "Site") -> str:
        return site.kernel + (f" ({len(site.merged)} in one)" if site.merged else "")

    found = grouped(sites, lambda site: (site.recipe, kernel(site)))
    names = [", ".join(dict.fromkeys(site.gemm for site in own)) for own in found.values()]
    return [("all" if name == _ALL else name, *one) for name, one in zip(names, found, strict=True)]


def _names_of(sites: Iterable["Site | AttentionSite | Unmet"], everyone: Sequence[str]) -> str:
    """Layers for a line: by kind, the first ones, and how many more."""
    groups = by_kind(site.fqn for site in sites).values()
    return shown(named(group, everyone) + (f" ({len(group)})" if len(group) > 1 else "") for group in groups)


def _sizes(site: "Site") -> str:
    return " x ".join(str(size) for size in site.shapes)
