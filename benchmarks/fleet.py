"""Whole training steps of models that nothing was tuned for: loss, backward and fused AdamW of bf16 parameters.

    python -m benchmarks.fleet                                        # all models, all arms
    python -m benchmarks.fleet --models gemma-2-9b vit-huge --arms bf16 te:current torchao:tensorwise
    python -m benchmarks.fleet --models smollm-360m bert-large --arms bf16 te:delayed! --profile 16
    python -m benchmarks.fleet --together 3                           # compile three at once, measure one by one

A few layers of each class at a published model's widths (fleet_models.py), with a small vocabulary, or with the model's
own by `--real-vocabulary`. All arms of a model are in one process and timed in turn. An arm is `bf16`, plain
torch.compile; `te:RECIPE`, that recipe by default, as the size rule has it; `te:RECIPE!`, a policy that names every
layer; `torchao:RECIPE`, where that package is. `low` is the share of linear layers' FLOPs in low precision; `loss`
follows `--train` steps from the same weights on the same batches. With `--together N` each model is a process of its
own: N of them compile side by side, and then each is measured while the others wait. The first step's time would say
nothing there and is left out; what each process wrote is in a folder beside `--json`. `host ms` is how long the host
takes to launch a step while the device is idle: where it is near the step's own time, the device waits for the host.
`first s` is from `torch.compile` to the end of the first step. Later arms of a process find imports and kernels of
earlier ones: give one arm and an empty TORCHINDUCTOR_CACHE_DIR to compare them."""

import argparse
import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.pgo import reset_code_state

from benchmarks import arms, fleet_models, harness, table
from benchmarks.fleet_models import MODELS, SMALL_VOCABULARY

ARMS = ("bf16", "te:delayed", "te:current", "torchao:tensorwise")
CLASSES = ("fp8 GEMM", "bf16 GEMM", "triton", "attention", "copy", "other")
BATCHES = 8  # that training sees in turn


@dataclass
class Arm:
    step: Callable[..., Any]  # of one batch
    peak_bytes: int | None
    first_s: float
    low: float | None  # share of linear layers' FLOPs


def make(name: str, arm: str, args: argparse.Namespace) -> Arm:
    """An arm whose step has run, with the peak of its own memory."""
    cuda, vocabulary = args.device.startswith("cuda"), _vocabulary(name, args)
    gc.collect()  # what earlier arms left in cycles would be freed in this one's steps
    before = torch.cuda.memory_allocated() if cuda else 0
    loss = fleet_models.build(name, args.layers, vocabulary, args.device)
    first_batch = fleet_models.batch(name, args.tokens, vocabulary, args.device)
    kind, recipe = arms.find(arm.rstrip("!"))
    options = {"policy": {"*": recipe}} if arm.endswith("!") else {}
    start = time.perf_counter()  # bf16's torch.compile imports Inductor, and te's first call
    run: Any = kind.make(loss, recipe, None, options)
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-4, fused=True)

    def step(*given: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        found = run(*(given or first_batch))
        found.backward()
        optimizer.step()
        return found.detach()  # type: ignore[no-any-return]

    step()
    harness.synchronize(args.device)
    first = time.perf_counter() - start
    step()
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before if cuda else None
    low = _share(loss, first_batch, {"recipe": recipe, **options}) if arm.startswith("te:") else None
    return Arm(step, peak, first, low)


def _vocabulary(name: str, args: argparse.Namespace) -> int:
    real = MODELS[name].vocabulary
    return real if args.real_vocabulary else min(real, SMALL_VOCABULARY)


def _share(loss: nn.Module, batch: tuple[Tensor, ...], options: dict[str, Any]) -> float | None:
    from te_inductor import explain

    return explain(loss, *batch, options=options).flops.share


def trained(name: str, step: Callable[..., Any], args: argparse.Namespace) -> float | None:
    """The mean loss of the last batches. The timed steps before were on the first batch, as often in each arm."""
    losses: list[Tensor] = []
    for number in range(args.train):
        seed = 1 + number % BATCHES
        losses.append(step(*fleet_models.batch(name, args.tokens, _vocabulary(name, args), args.device, seed)))
    return torch.stack(losses[-BATCHES:]).mean().item() if losses else None


def host_ms(step: Callable[[], Any], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        harness.synchronize(device)
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    harness.synchronize(device)
    return statistics.median(times)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    made: dict[str, Arm] = {}
    found: dict[str, Any] = {}
    take_workspaces(args.device)
    for arm in args.arms:
        reset_code_state()  # sizes that the arm before gave a graph are no reason to compile this one's for any size
        needed = arms.missing(arm.rstrip("!"))
        if needed is not None:
            found[arm] = {"error": f"no {needed} here"}
            continue
        try:
            made[arm] = make(name, arm, args)
            print(f"{name}: {arm} compiled, first step {made[arm].first_s:.1f} s", flush=True)
        except Exception as error:  # the other arms are still worth having
            found[arm] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    if args.turn is not None:
        wait_for_turn(args.turn)
    times: dict[str, list[float]] = {arm: [] for arm in made}
    for _ in range(args.rounds):
        for arm, one in made.items():
            times[arm] += harness.times_ms(one.step, args.device, args.iters, 2)
    for arm, one in made.items():
        found[arm] = {
            "ms": statistics.median(times[arm]),
            "host_ms": host_ms(one.step, args.device),
            "peak_bytes": one.peak_bytes,
            "first_s": one.first_s if args.turn is None else None,
            "low": one.low,
            "loss": trained(name, one.step, args),
            "kernels": harness.kernels(one.step, args.device, 2) if args.profile else [],
        }
    return {arm: found[arm] for arm in args.arms}


def take_workspaces(device: str) -> None:
    """cuBLAS keeps memory for each thread that multiplies, which would count as the first arm's."""
    weight = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    (weight @ weight).sum().backward()


def wait_for_turn(folder: Path) -> None:
    """Say that all is compiled, and wait until the others do not run."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)


def measure_together(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Each model in a process of its own. `args.together` of them compile at once and are measured one by one."""
    root = args.json.with_suffix("").absolute()
    for first in range(0, len(args.models), args.together):
        started = {name: start(name, root / name) for name in args.models[first : first + args.together]}
        for name, process in started.items():
            while not (root / name / "ready").exists() and process.poll() is None:
                time.sleep(0.2)
        for name, process in started.items():
            (root / name / "go").touch()
            process.wait()
            results["models"][name] = _result(root / name)
            harness.write_json(args.json, results)
            show(name, results["models"][name], results["environment"], args)


def start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    """This program for one model, which waits for its turn."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = ["--models", name, "--turn", str(folder), "--json", str(folder / "result.json")]  # the last of each counts
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "benchmarks.fleet", *sys.argv[1:], *own]
        return subprocess.Popen(command, cwd=harness.ROOT, stdout=log, stderr=subprocess.STDOUT)


def _result(folder: Path) -> dict[str, Any]:
    if (folder / "result.json").exists():
        (found,) = json.loads((folder / "result.json").read_text())["models"].values()
        return found  # type: ignore[no-any-return]
    log = (folder / "log").read_text(errors="replace").strip() or "no output"
    return {"bf16": {"error": log.splitlines()[-1] + "\n" + log[-2000:]}}


def show(name: str, found: dict[str, Any], environment: dict[str, Any], args: argparse.Namespace) -> None:
    base, rows = found.get("bf16", {}), []
    for arm, one in found.items():
        if "error" in one:
            rows.append((arm, one["error"].splitlines()[0][:60]))
            continue

        def over(key: str, one: dict[str, Any] = one) -> float | None:
            return one[key] / base[key] if base.get(key) and one[key] else None

        speedup = over("ms")
        rows.append(
            (
                arm, table.number(one["low"], 0, 100), table.number(one["ms"]),
                table.number(None if speedup is None else 1 / speedup, 3), table.number(one["host_ms"]),
                table.number(one["peak_bytes"], 2, 2.0**-30), table.number(over("peak_bytes"), 3),
                table.number(one["first_s"], 1), table.number(one["loss"], 4),
            )
        )  # fmt: skip
    columns = ("arm", "low %", "step ms", "over bf16", "host ms", "peak GiB", "of bf16's", "first s", "loss")
    words = "own" if args.real_vocabulary else "small"
    title = f"{name}, {args.layers} layers, {words} vocabulary, {args.tokens} tokens; {table.headline(environment)}"
    table.show(title, columns, [(*row, *(None for _ in range(len(columns) - len(row)))) for row in rows])
    for arm, one in found.items():
        kernels = one.get("kernels", [])
        if not kernels:
            continue
        sums = {kind: sum(row["total_us"] for row in kernels if row["class"] == kind) / 1e3 for kind in CLASSES}
        print(arm, ", ".join(f"{kind} {value:.2f} ms" for kind, value in sums.items()))
        cells = []
        for row in kernels[: args.profile]:
            us = (table.number(row[key], 1) for key in ("mean_us", "total_us"))
            cells.append((row["name"][:110], row["class"], f"{row['calls']:.0f}", *us))
        table.show(f"{name}, {arm}: the slowest kernels", ("kernel", "class", "calls", "mean us", "us a step"), cells)


def plot(path: Path, models: dict[str, Any], environment: dict[str, Any]) -> None:
    """Speed over bf16 and peak memory, one bar an arm of each model."""
    panels = []
    for label, key, over in (("step, times as fast as bf16", "ms", True), ("peak, of bf16's", "peak_bytes", False)):
        names, values = [], []
        for name, found in models.items():
            base = found.get("bf16", {}).get(key)
            for arm, one in found.items():
                if arm != "bf16" and base and one.get(key):
                    names.append(f"{name} {arm}")
                    values.append(base / one[key] if over else one[key] / base)
        panels.append((label, names, values))
    if panels[0][1]:
        table.bars(path, table.headline(environment), [panel for panel in panels if panel[1]])


def main() -> None:
    parser = harness.arguments(__doc__, "fleet", layers=2, tokens=8192, rounds=3, iters=8)
    parser.allow_abbrev = False
    all_models = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--models", nargs="+", default=all_models, choices=MODELS, metavar="MODEL")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="bf16, te:RECIPE, te:RECIPE!, torchao:RECIPE")
    parser.add_argument("--real-vocabulary", action="store_true")
    parser.add_argument("--train", type=int, default=30, help="steps, for the loss")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N slowest kernels of each arm")
    parser.add_argument("--together", type=int, default=0, metavar="N", help="compile N models at once")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)  # the folder by which --together gives a turn
    parser.add_argument("--plot", type=Path, help="a picture")
    args = parser.parse_args()
    # All arms compile the same code, and none is given up for another.
    torch._dynamo.config.recompile_limit = 64
    environment = harness.environment(args.device)
    results: dict[str, Any] = {"environment": environment, "models": {}}
    together = args.together and args.turn is None
    if together:
        measure_together(args, results)
    for name in () if together else args.models:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that the size rule leaves alone
            results["models"][name] = measure(name, args)
        harness.write_json(args.json, results)
        show(name, results["models"][name], environment, args)
        torch._dynamo.reset()
    if args.plot and args.turn is None:
        plot(args.plot, results["models"], environment)


if __name__ == "__main__":
    main()
