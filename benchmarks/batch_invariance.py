"""What the same numbers in any batch cost: a step of training and one of decoding, with the option and without.

    python -m benchmarks.batch_invariance [--recipe rowwise]

A decoder of Qwen3-1.7B's shape by default, of fewer layers; decoding in CUDA graphs, with a static cache. Beside the
times stands the largest difference of log-probabilities between training and decoding. Without the option and with it a
graph trains, one reads prompts, and one decodes for each batch: what is compiled takes most of the time. Each part runs
without the option and then with it. Rows are printed and written as they come; `--seconds` leaves out those that would
begin later. `--profile 8` prints the eight kernels of each row that take longest, in us of a step."""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, table
from tests.support.invariant_models import Decoder, generated


def measured(model: Decoder, args: argparse.Namespace, exact: bool) -> Iterator[dict[str, Any]]:
    """The step of training, then one of decoding for each batch, as they are asked for."""
    options = {"recipe": args.recipe, "fallback": "silent", "batch_invariant": exact}
    train, decode = (
        torch.compile(model, backend="te", dynamic=False, options={**options, **more})
        for more in ({}, {"mode": "reduce-overhead", "weights": "once"})
    )
    every, prompt = torch.arange(args.keys, device=args.device), args.tokens - 4
    ids = torch.randint(0, args.words, (args.sequences, args.tokens), device=args.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        train(ids, every[: args.tokens]).mean().backward()

    yield {"part": "training", "rows": ids.numel(), **_timed(step, args, 3)}
    model.zero_grad(set_to_none=True)

    def generating(ids: Tensor, places: Tensor, mask: Tensor, caches: Any) -> Tensor:
        """A prompt by the graph of training's options, a token by that which is timed."""
        run: Any = train if ids.shape[1] > 1 else decode
        for cache in (cache for pair in caches for cache in pair):
            torch._dynamo.mark_static_address(cache)  # CUDA graphs write it where it lies
        return run(ids, places, mask, caches)  # type: ignore[no-any-return]

    for batch in args.batches:
        caches, place = model.caches(batch, args.keys), every[args.tokens - 1 : args.tokens].clone()
        mask, last = every[None] <= place[:, None], ids[:1, -1:].repeat(batch, 1)

        @torch.no_grad()
        def token(caches: Any = caches, place: Tensor = place, mask: Tensor = mask, last: Tensor = last) -> None:
            generating(last, place, mask, caches)

        row: dict[str, Any] = {"part": "decoding", "rows": batch, **_timed(token, args, 5)}
        if batch == min(args.batches):  # whose decoding is compiled already
            found = generated(generating, model, ids[:batch], prompt, args.keys)
            trained = train(ids, every[: args.tokens]).detach()[: len(found)]
            row["difference"] = (found - trained).abs().max().item()
        yield row


def _timed(call: Any, args: argparse.Namespace, warmup: int) -> dict[str, Any]:
    """The time of a call, and the kernels that take longest."""
    found: dict[str, Any] = {"ms": statistics.median(harness.times_ms(call, args.device, args.iters, warmup))}
    if args.profile:
        kernels = harness.kernels(call, args.device)[: args.profile]
        found["kernels"] = [{key: one[key] for key in ("name", "calls", "total_us")} for one in kernels]
    return found


def main() -> None:
    parser = harness.arguments(__doc__, "batch_invariance")
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 1], help="of decoding")
    parser.add_argument("--profile", type=int, default=0, help="so many kernels of each row")
    for name, size in (
        ("words", 32768),
        ("width", 2048),
        ("hidden", 6144),
        ("heads", 16),
        ("kv-heads", 8),
        ("layers", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=size)
    for name, size in (("tokens", 1024), ("keys", 2048), ("sequences", 4), ("iters", 10)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--seconds", type=float, default=600, help="behind which no row begins")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    sizes = args.words, args.width, args.hidden, args.heads, args.kv_heads, args.layers
    model = Decoder(*sizes, qwen=True).to(args.device, torch.bfloat16)
    environment, began, rows = harness.environment(args.device), time.perf_counter(), list[dict[str, Any]]()
    plain: dict[tuple[str, int], float] = {}
    for exact, found in cycle([(exact, measured(model, args, exact)) for exact in (False, True)]):
        row = next(found, None)
        if row is None:
            break
        key = row["part"], row["rows"]
        plain.setdefault(key, row["ms"])
        rows.append({**row, "exact": exact, "over_plain": row["ms"] / plain[key]})
        print(json.dumps({key: one for key, one in rows[-1].items() if key != "kernels"}), flush=True)
        for one in row.get("kernels", ()):
            print(f"  {one['total_us']:9.1f} us {one['calls']:5.1f} calls  {one['name'][:100]}", flush=True)
        harness.write_json(args.json, {"environment": environment, "rows": rows})
        if time.perf_counter() - began > args.seconds:
            break
    keys = ("ms", "over_plain", "difference")
    table.show(
        f"The same numbers in any batch, {args.recipe}; {table.headline(environment)}",
        ("part", "rows", "exact", "ms", "over plain", "log-probability difference"),
        [
            (row["part"], row["rows"], row["exact"], *(table.number(row[key], 4) if key in row else "" for key in keys))
            for row in rows
        ],
        f"training: {args.sequences} x {args.tokens} tokens; decoding: one token a sequence, {args.keys} keys",
    )


if __name__ == "__main__":
    main()
