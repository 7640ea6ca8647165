"""What the host does in a training step: its own time, forward and backward, and the functions that take it.

    python -m benchmarks.host                        # an experts' layer and Llama blocks, bf16 and delayed
    python -m benchmarks.host --works qwen3 --tokens 1024 --recipes delayed rowwise --functions 40
    python -m benchmarks.host --works tiny --device cpu --tokens 64

A layer alone, forward and backward, without an optimizer. Times are of calls that return before the device is done: it
is synchronized in front of each step, so that no queue is ever full. Arms are timed in turn, medians of all rounds. The
backward runs in the calling thread (`set_multithreading_enabled(False)`), where a profile sees it. Ops are those of this
package's library that go through torch's dispatcher in a step."""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import experts, harness, llama_blocks, table
from benchmarks.llama_blocks import Shape

WORKS = (*experts.LAYERS, "llama")


class Arm(NamedTuple):
    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]


def build(work: str, args: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    if work == "llama":
        shape = Shape(batch=1, seq=args.tokens)
        return llama_blocks.build(shape, torch.bfloat16, args.device), llama_blocks.inputs(
            shape, torch.bfloat16, args.device
        )[0].requires_grad_()
    model, width = experts.layer(work, 0.0, args.device), experts.model_width(work)
    return model, torch.randn(1, args.tokens, width, device=args.device, dtype=torch.bfloat16, requires_grad=True)


def arm(work: str, recipe: str, args: argparse.Namespace) -> Arm:
    torch._dynamo.reset()
    model, x = build(work, args)
    options = {"recipe": recipe, "policy": {"gate": "none", "*": recipe}}
    te = {"backend": harness.te_backend(), "options": options} if recipe != "bf16" else {}
    compiled: Any = torch.compile(model, **te)
    dy = torch.randn_like(x)

    def forward() -> Tensor:
        for parameter in (*model.parameters(), x):
            parameter.grad = None
        y = compiled(x)
        return y[0] if isinstance(y, tuple) else y  # type: ignore[no-any-return]

    made = Arm(forward, lambda y: y.backward(dy))  # type: ignore[no-untyped-call]
    for _ in range(12):  # beyond the first steps, which may be interpreted
        made.backward(made.forward())
    harness.synchronize(args.device)
    return made


def times(one: Arm, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Host milliseconds of each forward, and of each backward."""
    found: tuple[list[float], list[float]] = [], []
    for _ in range(args.iters):
        harness.synchronize(args.device)
        start = time.perf_counter()
        y = one.forward()
        between = time.perf_counter()
        one.backward(y)
        end = time.perf_counter()
        found[0].append((between - start) * 1e3)
        found[1].append((end - between) * 1e3)
    return found


def profile(one: Arm, args: argparse.Namespace) -> pstats.Stats:
    profiler = cProfile.Profile()
    for _ in range(args.iters):
        harness.synchronize(args.device)
        profiler.enable()
        one.backward(one.forward())
        profiler.disable()
    return pstats.Stats(profiler)


def show(stats: pstats.Stats, title: str, args: argparse.Namespace) -> None:
    rows = []
    for (file, line, name), (_, calls, own, whole, _) in stats.stats.items():  # type: ignore[attr-defined]
        place = "/".join(Path(file).parts[-2:])
        steps = args.iters
        rows.append((f"{name} ({place}:{line})", calls / steps, own / steps * 1e6, whole / steps * 1e6))
    rows.sort(key=lambda row: -row[2])
    cells = [[name, f"{calls:.1f}", f"{own:.0f}", f"{whole:.0f}"] for name, calls, own, whole in rows[: args.functions]]
    table.show(title, ("function", "calls a step", "own us", "with callees us"), cells)


def main() -> None:
    parser = harness.arguments(__doc__, "host", device="cuda", tokens=2048, iters=40, rounds=3)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["qwen3", "llama"])
    parser.add_argument("--recipes", nargs="+", default=["delayed"])
    parser.add_argument("--functions", type=int, default=0, help="of a profile, which slows a step down")
    args = parser.parse_args()
    environment, rows = harness.environment(args.device), []
    with torch.autograd.set_multithreading_enabled(False):
        for work in args.works:
            arms = {recipe: arm(work, recipe, args) for recipe in ("bf16", *args.recipes)}
            taken: dict[str, tuple[list[float], list[float]]] = {recipe: ([], []) for recipe in arms}
            for _ in range(args.rounds):
                for recipe, one in arms.items():
                    for kept, new in zip(taken[recipe], times(one, args), strict=True):
                        kept += new
            for recipe, pair in taken.items():
                forward, backward = map(statistics.median, pair)
                rows.append({"work": work, "arm": recipe, "forward": forward, "backward": backward})
            for recipe, one in arms.items():
                if args.functions:
                    show(profile(one, args), f"{work}, {recipe}: functions by their own time", args)
            harness.write_json(args.json, {"environment": environment, "rows": rows})
    whole = {row["work"]: row["forward"] + row["backward"] for row in rows if row["arm"] == "bf16"}
    cells = [
        [
            row["work"], row["arm"], f"{row['forward']:.2f}", f"{row['backward']:.2f}",
            f"{(row['forward'] + row['backward']) / whole[row['work']]:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    title = f"host time of a step of {args.tokens} tokens; {table.headline(environment)}"
    table.show(title, ("work", "arm", "forward ms", "backward ms", "of bf16's"), cells)


if __name__ == "__main__":
    main()
