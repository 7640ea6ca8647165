"""`make demo`: one small Llama, trained eagerly, compiled by Inductor, and compiled by te_inductor in FP8.

Exits with 1 where an arm's final loss is further from the compiled arm's than TOLERANCES allow.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import te_inductor
from examples.corpus import Corpus, standard_library
from examples.llama import LlamaConfig
from examples.training import Arm, Result, Settings, train

EAGER = Arm("eager")
COMPILED = Arm("inductor", {"backend": "inductor"})  # the arm that the others are measured against
TOLERANCE = 0.01  # of the compiled arm's loss
TOLERANCES = {"te nvfp4": 0.03}  # of 4 bits, where 1.4% was measured
SMOOTHED = 20  # steps of the plot

CPU = LlamaConfig()
GPU = LlamaConfig(dim=512, hidden=1408, heads=8, layers=8, context=256)

console = Console()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    settings = choose(args.device, args.steps, args.seed)
    corpus = standard_library()
    recipe_arms = [arm_of(recipe) for recipe in args.recipes]
    arms = [EAGER, COMPILED, *recipe_arms]
    introduce(settings, corpus)

    failures = [failure for arm in recipe_arms if arm.dtype is None and (failure := explain(arm, settings))]
    results = run(arms, settings, corpus)
    console.print(table(results))
    names = [arm.name for arm in recipe_arms]
    failures += compare(results, names)
    for path in (write_json(results, settings, args.out), write_png(results, settings, args.out)):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    for failure in failures:
        console.print(f"[red]FAILED[/] {failure}", soft_wrap=True)
    if not failures:
        wider = "".join(f" ({value:.0%}: {name})" for name, value in TOLERANCES.items() if name in names)
        text = f"[green]OK[/] every arm ends within {TOLERANCE:.0%} of {COMPILED.name}{wider}"
        console.print(text, highlight=False)
    return bool(failures)


def arm_of(recipe: str) -> Arm:
    """ "bf16" is Inductor's arm under autocast. Emulation is what the demo is about, and needs no warning."""
    if recipe == "bf16":
        return Arm("inductor bf16", {"backend": "inductor"}, torch.bfloat16)
    options = {"policy": {"*": recipe}} | ({"fallback": "silent"} if recipe in ("mxfp8", "nvfp4") else {})
    return Arm(f"te {recipe}", {"backend": "te", "options": options})


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["current"],
        help="one arm for each; bf16 is no recipe and runs Inductor's under autocast (default: current)",
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the figures (default: out)")
    return parser.parse_args(argv)


def choose(device: str, steps: int, seed: int) -> Settings:
    """bf16 and a larger model on a GPU, float32 and what two cores can train on CPU."""
    if device == "cuda":
        return Settings("cuda", torch.bfloat16, GPU, steps=steps, batch=32, seed=seed)
    return Settings(model=CPU, steps=steps, seed=seed)


def introduce(settings: Settings, corpus: Corpus) -> None:
    model = settings.new_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    where = torch.cuda.get_device_name() if settings.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    text = (
        f"Llama of {settings.model.layers} layers and {parameters / 1e6:.1f}M parameters,"
        f" {len(corpus.train) / 1e6:.1f} MB of the standard library's sources\n"
        f"{settings.steps} steps of {settings.batch} x {settings.model.context} bytes,"
        f" {str(settings.dtype).removeprefix('torch.')}, {where}, torch {torch.__version__}"
    )
    console.print(text, highlight=False, soft_wrap=True)


def explain(arm: Arm, settings: Settings) -> str | None:
    """Print what would run where; a message if nothing would run in low precision: the arm would compare nothing."""
    torch.compiler.reset()
    tokens = torch.zeros(settings.batch, settings.model.context, dtype=torch.long, device=settings.device)
    with settings.autocast():
        report = te_inductor.explain(settings.new_model(), tokens, options=options_of(arm))
    print(report)
    if all(site.kernel == "high_precision" for site in report.sites):
        return f"{arm.name}: no GEMM of the model runs in low precision here; the table says why"
    return None


def options_of(arm: Arm) -> Mapping[str, Any]:
    return (arm.compile or {}).get("options", {})


def run(arms: Sequence[Arm], settings: Settings, corpus: Corpus) -> list[Result]:
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    results = []
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(arm.name, total=settings.steps, start=False, loss="     ") for arm in arms]
        for arm, bar in zip(arms, bars, strict=True):
            progress.start_task(bar)
            advance = lambda loss, bar=bar: progress.update(bar, advance=1, loss=f"{loss:.3f}")  # noqa: E731
            results.append(train(arm, settings, corpus, advance))
    return results


def table(results: Sequence[Result]) -> Table:
    shown = Table(title="Loss in nats per byte", title_justify="left")
    for column in ("arm", "final", "validation", f"vs {COMPILED.name}", "ms a step", "seconds"):
        shown.add_column(column, justify="left" if column == "arm" else "right")
    for result in results:
        shown.add_row(
            result.arm,
            f"{result.final:.4f}",
            f"{result.validation:.4f}",
            f"{difference(result, results):+.2%}",
            f"{result.step_ms:.1f}",
            f"{result.wall_s:.0f}",
        )
    return shown


def difference(result: Result, results: Sequence[Result]) -> float:
    """The difference of the final loss, relative to the compiled arm's."""
    reference = next(other.final for other in results if other.arm == COMPILED.name)
    return result.final / reference - 1


def compare(results: Sequence[Result], names: Sequence[str]) -> list[str]:
    """A message for each named arm that ends too far from the compiled one; a NaN is too far."""
    off = {result.arm: difference(result, results) for result in results if result.arm in names}
    return [
        f"{name}: final loss is {value:+.2%} from {COMPILED.name}'s, expected within {TOLERANCES.get(name, TOLERANCE):.0%}"
        for name, value in off.items()
        if not abs(value) <= TOLERANCES.get(name, TOLERANCE)
    ]


def write_json(results: Sequence[Result], settings: Settings, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "torch": torch.__version__,
        "te_inductor": te_inductor.__version__,
        "settings": {**asdict(settings), "dtype": str(settings.dtype)},
        "arms": [{**asdict(result), f"final_vs_{COMPILED.name}": difference(result, results)} for result in results],
    }
    path = out / "demo.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    return path


def write_png(results: Sequence[Result], settings: Settings, out: Path) -> Path:
    """The curves lie on top of each other, so a second panel shows how far each is from the compiled arm's. Lines are
    means of the last `SMOOTHED` steps; steps themselves are drawn faintly."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = smoothed(next(result.losses for result in results if result.arm == COMPILED.name))
    for index, result in enumerate(results):
        color, mean = f"C{index}", smoothed(result.losses)
        curves.plot(result.losses, color=color, alpha=0.15, linewidth=0.7)
        curves.plot(mean, color=color, label=f"{result.arm}: {result.final:.4f}", linewidth=max(0.9, 3 / 1.5**index))
        percent = [100 * (mine / theirs - 1) for mine, theirs in zip(mean, reference, strict=True)]
        apart.plot(percent, color=color, linewidth=1.2)
    curves.set_ylabel("training loss (nats per byte)")
    curves.legend(title=f"mean of the last {settings.last} steps")
    apart.set_ylabel(f"% from {COMPILED.name}")
    apart.set_xlabel(f"step (lines: mean of the last {SMOOTHED})")
    tokens = settings.batch * settings.model.context
    figure.suptitle(
        f"One Llama of {settings.model.layers} layers, {settings.steps} steps of {tokens} bytes, by arm\n"
        f"{settings.device}, torch {torch.__version__}, te_inductor {te_inductor.__version__}",
        fontsize=11,
    )
    for axes in (curves, apart):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path = out / "demo.png"
    figure.savefig(path, dpi=120)
    return path


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last `SMOOTHED` steps at each; of fewer at the start."""
    return [fmean(losses[max(0, place - SMOOTHED) : place]) for place in range(1, len(losses) + 1)]


if __name__ == "__main__":
    sys.exit(main())
