"""How long the first steps of a process take: with empty caches, and with full ones, as when a run is started again.

    python -m benchmarks.first_step                                    # two layers of Llama-3-8B, on the GPU
    python -m benchmarks.first_step --models gemma-2-9b --arms bf16 te:delayed --rounds 5
    python -m benchmarks.first_step --models tiny --device cpu --tokens 64 --profile out/first_step

Each step is a forward, a loss and a backward, by a process of its own. `first` is from `torch.compile` to the end of
the first step, so that what either backend imports counts, and what torch and the model import does not; `second` is
the step behind, which under delayed scaling compiles another backward. `CPU s` is the processor time of both, of the
process and of compilers that it has waited for, which others on the machine disturb less. Arms have caches of their
own, bytecode of Python's included, all in one folder that is new: the first process of an arm finds none of them, the
others all. An arm is `bf16` or `te:RECIPE`, with a `!` behind it for a policy that names every layer. `--profile`
leaves a profile of one more process of each arm in a folder (`python -m pstats FILE`), whose times are not told."""

import argparse
import cProfile
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks import arms, fleet_models, harness, table

ARMS = ("bf16", "te:current", "te:delayed")


def child(args: argparse.Namespace) -> dict[str, float]:
    """What one process takes, in seconds."""
    (name,), (arm,) = args.models, args.arms
    loss = fleet_models.build(name, args.layers, fleet_models.SMALL_VOCABULARY, args.device)
    batch = fleet_models.batch(name, args.tokens, fleet_models.SMALL_VOCABULARY, args.device)
    kind, recipe = arms.find(arm.rstrip("!"))
    warnings.simplefilter("ignore")  # of layers that the size rule leaves alone
    profile = cProfile.Profile()
    harness.synchronize(args.device)
    if args.profile:
        profile.enable()
    times, used = [time.perf_counter()], processor_time()
    run: Any = kind.make(loss, recipe, None, {"policy": {"*": recipe}} if arm.endswith("!") else {})
    for _ in range(2):
        run(*batch).backward()
        harness.synchronize(args.device)
        times.append(time.perf_counter())
    if args.profile:
        profile.disable()
        profile.dump_stats(args.profile)
    return {"first": times[1] - times[0], "second": times[2] - times[1], "cpu": processor_time() - used}


def processor_time() -> float:
    return sum(os.times()[:4])


def started(
    name: str, arm: str, folder: Path, args: argparse.Namespace, profile: Path | None = None
) -> dict[str, float]:
    """The same, of a process that finds the caches in `folder`."""
    given = ["--child", "--models", name, "--arms", arm, "--layers", str(args.layers), "--tokens", str(args.tokens)]
    given += ["--device", args.device, *(["--profile", str(profile)] if profile else [])]
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "PYTHONPYCACHEPREFIX": folder / "bytecode"}
    written = {key: str(value) for key, value in caches.items()}
    found = harness.run_arm("benchmarks.first_step", given, PYTHONDONTWRITEBYTECODE="", **written)
    if "failed" in found:
        raise SystemExit(f"{name}: {arm} failed: {found['failed']}")
    return found


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Arms in turn, so that a machine that becomes slower does so for all of them."""
    found: dict[str, Any] = {arm: {"empty": {}, "full": []} for arm in args.arms}
    with tempfile.TemporaryDirectory() as root:
        for round_ in range(1 + args.rounds):
            for arm in args.arms:
                times = started(name, arm, Path(root, arm), args)
                print(f"{name}: {arm}, {'full' if round_ else 'empty'} caches, {times['first']:.2f} s", flush=True)
                if round_:
                    found[arm]["full"].append(times)
                else:
                    found[arm]["empty"] = times
        if args.profile:
            args.profile.mkdir(parents=True, exist_ok=True)
            for arm in args.arms:
                started(
                    name, arm, Path(root, arm), args, args.profile.absolute() / f"{name}-{arm.replace(':', '-')}.prof"
                )
    return found


def show(name: str, found: dict[str, Any], environment: dict[str, Any], args: argparse.Namespace) -> None:
    def medians(one: dict[str, Any]) -> tuple[float, ...]:
        steps = ("first", "second", "cpu")
        full = [statistics.median(times[step] for times in one["full"]) for step in steps]
        return *(one["empty"][step] for step in steps), *full

    base = medians(found["bf16"]) if "bf16" in found else None
    rows = []
    for arm, one in found.items():
        empty, empty_second, empty_cpu, full, full_second, full_cpu = medians(one)
        over = (None, None) if base is None else (empty / base[0], full / base[3])
        cells = (empty, over[0], empty_second, empty_cpu, full, over[1], full_second, full_cpu)
        rows.append((arm, *(table.number(cell) for cell in cells)))
    columns = ("arm", "empty s", "of bf16's", "second s", "CPU s", "full s", "of bf16's", "second s", "CPU s")
    table.show(f"{name}, {args.layers} layers, {args.tokens} tokens; {table.headline(environment)}", columns, rows)


def main() -> None:
    parser = harness.arguments(__doc__, "first_step", layers=2, tokens=8192)
    parser.add_argument("--models", nargs="+", default=["llama-3-8b"], choices=fleet_models.MODELS, metavar="MODEL")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="bf16, te:RECIPE, te:RECIPE!")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each arm with full caches")
    parser.add_argument("--profile", type=Path, help="a folder")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        harness.write_json(args.json, child(args))
        return
    results: dict[str, Any] = {"environment": harness.environment(args.device), "models": {}}
    for name in args.models:
        results["models"][name] = measure(name, args)
        harness.write_json(args.json, results)
        show(name, results["models"][name], results["environment"], args)


if __name__ == "__main__":
    main()
