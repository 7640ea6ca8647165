"""GEMMs of the training step: `torch._scaled_mm` with one scale a tensor against a bf16 product.

    python -m benchmarks.gemm --rounds 3

Both operands have their contraction dimension last, as a linear layer's copies do, and hold random values: on zeros a
power-limited card runs faster than it ever will in training.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, table

SHAPES = {  # M x N x K of out[M, N] = a[M, K] b[N, K].T
    "16384x4096x4096": "q, o: fprop and dgrad",
    "16384x28672x4096": "gate and up as one",
    "16384x4096x14336": "down fprop; gate, up dgrad",
    "28672x4096x16384": "gate and up as one, wgrad",
    "4096x14336x16384": "down wgrad",
}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The second and third are what "current" runs: fprop, and dgrad and wgrad.
ARMS: dict[str, tuple[torch.dtype, torch.dtype, bool]] = {
    "bf16": (torch.bfloat16, torch.bfloat16, False),
    "e4m3 x e4m3 fast": (E4M3, E4M3, True),
    "e5m2 x e4m3 slow": (E5M2, E4M3, False),
    "e4m3 x e4m3 slow": (E4M3, E4M3, False),
    "e5m2 x e4m3 fast": (E5M2, E4M3, True),
}
# The bf16 output's rounding is 0.0017 and fast accumulation adds its own; a wrong operand or scale is off by far more.
SUSPECT_ERROR = 0.02


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "gemm", iters=20)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="MxNxK")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3, help="arms take turns; the median round counts")
    parser.add_argument("--plot", action="store_true")
    return parser.parse_args()


def product(a: Tensor, b: Tensor, scale: Tensor, fast: bool) -> Tensor:
    if a.dtype == torch.bfloat16:
        return a @ b.t()
    return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


def prepare(arm: str, shape: str, device: str) -> tuple[Callable[[], Tensor], float]:
    """The call to time, and its relative error against fp32 on the first rows."""
    m, n, k = (int(size) for size in shape.split("x"))
    a_dtype, b_dtype, fast = ARMS[arm]
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, k, device=device, generator=generator).mul_(8).to(dtype)
        for size, dtype in ((m, a_dtype), (n, b_dtype))
    )
    scale = torch.ones((), device=device)
    rows = min(m, 256)
    reference = a[:rows].float() @ b.float().t()
    off = harness.relative_error(product(a, b, scale, fast)[:rows], reference)["relative"]
    return lambda: product(a, b, scale, fast), off


def measure(shape: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    m, n, k = (int(size) for size in shape.split("x"))
    prepared = {arm: prepare(arm, shape, args.device) for arm in args.arms}
    times: dict[str, list[float]] = {arm: [] for arm in args.arms}
    for _ in range(args.rounds):
        for arm, (call, _) in prepared.items():
            times[arm].append(harness.call_us([call] * 4, args.device, args.iters))
    rows = []
    for arm, (_, off) in prepared.items():
        us = statistics.median(times[arm])
        row = {"shape": shape, "arm": arm, "us": us, "rounds_us": times[arm], "tflops": 2 * m * n * k / us / 1e6}
        over = (
            statistics.median(b / t for b, t in zip(times["bf16"], times[arm], strict=True))
            if "bf16" in times
            else None
        )
        rows.append({**row, "over_bf16": over, "error": off})
    return rows


def main() -> None:
    args = parse()
    results: dict[str, Any] = {"environment": harness.environment(args.device), "rows": []}
    for shape in args.shapes:
        results["rows"] += measure(shape, args)
        harness.write_json(args.json, results)
    cells = [
        (
            row["shape"],
            SHAPES.get(row["shape"], ""),
            row["arm"],
            f"{row['us']:.1f}",
            f"{row['tflops']:.4g}",
            table.number(row["over_bf16"]),
            f"{row['error']:.4f}{'' if row['error'] <= SUSPECT_ERROR else ' SUSPECT'}",
        )
        for row in results["rows"]
    ]
    columns = ("M x N x K", "where", "operands, accumulation", "us", "TF/s", "over bf16", "error")
    table.show("GEMM, one scale a tensor, bf16 output; " + table.headline(results["environment"]), columns, cells)
    print(f"numbers: {args.json}")
    if args.plot:
        names = [f"{row['shape']} {row['arm']}" for row in results["rows"]]
        rates = [row["tflops"] for row in results["rows"]]
        table.bars(args.json.with_suffix(".png"), table.headline(results["environment"]), [("TF/s", names, rates)])


if __name__ == "__main__":
    main()
