"""FP8 GEMMs of few rows, as a step of generation has them: our kernel, cuBLASLt's and bf16.

    python -m benchmarks.few_rows
    python -m benchmarks.few_rows --all 5     # every way to cut the work, the five fastest of each

Weights rotate through more memory than the L2 cache holds. Our kernel counts with the one that adds its partial sums
up, that of eager code: in a compiled model it is Inductor's, with what comes next in it."""

import argparse
import functools
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, table
from benchmarks.decode import COLD, COPY
from te_inductor.runtime import small_m
from te_inductor.runtime.small_m import Config
from te_inductor.templates.triton import fp8_small_m, partial_sums

LAYERS = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (14336, 4096), (128256, 4096))
STEPS = ((128, 4), (128, 8), (256, 3), (256, 4))  # columns at a time, stages
SPLITS = (1, 2, 4, 8)
TOLERANCE = 2e-3  # of the norm: the tensor core aligns 32 products to the largest and keeps 14 bits of them


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, *small_m.ROWS])
    parser.add_argument("--layers", nargs="+", default=[f"{n}x{k}" for n, k in LAYERS])
    parser.add_argument("--all", type=int, metavar="TOP", help="of all configs, so many are shown")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--json", type=Path, default=Path("out/few_rows.json"))
    return parser.parse_args()


def configs(m: int, n: int, k: int, options: argparse.Namespace) -> list[Config]:
    chosen = small_m.cut(m, n, k)
    if options.all is None:
        return [chosen]
    ways = itertools.product(STEPS, SPLITS)
    return [
        Config(chosen.rows, block_k, splits, stages)
        for (block_k, stages), splits in ways
        if k % (block_k * splits) == 0
    ]


def compile_ahead(job: tuple[Config, int, int]) -> None:
    """Into Triton's cache, which the measuring process reads."""
    config, m, k = job
    a, b = (torch.empty(rows, k, device="cuda", dtype=small_m.DTYPE) for rows in (m, small_m.BLOCK_N))
    run(a, torch.ones(m, 1, device="cuda"), torch.ones(small_m.BLOCK_N, 1, device="cuda"), config, torch.bfloat16, b)


def run(a: Tensor, a_scale: Tensor, b_scale: Tensor, config: Config, dtype: torch.dtype, b: Tensor) -> Tensor:
    """b comes last, as a layer's weights are what calls differ by."""
    return partial_sums.add_up(fp8_small_m.partial_sums(a, a_scale, b, b_scale, config, dtype), dtype)


def measure(m: int, n: int, k: int, options: argparse.Namespace) -> list[tuple[Any, ...]]:
    count = max(2, round(COLD / (n * k)))
    weights = [(torch.randn(n, k, device="cuda") * 8).to(small_m.DTYPE) for _ in range(count)]
    plain = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, count // 2))]
    x, a_scale, b_scale = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), *_scales(m, n)
    a = (x * 8).to(small_m.DTYPE)
    library = functools.partial(torch._scaled_mm, a, out_dtype=x.dtype, use_fast_accum=True)
    bf16_us = _us([functools.partial(torch.mm, x, w.t()) for w in plain], options)
    library_us = _us(
        [functools.partial(library, w.t(), scale_a=a_scale, scale_b=b_scale.t()) for w in weights], options
    )
    exact = a.double() @ weights[0].double().t() * a_scale.double() * b_scale.t().double()
    rows = []
    for config in configs(m, n, k, options):
        found = run(a, a_scale, b_scale, config, torch.float32, weights[0])
        error = harness.relative_error(found.double(), exact)["relative"]
        if not error < TOLERANCE:
            raise SystemExit(f"{config} is wrong by {error} of its norm")
        ours = functools.partial(run, a, a_scale, b_scale, config, x.dtype)
        rows.append((_us([functools.partial(ours, w) for w in weights], options), config))
    rows.sort(key=lambda row: row[0])
    floor = n * k / COPY * 1e6
    return [
        (
            f"{n} x {k}", m, table.number(us, 1), f"{floor / us:.0%}", table.number(bf16_us / us),
            table.number(bf16_us, 1), table.number(library_us, 1), f"{c.block_k}, {c.splits}, {c.stages}",
        )
        for us, c in rows[: options.all or 1]
    ]  # fmt: skip


def _scales(m: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.rand(m, 1, device="cuda") + 0.5, torch.rand(n, 1, device="cuda") + 0.5


def _us(calls: Any, options: argparse.Namespace) -> float:
    return harness.call_us(calls, "cuda", options.replays, warmup=1)


def main() -> None:
    options = parse()
    layers = [tuple(map(int, layer.split("x"))) for layer in options.layers]
    jobs = {(c, m, k) for (n, k), m in itertools.product(layers, options.batches) for c in configs(m, n, k, options)}
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_ahead, jobs, chunksize=4))
    environment = harness.environment("cuda")
    rows = [row for (n, k), m in itertools.product(layers, options.batches) for row in measure(m, n, k, options)]
    columns = (
        "N x K",
        "M",
        "us",
        "of copy",
        "over bf16",
        "bf16 us",
        "cuBLASLt us",
        "columns, splits, stages",
    )
    table.show(f"FP8 GEMMs of few rows, {table.headline(environment)}", columns, rows)
    harness.write_json(options.json, {"environment": environment, "rows": [list(map(str, row)) for row in rows]})


if __name__ == "__main__":
    main()
