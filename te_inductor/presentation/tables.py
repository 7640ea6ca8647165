"""Tables of text. Names are broken behind dots, and inside of a word only where a word is wider than its column."""

import io
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

PIPE = 400  # columns where nobody looks at a terminal: what a table needs, as lines there are searched, not read
_PROSE = 60  # columns of a cell of sentences
_GAP = 2  # columns between two
_NARROW = 4  # columns, which nothing is made narrower than
_PIECE = re.compile(r"[^.:,/ ]*[.:,/ ]?")
_PART = re.compile(r"[^_]*_?")  # of a piece that is wider than its column


class Column(NamedTuple):
    name: str
    right: bool = False  # aligned so, as numbers are; never broken
    whole: bool = False  # never broken
    prose: bool = False  # sentences
    optional: bool = False  # left out where the table is too wide otherwise


def width() -> int:
    """The terminal's width: what COLUMNS says, else what the terminal does. Of a pipe or a file, as much as a line
    needs."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else PIPE
    except (OSError, ValueError, AttributeError):  # a stream without a descriptor, as in a notebook
        return PIPE


def tabulated(columns: Sequence[Column], rows: Iterable[Sequence[str]], columns_wide: int | None = None) -> str:
    """A table of text, without an end of line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    wide = width() if columns_wide is None else columns_wide
    rows = [tuple(row) for row in rows]
    kept, widths = _widths(columns, rows, wide)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for place, size in zip(kept, widths, strict=True):
        column = columns[place]
        table.add_column(column.name, justify="right" if column.right else "left", width=size, overflow="fold")
    for row in rows:
        cells = zip(kept, widths, strict=True)
        table.add_row(*(Text("\n".join(broken(row[place], size)), overflow="fold") for place, size in cells))
    made = io.StringIO()
    Console(file=made, width=max(wide, sum(widths) + _GAP * len(widths)), highlight=False).print(table)
    lines = "\n".join(line.rstrip() for line in made.getvalue().splitlines())
    unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    return lines if unicode else lines.replace("─", "-")


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], wide: int) -> tuple[list[int], list[int]]:
    """Finds which columns fit, by their places, and how wide each is. The first ones are given first what they ask
    for."""
    natural, least = [], []
    for place, column in enumerate(columns):
        cells = [row[place] for row in rows]
        longest = max(map(len, [column.name, *cells]))
        whole = max(map(len, [*column.name.split(), *cells]))
        pieces = max(len(piece.rstrip(" ")) for cell in [column.name, *cells] for piece in _PIECE.findall(cell))
        if column.prose and longest > _PROSE:
            longest, pieces = _PROSE, min(max(pieces, wide // 4), _PROSE)
        natural.append(longest)
        least.append(whole if column.right or column.whole else pieces)
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    for place in reversed(kept[:]):
        if sum(least[one] + _GAP for one in kept) - _GAP > wide and columns[place].optional:
            kept.remove(place)
    spare = wide - sum(least[place] + _GAP for place in kept) + _GAP
    widths = []
    for place in kept:
        more = min(max(spare, 0), natural[place] - least[place])
        spare -= more
        widths.append(least[place] + more)
    while sum(widths) + _GAP * (len(widths) - 1) > wide and max(widths) > _NARROW:
        widths[widths.index(max(widths))] -= 1  # no word of it fits
    return kept, widths


def broken(text: str, columns: int) -> list[str]:
    """The lines of a text of at most so many columns, broken behind spaces, dots and the like; inside of a word where
    it is wider."""
    if " " in text:
        return textwrap.wrap(text, columns, break_on_hyphens=False) or [""]
    pieces: list[str] = []
    for piece in _PIECE.findall(text):
        pieces += [piece] if len(piece) <= columns else _PART.findall(piece)
    lines = [""]
    for piece in filter(None, pieces):
        if len(lines[-1]) + len(piece) > columns and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > columns:
            lines[-1:] = [lines[-1][:columns], lines[-1][columns:]]
    return lines


def digits(value: float) -> str:
    """Three digits without an exponent; all that a larger number has before its point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def mib(size: int) -> str:
    """A number of bytes in MiB."""
    return digits(size / 2**20)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def paragraph(text: str, columns_wide: int | None = None) -> str:
    """Lines of text, none of them set in."""
    return "\n".join(wrapped(line, columns_wide, "") for line in text.splitlines())


def wrapped(text: str, columns_wide: int | None = None, indent: str = "  ") -> str:
    """A line of a list, set in, and its further lines a little more."""
    wide = width() if columns_wide is None else columns_wide
    if wide == PIPE:
        return indent + text
    given = {"initial_indent": indent, "subsequent_indent": indent + "  ", "break_on_hyphens": False}
    return "\n".join(textwrap.wrap(text, max(wide, 20), **given))  # type: ignore[arg-type]
