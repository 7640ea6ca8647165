"""The pictures of performance.md: `python docs/draw.py` draws them from the tables of tables.md into docs/pictures."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
DARK, LIGHT, OTHERS = "#1b6ca8", "#7fb2d9", "#e08e45"  # ours, the same in a second measure, another library's
Rows = list[list[str]]
Table = tuple[list[str], Rows]


def tables(page: str) -> dict[str, Table]:
    """The tables of a page by the first two cells of their heads: the head's cells, and those of each row."""
    found: dict[str, Table] = {}
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        rows = [[plain(cell) for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found[", ".join(rows[0][:2])] = rows[0], rows[2:]
    return found


def plain(cell: str) -> str:
    """A cell's words, without the marks of Markdown."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("**", "").replace("`", "").strip()


def number(cell: str) -> float | None:
    """The first number of a cell; None where it has none."""
    found = re.match(r"\d+\.?\d*", cell)
    return float(found[0]) if found else None


def bars(axis: Axes, names: Sequence[str], arms: Mapping[str, Sequence[float | None]], colors: Sequence[str]) -> None:
    """Draws a group of bars for each name, one an arm, from 1 on: to the right is faster, or more."""
    height = 0.8 / len(arms)
    for turn, (arm, values) in enumerate(arms.items()):
        at = [place + (turn - (len(arms) - 1) / 2) * height for place in range(len(names))]
        drawn = axis.barh(at, [(value or 1) - 1 for value in values], height * 0.95, left=1, color=colors[turn])
        axis.bar_label(drawn, [f"{value:g}" if value else "" for value in values], padding=2, fontsize=7)
        drawn.set_label(arm)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(names)), names)
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def one(names: Sequence[str], arms: Mapping[str, Sequence[float | None]], path: Path) -> None:
    """Draws a picture of one column of groups of bars."""
    figure, axis = pyplot.subplots(figsize=(9, 0.24 * len(names) * (len(arms) + 0.4) + 0.9), layout="constrained")
    bars(axis, names, arms, (DARK, LIGHT))
    for name, bar in zip(names, axis.containers[0], strict=True):
        if "torchao" in name:
            bar.set_color(OTHERS)
    axis.invert_yaxis()
    axis.set_xlabel("times as fast as bf16" if len(arms) == 1 else "times as fast")
    if len(arms) > 1:
        axis.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def draw_training(table: Table, path: Path) -> None:
    """Draws how much faster two blocks are under each recipe: the step, and its forward alone."""
    rows = [row for row in table[1] if row[0] == "2"]
    names = [row[1].partition(";")[0] for row in rows]
    one(
        names,
        {head: [number(row[place]) for row in rows] for place, head in ((4, "over bf16"), (5, table[0][5]))},
        path,
    )


def draw_masks(table: Table, path: Path) -> None:
    """Draws how much faster whole steps with a mask are, over bf16 and over bf16 with our attention."""
    names, above = [], ""
    for row in table[1]:
        names.append(f"{row[0].replace('the same', above)}, {row[1]}, {row[8]}")
        above = above if row[0].startswith("the same") else row[0]
    one(names, {table[0][place]: [number(row[place]) for row in table[1]] for place in (5, 6)}, path)


def draw_ranks(table: Table, path: Path) -> None:
    """Draws how much faster programs on several GPUs are. A row may have two programs, and two figures."""
    names, values, above = [], [], ""
    for program, cards, *row in table[1]:
        for part, value in zip(program.split("; "), row[2].split("; "), strict=True):
            first = part == program.split("; ")[0]
            name = part.replace("the same", above) if first else f"{program.split('; ')[0]}; {part}"
            names.append(f"{name}, {cards}")
            values.append(number(value))
        above = above if program.startswith("the same") else program
    one(names, {"over bf16": values}, path)


def draw_fleet(table: Table, path: Path) -> None:
    """Draws each model's speed over bf16 on both cards, and its peak memory on the first, a column each."""
    head, rows = table
    card = next(place for place, cell in enumerate(head) if cell.startswith("H100"))
    columns = [
        ("over bf16, H200", {head[place]: place for place in (2, 3, 4)}),
        ("over bf16, H100", {head[place]: place for place in range(card + 1, len(head))}),
        ("peak memory, of bf16's, H200", {"te delayed": 5, "torchao tensorwise": 6}),
    ]
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 0.62 * len(rows) + 1.2), sharey=True, layout="constrained")
    for axis, (title, arms) in zip(axes, columns, strict=True):
        values = {arm: [number(row[place]) for row in rows] for arm, place in arms.items()}
        bars(axis, [row[0] for row in rows], values, (DARK, LIGHT, OTHERS) if len(arms) == 3 else (DARK, OTHERS))
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0.85, 1.6)
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


PICTURES = {
    "training": (draw_training, "blocks, recipe"),
    "masks": (draw_masks, "layers of, tokens"),
    "ranks": (draw_ranks, "program, cards"),
    "fleet": (draw_fleet, "model, H200: bf16 ms, GiB"),
    "stored": (draw_stored, "N x K, 1 row"),
}


def main() -> None:
    found = tables((DOCS / "tables.md").read_text())
    for name, (draw, head) in PICTURES.items():
        draw(found[head], DOCS / f"pictures/{name}.png")


if __name__ == "__main__":
    main()
