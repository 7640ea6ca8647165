"""The text of what a forward saves for its backward under option `saved`: what is cast, and what stays as it is."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from te_inductor.presentation.paths import grouped, kind, named, plain
from te_inductor.presentation.tables import Column, mib, paragraph, tabulated

if TYPE_CHECKING:
    from te_inductor.presentation.report import Report, SavedSite

COLUMNS = (
    Column("read by"),
    Column("n", right=True),
    Column("made by", optional=True),
    Column("tensor", whole=True, optional=True),
    Column("MiB", right=True),
    Column("saved", right=True),
    Column("why it stays", prose=True),
)


def text(report: "Report", details: bool = False, columns_wide: int | None = None) -> str:
    """A title and a table; empty where the option is off, or no backward follows."""
    if not report.saved:
        return ""
    return f"{paragraph(title(report), columns_wide)}\n{tabulated(COLUMNS, rows(report, details), columns_wide)}"


def title(report: "Report") -> str:
    """How much of what could be cast is."""
    before, after = (sum(getattr(one, size) for one in report.saved) for size in ("bytes_before", "bytes_after"))
    cast = sum(one.reason is None for one in report.saved)
    return (
        f"Saved for the backward, beside copies in FP8: {mib(after)} MiB in place of {mib(before)},"
        f" {cast} of {len(report.saved)} tensors in E4M3 with scales of 128 values, or as bits"
    )


def rows(report: "Report", details: bool = False) -> Iterator[tuple[str, ...]]:
    """A row for tensors whose modules differ in a number of their paths alone, with `details` for each tensor."""
    readers, makers = ([plain(getattr(one, path)) for one in report.saved] for path in ("fqn", "maker"))
    for group in grouped(enumerate(report.saved), lambda one: one[0] if details else _key(one[1])).values():
        sites, first = [one for _, one in group], group[0][1]
        before, after = (sum(getattr(one, size) for one in sites) for size in ("bytes_before", "bytes_after"))
        yield (
            named([one.fqn for one in sites], readers),
            str(len(sites)),
            named([one.maker for one in sites], makers) if first.maker else "",
            f"{' x '.join(map(str, first.shape))} {first.dtype}",
            mib(before),
            mib(after),
            first.reason or "",
        )


def _key(one: "SavedSite") -> tuple[object, ...]:
    return kind(one.fqn), kind(one.maker), one.shape, one.dtype, one.reason
