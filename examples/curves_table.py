"""The picture and the table of what examples/curves.py has trained:

    python -m examples.curves_table --folder out/curves --shape 125m

prints the table, and writes it beside the picture. A recipe is compared with bf16's run of the same seed, at its own
last evaluation, so that shorter runs are compared with bf16 as it was then. The error of a gap is the standard error of
the mean over held-out batches, which both runs read; runs of other seeds of bf16 say how far apart equal runs end."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

LAST = 0.05  # share of a run's steps whose training losses are averaged in the end
BASE = "bf16"


@dataclass(frozen=True)
class Curve:
    """The log of a run."""

    shape: str
    recipe: str
    seed: int
    tokens: int  # of a step
    losses: list[float]
    norms: list[float]
    seconds: list[float]
    held_out: dict[int, list[float]]  # by step, a loss a batch

    def final(self, step: int) -> float:
        """The mean training loss of the last steps before one."""
        return fmean(self.losses[max(0, step - max(1, int(LAST * len(self.losses)))) : step])


def read(path: Path) -> Curve:
    """A run from its log."""
    from examples.curves import SHAPES

    header, *lines = (json.loads(line) for line in path.read_text().splitlines())
    steps = [line for line in lines if "loss" in line]
    plan = header["plan"]
    return Curve(
        plan["shape"],
        plan["recipe"],
        plan["seed"],
        plan["batch"] * SHAPES[plan["shape"]].context,
        [line["loss"] for line in steps],
        [line["norm"] for line in steps],
        [line["seconds"] for line in steps],
        {line["step"]: line["held_out"] for line in lines if "held_out" in line},
    )


def gap(run: Curve, base: Curve) -> tuple[int, float, float]:
    """The last step that both evaluated, the mean difference of held-out losses there, and its standard error."""
    step = max(run.held_out.keys() & base.held_out.keys(), default=0)
    if not step:
        raise ValueError(f"{run.recipe} and {base.recipe}, seed {run.seed}, share no evaluation; train on")
    apart = [one - other for one, other in zip(run.held_out[step], base.held_out[step], strict=True)]
    return step, fmean(apart), stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")


def table(curves: Sequence[Curve]) -> str:
    """A row a run, in Markdown, and a line on what is noise."""
    bases = {curve.seed: curve for curve in curves if curve.recipe == BASE}
    if 0 not in bases:
        raise ValueError(f"no run of {BASE} with seed 0 among {[curve.recipe for curve in curves]}; train it first")
    rows = [
        "| recipe | seed | M tokens | training loss | held-out loss | gap to bf16's | of the loss | ms a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    others = []
    for curve in curves:
        base = bases[0] if curve.recipe == BASE else bases.get(curve.seed, bases[0])
        step, apart, error = gap(curve, base)
        held_out = fmean(curve.held_out[step])
        same = curve is base
        if curve.recipe == BASE and not same:
            others.append(apart)
        shown = "" if same else f"{apart:+.4f} ± {error:.4f}"
        share = "" if same else f"{apart / fmean(base.held_out[step]):+.2%}"
        millions = step * curve.tokens / 1e6
        pace = 1e3 * sorted(curve.seconds)[len(curve.seconds) // 2]
        rows.append(
            f"| {curve.recipe} | {curve.seed} | {millions:.1f} | {curve.final(step):.4f} | {held_out:.4f}"
            f" | {shown} | {share} | {pace:.1f} |"
        )
    noise = f"Runs of bf16 with other seeds end {', '.join(f'{value:+.4f}' for value in others)} from the first."
    return "\n".join([*rows, "", noise if others else "There is one seed of bf16: what is noise is not known."])


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """The mean of the last `span` values at each."""
    return [fmean(values[max(0, place - span) : place]) for place in range(1, len(values) + 1)]


def draw(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Losses, how far each is from bf16's with the noise of its seeds as a band, and gradient norms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    losses, apart, norms = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    span = max(1, len(curves[0].losses) // 100)
    smooth = [smoothed(curve.losses, span) for curve in curves]
    base = next(mean for curve, mean in zip(curves, smooth, strict=True) if (curve.recipe, curve.seed) == (BASE, 0))
    for place, (curve, mean) in enumerate(zip(curves, smooth, strict=True)):
        name = f"{curve.recipe}, seed {curve.seed}" if curve.seed else curve.recipe
        millions = [curve.tokens * (step + 1) / 1e6 for step in range(len(mean))]
        losses.plot(millions, mean, color=f"C{place}", label=name, linewidth=1)
        norms.plot(millions, smoothed(curve.norms, span), color=f"C{place}", linewidth=1)
        off = [one - other for one, other in zip(mean, base, strict=False)]
        if curve.recipe == BASE and curve.seed:
            band = [abs(value) for value in off]
            apart.fill_between(millions[: len(off)], [-value for value in band], band, color="0.85", label=f"{name}, ±")
        elif mean is not base:
            apart.plot(millions[: len(off)], off, color=f"C{place}", linewidth=1)
    losses.set_ylabel("training loss (nats a token)")
    losses.legend()
    apart.set_ylabel("from bf16's")
    apart.axhline(0, color="0.3", linewidth=0.5)
    edge = max((abs(value) for mean in smooth for value in differences(mean, base)), default=0.01)
    apart.set_ylim(-1.2 * edge - 1e-6, 1.2 * edge + 1e-6)
    if apart.get_legend_handles_labels()[0]:
        apart.legend()
    norms.set_ylabel("gradient norm")
    norms.set_yscale("log")
    norms.set_xlabel(f"million tokens (lines: mean of the last {span} steps)")
    figure.suptitle(title, fontsize=11)
    for axes in (losses, apart, norms):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def differences(mean: Sequence[float], base: Sequence[float]) -> list[float]:
    """How far a curve is from another behind its first fifth, where losses fall fast."""
    return [one - other for one, other in list(zip(mean, base, strict=False))[len(base) // 5 :]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what examples.curves was given")
    parser.add_argument("--shape", default="125m")
    parser.add_argument("--title", default="")
    args = parser.parse_args(argv)
    found = [read(path) for path in args.folder.glob(f"{args.shape}-*/log.jsonl")]
    curves = [curve for curve in found if curve.shape == args.shape]
    curves.sort(key=lambda curve: (curve.recipe != BASE, curve.seed, curve.recipe))
    text = table(curves)
    print(text)
    (args.folder / f"{args.shape}.md").write_text(text + "\n")
    draw(curves, args.folder / f"{args.shape}.png", args.title or f"Loss curves, {args.shape}")


if __name__ == "__main__":
    main()
