"""Gradient accumulation: what is saved where weights are cast once a step, and not at each microbatch.

    python -m benchmarks.accumulation
    python -m benchmarks.accumulation --tokens 512 4096 --microbatches 8 --recipes current block

Two Llama-3-8B-shaped blocks; a step is so many microbatches, forward and backward, and one change of all weights, as an
optimizer's. `weights` is how long the kernels of kept weights run a step; of the arms without, casts of weights are in
`triton`, with everything else that Inductor writes.
"""

import argparse
import gc
import statistics
from typing import Any

import torch

from benchmarks import arms, harness, llama_blocks, table
from benchmarks.llama_blocks import WIDTHS, Shape


def measure(recipe: str | None, weights: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """One arm; `recipe` None is bf16."""
    torch._dynamo.reset()
    gc.collect()
    shape = Shape.of(args, batch=1, seq=tokens)
    model = llama_blocks.build(shape, torch.bfloat16, args.device)
    x, dy = llama_blocks.inputs(shape, torch.bfloat16, args.device)
    # The policy names all layers, or the size rule would leave small ones alone.
    options = {"policy": {"*": recipe}, "weights": weights}
    arm, _ = arms.find("bf16" if recipe is None else f"te:{recipe}")
    forward = arm.make(model, recipe or "", args.mode, options if recipe else {})
    parameters = list(model.parameters())

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for _ in range(args.microbatches):
            forward(x).backward(dy)
        with torch.no_grad():
            torch._foreach_neg_(parameters)  # changes every weight; a factor near 1 changes none in bf16

    for _ in range(args.warmup):
        step()
    found: dict[str, Any] = {"arm": "bf16" if recipe is None else f"te:{recipe}, {weights}", "tokens": tokens}
    found["peak_bytes"] = harness.peak_bytes(args.device, step)
    found["step_ms"] = statistics.median(harness.times_ms(step, args.device, args.iters, 1))
    found["kernels"] = harness.kernels(step, args.device)
    for name, choose in (
        ("weights_us", lambda row: "kept_weights_" in row["name"]),
        ("triton_us", lambda row: row["class"] == "triton" and "kept_weights_" not in row["name"]),
        ("gemm_us", lambda row: "GEMM" in row["class"]),
        ("kernels_us", lambda row: True),
    ):
        found[name] = sum(row["total_us"] for row in found["kernels"] if choose(row))
    return found


def main() -> None:
    parser = harness.arguments(__doc__, "accumulation", microbatches=4, layers=2, iters=10, warmup=3, **WIDTHS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096], help="of a microbatch")
    parser.add_argument("--recipes", nargs="+", default=["current", "block"])
    parser.add_argument(
        "--weights", nargs="+", default=["each_call", "once"], help="values of that option, an arm each"
    )
    parser.add_argument("--mode", help="torch.compile's, of every arm")
    args = parser.parse_args()
    environment, found = harness.environment(args.device), []
    for tokens in args.tokens:
        for recipe, kind in [
            (None, "each_call"),
            *((recipe, kind) for recipe in args.recipes for kind in args.weights),
        ]:
            found.append(measure(recipe, kind, tokens, args))
            harness.write_json(args.json, {"environment": environment, "rows": found})
    times = dict.fromkeys(("kernels_us", "gemm_us", "triton_us", "weights_us"), 1e-3)
    digits = {"step_ms": 1.0, **times, "peak_bytes": 2.0**-30}
    columns = ("arm", "tokens", "step ms", "kernels ms", "GEMM", "triton", "weights", "peak GiB")
    rows = [(r["arm"], r["tokens"], *(table.number(r[key], 2, by) for key, by in digits.items())) for r in found]
    title = f"{args.microbatches} microbatches a step, {args.layers} layers; {table.headline(environment)}"
    table.show(title, columns, rows)


if __name__ == "__main__":
    main()
