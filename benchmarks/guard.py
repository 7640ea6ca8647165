"""What the guard of delayed scaling costs a step of two Llama-3-8B-shaped blocks, and what one reading of statistics does.

    python -m benchmarks.guard                                  # device time, and the host's behind a synchronization
    python -m benchmarks.guard --iters 64 --rounds 7 --mode reduce-overhead
    python -m benchmarks.guard --device cpu --rounds 1 --iters 2 --warmup 1 --layers 1 --batch 1 --seq 64 --dim 128 --ffn 256

The arms take turns over the rounds, in one process; ratios to "off" are formed within a round. `iters` is best a multiple
of 16, as every 16th call of "warn" has the host ask for the counts."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import te_inductor
from benchmarks import harness, llama_blocks
from benchmarks.llama_blocks import Shape

ARMS = ("off", "warn", "heal")


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "guard", rounds=5, iters=32, **Shape().to_dict())
    parser.add_argument("--mode", help="torch.compile's mode")
    parser.add_argument(
        "--warmup", type=int, default=20, help="steps: more than the 16 before each of which a guard looks"
    )
    return parser.parse_args()


def step_of(guard: str, shape: Shape, args: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """A compiled model, and a step of it."""
    model = llama_blocks.build(shape, torch.bfloat16, args.device)
    x, grad = llama_blocks.inputs(shape, torch.bfloat16, args.device)
    options = {"recipe": "delayed", "guard": guard, "policy": {"*": "delayed"}}
    if args.mode:
        options["mode"] = args.mode
    compiled: Any = torch.compile(model, backend=harness.te_backend(), options=options)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None  # of the last step's CUDA graph
        compiled(x).backward(grad)

    return compiled, step


def host_ms(step: Callable[[], None], device: str, iters: int) -> float:
    """Median time of the host for one step, in front of which the device is idle."""
    found = []
    for _ in range(iters):
        harness.synchronize(device)
        start = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - start))
    harness.synchronize(device)
    return statistics.median(found)


def main() -> None:
    args = parse()
    shape = Shape.of(args)
    made = {guard: step_of(guard, shape, args) for guard in ARMS}
    device: dict[str, list[float]] = {guard: [] for guard in ARMS}
    host: dict[str, list[float]] = {guard: [] for guard in ARMS}
    for turn in range(args.rounds):
        for guard in ARMS[turn % 3 :] + ARMS[: turn % 3]:
            step = made[guard][1]
            device[guard].append(statistics.mean(harness.times_ms(step, args.device, args.iters, args.warmup)))
            host[guard].append(host_ms(step, args.device, args.iters))
    launches = {guard: sum(one["calls"] for one in harness.kernels(made[guard][1], args.device)) for guard in ARMS}
    compiled = made["warn"][0]
    harness.synchronize(args.device)
    start = time.perf_counter()
    tensors = len(te_inductor.statistics(compiled).slots)
    reading = 1e3 * (time.perf_counter() - start)
    for guard in ARMS:
        ratios = [one / off for one, off in zip(device[guard], device["off"], strict=True)]
        print(
            f"{guard:5} device {statistics.median(device[guard]):9.3f} ms"
            f" ({100 * (statistics.median(ratios) - 1):+.2f}%, {100 * (min(ratios) - 1):+.2f} to"
            f" {100 * (max(ratios) - 1):+.2f}), host {statistics.median(host[guard]):8.3f} ms,"
            f" {launches[guard]:.0f} kernels a step"
        )
    print(f"statistics of {tensors} tensors: {reading:.2f} ms")
    found = {"device_ms": device, "host_ms": host, "launches": launches, "reading_ms": reading, "tensors": tensors}
    harness.write_json(args.json, harness.environment(args.device) | {"arguments": vars(args) | {"json": ""}} | found)


if __name__ == "__main__":
    main()
