"""The table and the picture of what examples/grpo.py has trained."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

FIRST = 3  # steps that compile, or capture, and are left out of times
QUARTERS = 4  # parts of a run whose mean rewards the table shows

Steps = Sequence[Mapping[str, float]]


def read(folder: Path) -> dict[str, Steps]:
    """The steps of each arm, from its file."""
    found = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()][1:] for path in folder.glob("*.jsonl")
    }
    return {arm: found[arm] for arm in sorted(found) if found[arm]}


def table(arms: Mapping[str, Steps]) -> str:
    """A row an arm, in Markdown."""
    rows = [
        "| arm | steps | reward by quarters | log-probability apart, mean | max | probability ratio | rollout ms"
        " | training ms | step, times as fast as bf16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    paces = {arm: milliseconds(steps) for arm, steps in arms.items()}
    for arm, steps in arms.items():
        rewards = [step["reward"] for step in steps]
        cuts = [len(rewards) * part // QUARTERS for part in range(QUARTERS + 1)]
        curve = " ".join(f"{fmean(rewards[one:end]):.3f}" for one, end in pairwise(cuts) if end > one)
        apart, most = fmean(step["mean_apart"] for step in steps), max(step["max_apart"] for step in steps)
        rollout, training = paces[arm]
        faster = f"{sum(paces['bf16']) / (rollout + training):.2f}" if "bf16" in paces else ""
        rows.append(
            f"| {arm} | {len(steps)} | {curve} | {apart:.2e} | {most:.2e} | {math.exp(apart):.4f} | {rollout:.1f}"
            f" | {training:.1f} | {faster} |"
        )
    return "\n".join(rows)


def milliseconds(steps: Steps) -> tuple[float, float]:
    """Medians of rollout and training, behind the first steps."""
    late = steps[FIRST:] or steps
    rollout, training = (1e3 * median(step[key] for step in late) for key in ("rollout_s", "training_s"))
    return rollout, training


def draw(arms: Mapping[str, Steps], path: Path, title: str) -> None:
    """Rewards, differences of log-probabilities, and times, by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    rewards, apart, times = figure.subplots(3, 1, height_ratios=(3, 2, 2))
    for place, (arm, steps) in enumerate(arms.items()):
        count, values = [step["step"] for step in steps], [step["reward"] for step in steps]
        smooth = [fmean(values[max(0, end - 5) : end]) for end in range(1, len(values) + 1)]
        rewards.plot(count, smooth, color=f"C{place}", label=arm, linewidth=1.2)
        apart.plot(count, [step["mean_apart"] for step in steps], color=f"C{place}", linewidth=1)
        for side, shift, hatch in zip(milliseconds(steps), (-0.2, 0.2), ("", "//"), strict=True):
            times.bar(place + shift, side, 0.4, color=f"C{place}", hatch=hatch, edgecolor="white")
    rewards.set_ylabel("reward, mean of 5 steps")
    rewards.legend()
    apart.set_ylabel("|log-probability,\nrollout to training|, mean")
    apart.set_yscale("symlog", linthresh=1e-6)
    apart.set_ylim(bottom=0)
    apart.set_xlabel("step")
    times.set_ylabel("ms: rollout,\ntraining (hatched)")
    times.set_xticks(range(len(arms)), list(arms))
    figure.suptitle(title, fontsize=11)
    for axes in (rewards, apart, times):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def show(folder: Path, picture: Path | None, title: str) -> None:
    """Prints the table of all arms in the folder, and writes it there, and the picture."""
    arms = read(folder)
    text = table(arms)
    print(f"{title}\n\n{text}", flush=True)
    (folder / "grpo.md").write_text(text + "\n")
    if picture is not None:
        draw(arms, picture, title)
