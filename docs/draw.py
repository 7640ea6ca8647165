"""The pictures of performance.md: `python docs/draw.py` draws them from the tables of that page into docs/pictures."""

import re
from pathlib import Path

from matplotlib import pyplot

DOCS = Path(__file__).parent
COLORS = {"te `delayed`": "#1b6ca8", "te `current`": "#7fb2d9", "torchao tensorwise": "#e08e45"}
Table = tuple[list[str], list[list[str]]]


def tables(page: str) -> dict[str, Table]:
    """The tables of a page by the first cell of their heads: the head's cells, and those of each row."""
    found: dict[str, Table] = {}
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        rows = [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.setdefault(rows[0][0], (rows[0], rows[2:]))
    return found


def number(cell: str) -> float | None:
    """The first number of a cell; None where it has none."""
    found = re.match(r"\d+\.?\d*", cell)
    return float(found[0]) if found else None


def draw_fleet(table: Table, path: Path) -> None:
    """Draws each model's speed over bf16 on both cards, and its peak memory on the first, a column each."""
    head, rows = table
    card = next(place for place, cell in enumerate(head) if cell.startswith("H100"))
    columns = [
        ("over bf16, H200", {head[place]: place for place in (2, 3, 4)}),
        ("over bf16, H100", {head[place]: place for place in range(card + 1, len(head))}),
        ("peak memory, of bf16's, H200", {"te `delayed`": 5, "torchao tensorwise": 6}),
    ]
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 0.42 * len(rows) + 1.2), sharey=True, layout="constrained")
    for axis, (title, arms) in zip(axes, columns, strict=True):
        for turn, (arm, place) in enumerate(arms.items()):
            at = [row + (turn - 1) * 0.27 for row in range(len(rows))]
            gains = [(number(row[place]) or 1) - 1 for row in rows]
            axis.barh(at, gains, 0.25, left=1, color=COLORS[arm], label=arm.replace("`", ""))
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0.85, 1.55)
    axes[0].set_yticks(range(len(rows)), [row[0] for row in rows])
    axes[0].invert_yaxis()
    axes[0].legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=90)


def draw_stored(table: Table, path: Path) -> None:
    """Draws how much faster than bf16 layers of stored weights are, by the rows of x, a panel a kind of weight."""
    head, rows = table
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
    for place, (axis, title) in enumerate(zip(axes, ("rowwise", "nvfp4_weight_only"), strict=True)):
        for row in rows:
            axis.plot(head[1:], [float(cell.split(", ")[place]) for cell in row[1:]], marker="o", label=row[0])
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(f"{title}, over bf16", fontsize=10)
    axes[1].legend(title=head[0], fontsize=8, title_fontsize=8)
    figure.savefig(path, dpi=90)


def main() -> None:
    found = tables((DOCS / "performance.md").read_text())
    draw_fleet(found["model"], DOCS / "pictures/fleet.png")
    draw_stored(found["N x K"], DOCS / "pictures/stored.png")


if __name__ == "__main__":
    main()
