"""Inference at few rows: every linear layer's shape of the fleet, with stored weights and in bf16.

    python -m benchmarks.rows                       # three models, about a minute and a half
    python -m benchmarks.rows --models gpt-neox-20b bert-large --rows 1 256 --arms current

Each layer alone, compiled where its weight is stored, its calls captured in one CUDA graph, weights rotating through more
memory than the L2 cache holds. q, k and v, and gate and up, are one weight each, as a model that is served has them.
What is slower than asked is listed at the end: stored FP8 below bf16, and NVFP4 below 1.3 where both sizes are 4096 or
more."""

import argparse
import functools
from typing import Any

import torch
from torch import nn

from benchmarks import harness, table
from benchmarks.decode import COLD
from benchmarks.fleet_models import MODELS, Model

ARMS = ("rowwise", "current", "nvfp4_weight_only")
WIDE, GAIN = 4096, {"nvfp4_weight_only": 1.3}  # over bf16, of weights as wide


def shapes(of: Model) -> set[tuple[int, int]]:
    """N x K of a layer's weights."""
    get = of.changes.get
    d = get("hidden_size") or of.changes["d_model"]
    heads = get("num_attention_heads") or get("num_heads") or of.changes["encoder_attention_heads"]
    head = get("head_dim") or get("d_kv") or d // heads
    kv = get("num_key_value_heads", heads)
    ffn = next(of.changes[name] for name in ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim") if get(name))
    gated = get("num_key_value_heads") is not None or "gated" in str(get("feed_forward_proj"))
    return {((heads + 2 * kv) * head, d), (d, heads * head), (ffn * (2 if gated else 1), d), (d, ffn)}


def layers(n: int, k: int, arm: str | None, args: argparse.Namespace) -> list[Any]:
    """Makes so many compiled layers that their weights leave the L2 cache."""
    count = 1 if args.device == "cpu" else max(2, min(8, round(COLD / (n * k))))
    made = [nn.Linear(k, n, bias=False, device=args.device, dtype=torch.bfloat16) for _ in range(count)]
    if arm is not None:
        import te_inductor

        for layer in made:
            te_inductor.quantize_(layer, arm)
    return made


def time_us(n: int, k: int, rows: int, arm: str | None, args: argparse.Namespace) -> float:
    torch._dynamo.reset()
    made = layers(n, k, arm, args)
    x = torch.randn(rows, k, device=args.device, dtype=torch.bfloat16)
    run = torch.nn.functional.linear
    if arm is not None:
        given: dict[str, Any] = {"backend": harness.te_backend(), "options": {"recipe": "none"}}
        run = torch.compile(_apply, fullgraph=True, dynamic=False, **given)
    with torch.no_grad():
        calls = [functools.partial(run, x, layer.weight) for layer in made]
        return harness.call_us(calls, args.device, args.replays, warmup=1)


def _apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def main() -> None:
    parser = harness.arguments(__doc__, "rows", replays=7)
    parser.add_argument("--models", nargs="+", default=["llama-3-8b", "opt-6.7b", "qwen3-4b"], choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--arms", nargs="+", default=["rowwise", "nvfp4_weight_only"], choices=ARMS)
    args = parser.parse_args()
    environment, found = harness.environment(args.device), []
    asked: dict[tuple[int, int], list[str]] = {}
    for name in args.models:
        for shape in shapes(MODELS[name]):
            asked.setdefault(shape, []).append(name)
    for n, k in sorted(asked):
        for rows in args.rows:
            base = time_us(n, k, rows, None, args)
            for arm in args.arms:
                us = time_us(n, k, rows, arm, args)
                row = {"n": n, "k": k, "rows": rows, "arm": arm, "us": us, "bf16_us": base, "over": base / us}
                found.append({**row, "models": asked[n, k]})
            harness.write_json(args.json, {"environment": environment, "rows": found})
    columns = ("N x K", "arm", *(f"{rows} rows" for rows in args.rows), "models")
    cells = []
    for n, k in sorted(asked):
        for arm in args.arms:
            mine = [row for row in found if (row["n"], row["k"], row["arm"]) == (n, k, arm)]
            cells.append((f"{n} x {k}", arm, *(table.number(row["over"]) for row in mine), ", ".join(asked[n, k])))
    table.show(f"stored weights over bf16, a layer alone; {table.headline(environment)}", columns, cells)
    for arm in args.arms:
        short = [
            f"{row['n']} x {row['k']} at {row['rows']}: {row['over']:.2f}"
            for row in found
            if row["arm"] == arm and row["over"] < (GAIN.get(arm, 1.0) if min(row["n"], row["k"]) >= WIDE else 1.0)
        ]
        print(f"{arm}, below what is asked: {'; '.join(short) or 'none'}")


if __name__ == "__main__":
    main()
