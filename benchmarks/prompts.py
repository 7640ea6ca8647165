"""Prompts through Llama-3-8B-shaped blocks whose weights are stored: the time of a forward pass by its number of
tokens.

    python -m benchmarks.prompts
    python -m benchmarks.prompts --arms bf16 te:nvfp4_weight_only --rows 256 320 384 512 --layers 4

Random weights, one sequence, each length compiled for itself and captured in a CUDA graph. Every weight is read once a
pass."""

import argparse
import statistics

import torch

from benchmarks import decode, harness, llama_blocks, table


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "prompts", device="cuda", layers=2, iters=20)
    parser.add_argument("--arms", nargs="+", default=["bf16", "te:nvfp4_weight_only", "te:rowwise"])
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 256, 320, 384, 512, 1024, 4096], help="tokens")
    return parser.parse_args()


def pass_ms(arm: str, rows: int, options: argparse.Namespace) -> tuple[float, torch.Tensor]:
    """The milliseconds of one forward pass, and its output."""
    torch._dynamo.reset()
    shape = llama_blocks.Shape(layers=options.layers, batch=1, seq=rows)
    model = llama_blocks.build(shape, torch.bfloat16, options.device).requires_grad_(False)
    x = llama_blocks.inputs(shape, torch.bfloat16, options.device)[0].detach()
    run = torch.compile(model, fullgraph=True, **decode.prepare(arm, model))
    with torch.no_grad():
        out = run(x)
        if options.device == "cpu":
            return statistics.median(harness.times_ms(lambda: run(x), "cpu", options.iters, 1)), out
        return harness.call_us([lambda: run(x)], options.device, options.iters) / 1e3, out


def main() -> None:
    options = parse()
    environment = harness.environment(options.device)
    cells, found = [], []
    for rows in options.rows:
        base, reference = None, None
        for arm in options.arms:
            ms, out = pass_ms(arm, rows, options)
            if arm == "bf16":
                base, reference = ms, out
            error = None if reference is None else harness.relative_error(out, reference)["relative"]
            found.append({"arm": arm, "rows": rows, "ms": ms, "error": error})
            print(found[-1], flush=True)
            over = None if base is None else base / ms
            cells.append((rows, arm, table.number(ms, 3), table.number(over), table.number(error, 4)))
            harness.write_json(options.json, {"environment": environment, "rows": found})
    columns = ("tokens", "arm", "ms", "over bf16", "off bf16")
    table.show(f"{options.layers} blocks, a prompt, {table.headline(environment)}", columns, cells)


if __name__ == "__main__":
    main()
