"""Forward + backward of two Llama-3-8B-shaped blocks, each arm in a process of its own.

    python -m benchmarks.train_step                                  # bf16, te:current, torchao where it is importable
    python -m benchmarks.train_step --recipes current delayed --rounds 3 --kernels --plot
    python -m benchmarks.train_step --arms bf16 te:current --options '{"max_autotune": true}'

A card's clock drifts while it warms up, so arms take turns over the rounds and a ratio is formed within a round.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from benchmarks import arms, floor, harness, llama_blocks, step_report
from benchmarks.llama_blocks import Shape

PEERS = ("torchao:tensorwise", "torchao:rowwise", "te_module:current")
# A cosine less than 1 by this much, for each block, says that an arm computes something else: roundings of blocks add
# up in squares, and fp8's cost about 0.015 each in the furthest weight gradient.
SUSPECT = 0.025


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "train_step", rounds=1, iters=20, **Shape().to_dict())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arms", nargs="+", help="bf16, te:RECIPE, torchao:RECIPE, te_module:RECIPE")
    parser.add_argument("--recipes", nargs="+", default=["current"], help="te recipes, where --arms is not given")
    parser.add_argument("--options", type=json.loads, default={}, help="options for te, as JSON")
    parser.add_argument("--mode", help="torch.compile's mode, for every compiled arm")
    parser.add_argument(
        "--budget", type=float, default=1.0, help="torch's activation memory budget, of every compiled arm"
    )
    parser.add_argument("--warmup", type=int, default=15, help="steps before: the card's clock settles within ten")
    parser.add_argument("--kernels", action="store_true", help="profile each arm's kernels, in its first round")
    parser.add_argument("--top", type=int, default=20, help="how many kernels to list")
    parser.add_argument("--plot", action="store_true", help="a bar chart beside the JSON")
    parser.add_argument("--arm", help="run this one arm, here, and write its numbers; what the rounds call")
    return parser.parse_args()


def run_arm(args: argparse.Namespace) -> dict[str, Any]:
    """Every number of one arm, in this process."""
    shape, device, dtype = Shape.of(args), args.device, getattr(torch, args.dtype)
    functorch.activation_memory_budget = args.budget
    arm, detail = arms.find(args.arm)
    model = llama_blocks.build(shape, dtype, device)
    x, grad = llama_blocks.inputs(shape, dtype, device)
    reference = gradients(model, model, x, grad) if arm.same_weights else None
    start = (
        time.perf_counter()
    )  # here, as an arm that imports its compiler in torch.compile would not have waited for it
    forward = arm.make(model, detail, args.mode, args.options)
    parameters = list(model.parameters())

    def step() -> None:
        zero_grad(model, x)
        forward(x).backward(grad)

    @torch.no_grad()
    def change_weights() -> None:
        """Changes the weights as an optimizer does between steps: copies of weights that have not changed would be used
        again."""
        torch._foreach_neg_(parameters)

    result: dict[str, Any] = {"arm": args.arm}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
        harness.synchronize(device)
        result["first_step_s"] = time.perf_counter() - start
    result["warnings"] = [str(w.message) for w in caught if "FallbackWarning" in type(w.message).__name__]
    found = None if reference is None else gradients(model, forward, x, grad)
    result["errors"] = None if found is None or reference is None else compare(found, reference, shape.layers)
    del found, reference
    zero_grad(model, x)
    result.update(memory(step, forward, model, x, device, shape.layers, args.warmup))
    result["step_ms"] = harness.times_ms(step, device, args.iters, args.warmup, change_weights)
    if args.kernels:
        result["kernels"] = harness.kernels(lambda: (change_weights(), step()), device)
    zero_grad(model, x)
    with torch.no_grad():
        result["forward_ms"] = harness.times_ms(lambda: forward(x), device, args.iters, args.warmup)
    return result


def zero_grad(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    x.grad = None


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of x and of every parameter under the names of the plain blocks."""
    zero_grad(model, x)
    out = forward(x)
    out.backward(grad)
    found = {"out": out.detach(), "dx": x.grad}
    found.update((f"d {name}", parameter.grad) for name, parameter in model.named_parameters())
    zero_grad(model, x)
    return found  # type: ignore[return-value]


def compare(found: dict[str, Tensor], reference: dict[str, Tensor], layers: int) -> dict[str, Any]:
    """Compares with eager bf16: out, dx, and the weight gradient that is furthest off."""
    errors = {name: harness.relative_error(found[name], reference[name]) for name in reference}
    # `not >=`: NaN is suspect
    suspect = [name for name, error in errors.items() if not error["cosine"] >= 1 - SUSPECT * layers]
    worst = max((name for name in errors if name.startswith("d ")), key=lambda name: errors[name]["relative"])
    return {"all": errors, "worst": worst, "suspect": suspect}


def memory(
    step: Callable[[], None],
    forward: Callable[[Tensor], Tensor],
    model: nn.Module,
    x: Tensor,
    device: str,
    layers: int,
    warmup: int,
) -> dict[str, float | None]:
    """Bytes: the most that was allocated in a steady step, and what a layer's forward leaves for its backward."""
    if not device.startswith("cuda"):
        return {"peak_bytes": None, "saved_bytes_per_layer": None}
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    peak = harness.peak_bytes(device, lambda: harness.times_ms(step, device, 3, 0))
    zero_grad(model, x)
    before = torch.cuda.memory_allocated()
    out = forward(x)
    saved = torch.cuda.memory_allocated() - before - out.nbytes
    return {"peak_bytes": peak, "saved_bytes_per_layer": saved / layers}


def run_rounds(args: argparse.Namespace) -> dict[str, Any]:
    """Every arm in every round; written down after each run, so that an interrupted benchmark keeps what it has."""
    shape = Shape.of(args)
    names = args.arms or ["bf16", *(f"te:{recipe}" for recipe in args.recipes), *PEERS]
    results: dict[str, Any] = {
        "environment": harness.environment(args.device),
        "shape": shape.to_dict(),
        "options": {
            key: getattr(args, key) for key in ("dtype", "options", "mode", "budget", "iters", "warmup", "rounds")
        },
        "floor_ms": {name: floor.floor_ms(shape, floor.kind_of(name)) for name in names},
        "runs": {name: [] for name in names},
        "failed": {name: f"{package} is not importable" for name in names if (package := arms.missing(name))},
    }
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(args.rounds):
            for name in (name for name in names if name not in results["failed"]):
                # An empty cache for each arm, so that the first round's compile time is one; later rounds reuse it.
                cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{folder}/{name.replace(':', '-')}")
                given = [*_arguments(args, round_), "--arm", name]
                run = harness.run_arm("benchmarks.train_step", given, TORCHINDUCTOR_CACHE_DIR=cache)
                if "failed" in run:
                    results["failed"][name] = run["failed"]
                else:
                    results["runs"][name].append(run)
                told = "failed" if "failed" in run else f"{step_report.median(run['step_ms']):.2f} ms"
                print(f"round {round_ + 1}/{args.rounds}  {name}: {told}", flush=True)
                harness.write_json(args.json, results)
    return results


def _arguments(args: argparse.Namespace, round_: int) -> list[str]:
    names = (*Shape().to_dict(), "dtype", "device", "budget", "iters", "warmup")
    given = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    given += [f"--options={json.dumps(args.options)}", *([f"--mode={args.mode}"] if args.mode else [])]
    return given + (["--kernels"] if args.kernels and round_ == 0 else [])


def main() -> None:
    args = parse()
    if args.arm:
        harness.write_json(args.json, run_arm(args))
        return
    results = run_rounds(args)
    results["summary"] = step_report.summary(results)
    harness.write_json(args.json, results)
    step_report.show(results, args.top)
    print(f"numbers: {args.json}")
    if args.plot:
        step_report.plot(results, args.json.with_suffix(".png"))
    if any(not name.startswith(("torchao", "te_module")) for name in results["failed"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
