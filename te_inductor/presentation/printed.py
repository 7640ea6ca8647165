"""What all reports have in common: figures as data, printed as a table between a headline and what is to be looked at."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from te_inductor.presentation import html
from te_inductor.presentation.tables import Column, paragraph, tabulated


class Printed:
    """The base of reports, which are dataclasses: `print(report)` shows a table, `report.table(details=True)` one with
    every layer, `report.to_dict()` is for JSON."""

    def _headline(self) -> str:
        """What the report comes to; its first line stands for the report where one line has to do."""
        raise NotImplementedError

    def _closing(self) -> str:
        """What stands below the table."""
        return ""

    def _cells(self, details: bool) -> tuple[Sequence[Column], Iterable[Sequence[str]]]:
        """The columns and the rows of the table."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def table(self, details: bool = False, columns: int | None = None) -> str:
        """The report as text. Layers that differ in a number of their paths alone share a row, with the figures of the
        worst of them; with `details` each layer has its rows. As wide as the terminal (COLUMNS), or as `columns` says;
        in a pipe as wide as it needs."""
        heads, rows = self._cells(details)
        rows = list(rows)
        table = tabulated(heads, rows, columns) if rows else ""
        parts = paragraph(self._headline(), columns), table, paragraph(self._closing(), columns)
        return "\n\n".join(filter(None, parts))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        """A line: the table is for `print`."""
        return f"<{type(self).__name__}: {self._headline().partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        parts = html.text(self._headline()), html.table(*self._cells(details=False)), html.text(self._closing())
        return html.part(filter(None, parts))
