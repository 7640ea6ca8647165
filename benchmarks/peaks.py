"""The largest tensors at the peak of a training step of each model of the fleet, beside bf16, as `te-inductor memory`
expects them: nothing of a step is compiled or run.

    python -m benchmarks.peaks --together 6                    # eight layers of each, on a GPU
    python -m benchmarks.peaks --models tiny --device cpu --layers 2 --tokens 256

Each model is a process of its own; with `--together N` so many are planned side by side. Sums are GiB: the peak in bf16,
by the recipe, and with `saved="low_precision"` beside it, whose largest tensors follow."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks import fleet_models, harness
from benchmarks.fleet_models import MODELS, SMALL_VOCABULARY

ARMS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "none", "saved": "high_precision"},
    "recipe": {"saved": "high_precision"},
    "saved low": {"saved": "low_precision"},
}
GIB = 1 << 30


def plan(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The peaks of one model, and the largest tensors of the last arm's."""
    from te_inductor.api.peaks import SAVED, peak_of
    from te_inductor.command.memory import rows

    found: dict[str, Any] = {"model": name}
    for arm, given in ARMS.items():
        torch._dynamo.reset()
        model = fleet_models.build(name, args.layers, SMALL_VOCABULARY, args.device)
        inputs = fleet_models.batch(name, args.tokens, SMALL_VOCABULARY, args.device)
        peak = peak_of(model, inputs, {}, {"recipe": args.recipe, **given}, "adamw")
        found[arm] = {"peak": peak.bytes, "saved": peak.of(SAVED), "when": peak.when}
        found["tensors"] = [*rows(peak.held, args.count)]
    return found


def in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    given = [f"--{key}={getattr(args, key)}" for key in ("layers", "tokens", "recipe", "count", "device")]
    command = [sys.executable, "-m", "benchmarks.peaks", "--one", name, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"model": name, "error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A row of the table for a model."""
    if "error" in found:
        yield f"| {found['model']} | {found['error']} |"
        return
    sums = [f"{found[arm]['peak'] / GIB:.2f} ({found[arm]['saved'] / GIB:.2f})" for arm in ARMS]
    tensors = "; ".join(
        f"{count} x {module or '(no module)'} {shape} {dtype}, {mib} MiB, {keeper}"
        for module, count, shape, dtype, mib, keeper in found["tensors"]
    )
    yield f"| {found['model']} | {' | '.join(sums)} | {found['saved low']['when']} | {tensors} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__, device="cuda", layers=8, tokens=8192, together=1)
    every = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=every, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--count", type=int, default=3, help="tensors of a model")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(plan(args.one, args)))
        return
    print("| model | bf16 (of which saved) | recipe | and saved low | peak in | the largest tensors of the last |")
    print("|---|---|---|---|---|---|")
    with ThreadPoolExecutor(args.together) as pool:
        for found in pool.map(lambda name: in_process(name, args), args.models):
            for line in lines(found):
                print(line, flush=True)


if __name__ == "__main__":
    main()
