"""What the same numbers in any batch cost: a step of training and one of decoding, with the option and without.

    python -m benchmarks.batch_invariance [--recipe rowwise]

A decoder of Qwen3-1.7B's shape by default, of fewer layers; decoding in CUDA graphs, with a static cache. Beside the
times stands the largest difference of log-probabilities between training and decoding."""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, table
from tests.support.invariant_models import Decoder, generated


def measure(model: Decoder, batch: int, args: argparse.Namespace, exact: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    options = {"recipe": args.recipe, "fallback": "silent", "batch_invariant": exact}
    train, decode = (
        torch.compile(model, backend="te", dynamic=False, options={**options, **more})
        for more in ({}, {"mode": "reduce-overhead", "weights": "once"})
    )
    ids = torch.randint(0, args.words, (batch, args.tokens), device=args.device)
    every = torch.arange(args.keys, device=args.device)
    caches, place = model.caches(batch, args.keys), every[args.tokens - 1 : args.tokens].clone()
    for cache in (cache for pair in caches for cache in pair):
        torch._dynamo.mark_static_address(cache)  # CUDA graphs write it where it lies
    mask, last = every[None] <= place[:, None], ids[:, -1:].contiguous()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        train(ids[: args.sequences], every[: args.tokens]).mean().backward()

    @torch.no_grad()
    def token() -> None:
        decode(last, place, mask, caches)

    times = {"train_ms": statistics.median(harness.times_ms(step, args.device, args.iters, 3))}
    model.zero_grad(set_to_none=True)
    times["decode_ms"] = statistics.median(harness.times_ms(token, args.device, 5 * args.iters, 5))
    some, prompt = ids[: args.sequences], args.tokens - 4
    found = generated(train, model, some, prompt, args.keys)
    times["difference"] = (found - train(some, every[: args.tokens]).detach()).abs().max().item()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    for name, size in (
        ("words", 32768),
        ("width", 2048),
        ("hidden", 6144),
        ("heads", 16),
        ("kv-heads", 8),
        ("layers", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=size)
    for name, size in (("tokens", 1024), ("keys", 2048), ("sequences", 4), ("iters", 10)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=Path("out/batch_invariance.json"))
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    sizes = args.words, args.width, args.hidden, args.heads, args.kv_heads, args.layers
    model = Decoder(*sizes, qwen=True).to(args.device, torch.bfloat16)
    rows = []
    for batch in args.batches:
        plain, same = (measure(model, batch, args, exact) for exact in (False, True))
        rows += [{"batch": batch, "exact": exact, **found} for exact, found in ((False, plain), (True, same))]
        for name in ("train_ms", "decode_ms"):
            rows[-1][f"{name}_over_plain"] = same[name] / plain[name]
    environment = harness.environment(args.device)
    keys = ("train_ms", "train_ms_over_plain", "decode_ms", "decode_ms_over_plain", "difference")
    table.show(
        f"The same numbers in any batch, {args.recipe}; {table.headline(environment)}",
        ("batch", "exact", "training ms", "over plain", "decoding ms", "over plain", "log-probability difference"),
        [
            (row["batch"], row["exact"], *(table.number(row[key], 4) if key in row else "" for key in keys))
            for row in rows
        ],
        f"training: {args.sequences} x {args.tokens} tokens; decoding: one token a sequence, {args.keys} keys",
    )
    harness.write_json(args.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
