"""Reports as one page of HTML each, without scripts and without other files."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from te_inductor.presentation.tables import Column

if TYPE_CHECKING:
    from te_inductor.presentation.report import Report

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin: 1em 0; }
th { text-align: left; border-bottom: 2px solid #888; position: sticky; top: 0; background: #fff; }
td { border-bottom: 1px solid #ddd; vertical-align: top; overflow-wrap: anywhere; }
th, td { padding: 0.25em 0.8em 0.25em 0; }
td.number, th.number { text-align: right; white-space: nowrap; }
pre { background: #f6f6f6; padding: 0.8em; white-space: pre-wrap; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page; the parts are HTML already."""
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are plain text."""
    marks = [' class="number"' if column.right else "" for column in columns]
    head = "".join(f"<th{mark}>{escape(one.name)}</th>" for one, mark in zip(columns, marks, strict=True))
    lines = ["".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def text(plain: str) -> str:
    """Lines as they are."""
    return f"<pre>{escape(plain)}</pre>" if plain else ""


def page_of_sites(report: "Report") -> str:
    """What `explain` found: kinds of layers, reasons, and every layer."""
    return page("te_inductor: what runs where", _parts(report))


def part_of_sites(report: "Report") -> str:
    """The same as a part of a page, as notebooks show it."""
    return part(_parts(report))


def part(parts: Iterable[str]) -> str:
    """A part of a page that has styles of its own; the parts are HTML already."""
    return "\n".join(["<div>", *parts, "</div>"])


def _parts(report: "Report") -> list[str]:
    from te_inductor.presentation import saved, sites

    parts = [text(sites.headline(report))]
    tables = [
        ("By kind", sites.BY_KIND, sites.kind_rows(report)),
        ("By layer", sites.BY_LAYER, sites.layer_rows(report)),
    ]
    tables += [(saved.title(report), saved.COLUMNS, saved.rows(report))] if report.saved else []
    for title, columns, rows in tables:
        parts += [f"<h2>{title}</h2>", table(columns, rows)]
        if title == "By kind":
            reasons = sites.high_precision(report)
            parts += ["<h2>High precision</h2>", text("\n".join(reasons))] if reasons else []
            parts.append(text("\n".join(sites.tail(report))))
    return parts
