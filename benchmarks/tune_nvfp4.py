"""Times the configs of the NVFP4 decode kernel, and the ways to run large batches, and writes the table that chooses.

    python -m benchmarks.tune_nvfp4 --write

Weights rotate through more memory than the L2 cache holds. A config counts with the kernel that adds its partial sums
up, the one of eager code: in a compiled model it is Inductor's, with the layer's epilogue in it."""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks import harness, table
from te_inductor import targets
from te_inductor.kernels import nvfp4_fp8 as prompts
from te_inductor.kernels.nvfp4_linear import DIRECT, PLAIN, STREAMED, TABLE, NVFP4Config, problem, supports
from te_inductor.kernels.nvfp4_linear import table as measured_table
from te_inductor.kernels.problem import Problem, Sizes
from te_inductor.numerics import nvfp4
from te_inductor.templates.triton import (
    nvfp4_direct,
    nvfp4_expand,
    nvfp4_fp8,
    nvfp4_linear,
    nvfp4_streamed,
    partial_sums,
)
from te_inductor.templates.triton.nvfp4_linear import FACTOR

LAYERS = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (14336, 4096), (128256, 4096))
BATCHES = (1, 8, 16, 32, 64)
PREFILLS = (64, 128, 256, 512, 1024, 4096)
SPLITS = (1, 2, 4, 8)
# The tiles by kernel. Plain: rows of x in a tile: warps, rows of the weight; (columns at a time, stages).
TILES = {
    64: (((4, 64), ((128, 3), (256, 2))), ((8, 128), ((256, 2),))),
    128: (((4, 64), ((64, 4), (128, 3))), ((8, 128), ((64, 4), (128, 2), (128, 3))), ((8, 256), ((64, 3), (128, 2)))),
}
# Direct: splits and warps, both parts of K, by rows of x.
SHARES = {
    8: ((1, 1), (1, 2), (1, 4), (1, 8), (4, 2), (7, 1)),
    16: ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (4, 2), (7, 1), (8, 1)),
}
# Streamed: rows of the weight, parts of K in a program and warps; stages.
GROUPS = ((128, 1, 8), (64, 2, 8), (256, 1, 16), (128, 2, 16), (64, 4, 16))
STAGES = {8: (3, 4, 6, 8), 16: (3, 4, 8)}  # by warps
COPY = 4269e9  # bytes a second, reading and writing, measured on an H200
COLD = 160e6  # bytes of weights to rotate through


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "tune_nvfp4", device=None, replays=9)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--prefills", nargs="*", type=int, default=list(PREFILLS))
    parser.add_argument("--layers", nargs="+", default=[f"{n}x{k}" for n, k in LAYERS])
    parser.add_argument("--kinds", nargs="+", choices=list(_CONFIGS), default=[DIRECT, STREAMED])
    parser.add_argument("--top", type=int, default=3, help="configs of each layer and batch that are shown")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--write", action="store_true", help="put what is measured into the package's table")
    return parser.parse_args()


def configs(m: int, kinds: list[str]) -> list[NVFP4Config]:
    return [config for kind in kinds for config in _CONFIGS[kind](m)]


def _plain(m: int) -> list[NVFP4Config]:
    rows = next((rows for rows in TILES if m <= rows), max(TILES))
    return [
        NVFP4Config(PLAIN, rows, n, k, splits, warps, 1, stages)
        for (warps, n), steps in TILES[rows]
        for k, stages in steps
        for splits in SPLITS
    ]


def _direct(m: int) -> list[NVFP4Config]:
    rows = next((rows for rows in SHARES if m <= rows), None)
    return [
        NVFP4Config(DIRECT, rows, n, 256, splits, warps, warps, stages)
        for splits, warps in SHARES.get(rows, ())  # type: ignore[arg-type]
        for n, stages in ((16, 2), (16, 3), (32, 2), (32, 3))
    ]


def _streamed(m: int) -> list[NVFP4Config]:
    rows = min(max(8, 1 << (m - 1).bit_length()), 128)
    return [
        NVFP4Config(STREAMED, rows, n, 256, splits, warps, shares, stages)
        for n, shares, warps in GROUPS
        for splits in SPLITS
        for stages in STAGES[warps]
    ]


_CONFIGS = {PLAIN: _plain, DIRECT: _direct, STREAMED: _streamed}


def of_sizes(m: int, n: int, k: int) -> Problem:
    """The problem of such rows and such a weight on this device."""
    return problem(targets.of(torch.device("cuda")), Sizes(m, n, k), torch.bfloat16, torch.bfloat16)


def worth(config: NVFP4Config, problem: Problem) -> bool:
    """Enough programs to fill the card, and not many more."""
    programs = -(-problem.sizes.m // config.rows) * -(-problem.sizes.n // config.block_n) * config.splits
    warps, steps = programs * config.warps, problem.sizes.k // config.block_k / config.splits
    if supports(config, problem) is not None:
        return False
    if config.kind == DIRECT:
        return warps >= 600 and (config.splits * config.warps == 1 or warps <= 2200)
    if config.kind == STREAMED:
        return programs >= 60 and steps / config.shares >= 3 and (config.splits == 1 or warps <= 2200)
    return warps >= 400 and steps >= 3 and (config.splits == 1 or warps <= 4000)


def compile_ahead(job: tuple[NVFP4Config, Problem]) -> None:
    """Compiles into Triton's cache, which the measuring process reads."""
    config, problem = job
    x, w, s, one = (
        torch.empty(16, dtype=dtype, device="cuda")
        for dtype in (torch.bfloat16, torch.int16, torch.uint8, torch.float32)
    )
    out = torch.empty(16, dtype=partial_sums.sum_dtype(config.splits, torch.bfloat16), device="cuda")
    if config.kind == STREAMED:
        shape = config.rows, config.block_n, config.shares, config.stages
        sizes = (
            (problem.sizes.m, problem.sizes.k),
            (problem.sizes.n, problem.sizes.k // 8),
            (problem.sizes.n, problem.sizes.k // 32),
        )
        tensors = x, w.view(torch.int32), s.view(torch.int16)
        copied = zip(tensors, sizes, nvfp4_streamed.boxes(*shape[:2]), strict=True)
        nvfp4_streamed._linear.warmup(
            *(TensorDescriptor(t, list(size), [size[1], 1], box.shape, box.layout) for t, size, box in copied),
            one, out, problem.sizes.m, problem.sizes.n, config.splits, problem.sizes.k // 256 // config.splits,
            **nvfp4_streamed.constants(*shape), **nvfp4_streamed.options(*shape), grid=(1,),
        )  # fmt: skip
        return
    if config.kind == DIRECT:
        shape = config.rows, config.block_n, config.splits, config.warps, config.stages - 1
        given = nvfp4_direct.constants(problem.sizes.m > 1, problem.sizes.m, problem.sizes.k, *shape)
        options = nvfp4_direct.options(config.block_n, config.warps)
        nvfp4_direct._linear.warmup(
            x, w.view(torch.int32), s.view(torch.uint16), one, out, problem.sizes.n, **given, **options, grid=(1,)
        )
        return
    names = "K", "ROWS", "BLOCK_N", "BLOCK_K", "SPLITS"
    values = problem.sizes.k, config.rows, config.block_n, config.block_k, config.splits
    nvfp4_linear._partial_sums.warmup(
        x, w, s, one, out, problem.sizes.m, problem.sizes.n, **dict(zip(names, values, strict=True)), STAGES=config.stages,
        FACTOR=FACTOR, ASSEMBLY=True, num_warps=config.warps, launch_pdl=True, grid=(1,),
    )  # fmt: skip


class Layer:
    """Random weights of one shape, in NVFP4 and in bf16, enough of each to leave the cache cold."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.stored = [_random(n, k) for _ in range(max(3, round(COLD / (n * k * 9 / 16))))]
        self.plain = [
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, round(COLD / (n * k))))
        ]
        self.values = nvfp4.values(*self.stored[0][:2])

    def us(self, calls: Any, options: argparse.Namespace) -> float:
        return harness.call_us(calls, "cuda", options.replays, warmup=1)

    def bf16(self, x: Tensor, options: argparse.Namespace) -> float:
        return self.us([lambda w=w: torch.mm(x, w.t()) for w in self.plain], options)

    def decode(self, x: Tensor, config: NVFP4Config, options: argparse.Namespace) -> float:
        given = nvfp4_linear.arranged(x, config)

        def call(s: tuple[Tensor, ...]) -> Tensor:
            return partial_sums.add_up(nvfp4_linear.partial_sums(given, *s, config, torch.bfloat16), torch.bfloat16)

        expected = x.float() @ self.values.t() * self.stored[0][2]
        error = harness.relative_error(call(self.stored[0]).float(), expected)["relative"]
        if not error < 2.0**-9:  # the result is rounded to bf16
            raise SystemExit(f"{config} is wrong by {error} of its norm")
        return self.us([lambda s=s: call(s) for s in self.stored], options)


def _random(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Makes what normal values are quantized to: codes and scales of every kind."""
    scales = torch.randint(0x40, 0x7F, (n, k // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    return codes, scales, torch.full((), 0.01, device="cuda")


def tune(layer: Layer, m: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    asked = of_sizes(m, layer.n, layer.k)
    x = torch.randn(m, layer.k, device="cuda", dtype=torch.bfloat16)
    bf16 = layer.bf16(x, options)
    rows = []
    for config in configs(m, options.kinds):
        if worth(config, asked):
            rows.append({"us": layer.decode(x, config, options), "bf16_us": bf16, "config": asdict(config)})
    return [{"m": m, "n": layer.n, "k": layer.k, **row} for row in sorted(rows, key=lambda row: row["us"])]


def prefill(layer: Layer, m: int, options: argparse.Namespace) -> dict[str, Any]:
    """Large batches: decoded to FP8 between products, cast to FP8 and cuBLASLt's GEMM, written out in bf16 and cuBLAS',
    and bf16 alone. Without the cast of x."""
    x = torch.randn(m, layer.k, device="cuda", dtype=torch.bfloat16)
    x8, one = x.to(torch.float8_e4m3fn), torch.ones(m, 1, device="cuda")

    def fp8(s: tuple[Tensor, ...]) -> Tensor:
        data, scale = nvfp4_expand.recast(*s)
        return torch._scaled_mm(
            x8, data.t(), scale_a=one, scale_b=scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def exact(s: tuple[Tensor, ...]) -> Tensor:
        return torch.mm(x, nvfp4_expand.dequantize(*s, layer.k, torch.bfloat16).t())

    def decoded(s: tuple[Tensor, ...]) -> Tensor:
        config = prompts.configured(m, layer.n, layer.k)  # x in whatever order: it is timed only
        return partial_sums.add_up(nvfp4_fp8.partial_sums(x8, one, *s, config, torch.bfloat16), torch.bfloat16)

    ways = {"decoded_us": decoded, "fp8_us": fp8, "exact_us": exact, "recast_us": lambda s: nvfp4_expand.recast(*s)}
    found = {name: layer.us([lambda s=s, way=way: way(s) for s in layer.stored], options) for name, way in ways.items()}
    return {"m": m, "n": layer.n, "k": layer.k, "bf16_us": layer.bf16(x, options), **found}


def main() -> None:
    options = parse()
    layers = [tuple(map(int, layer.split("x"))) for layer in options.layers]
    problems = [of_sizes(m, n, k) for m in options.batches for n, k in layers]
    jobs = list(
        {
            compiled_for(config, asked): (config, asked)
            for asked in problems
            for config in configs(asked.sizes.m, options.kinds)
            if worth(config, asked)
        }.values()
    )
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_ahead, jobs, chunksize=4))
    environment = harness.environment("cuda")
    best, shown, large = [], [], []
    for n, k in layers:
        layer = Layer(n, k)
        for m in options.batches:
            rows = tune(layer, m, options)
            if not rows:
                print(f"{m} rows by {n} x {k}: none of these kinds is worth a try", file=sys.stderr)
                continue
            print(*map(str, cells(rows[0])), sep=" | ", file=sys.stderr, flush=True)
            best.append(rows[0])
            shown += [cells(row) for row in rows[: options.top]]
        large += [prefill(layer, m, options) for m in options.prefills]
        del layer
        torch.cuda.empty_cache()
    columns = ("M", "N x K", "us", "of copy", "over bf16", "bf16", "config")
    table.show(f"NVFP4 decode, {table.headline(environment)}", columns, shown)
    keys = ("m", "bf16_us", "decoded_us", "fp8_us", "exact_us", "recast_us")
    lines = [(f"{r['n']} x {r['k']}", *(table.number(r[key], 1) for key in keys)) for r in large]
    table.show("large batches, us", ("N x K", "M", "bf16", "decoded", "FP8", "exact", "cast alone"), lines)
    data = {key: environment[key] for key in ("device", "date", "torch", "triton")}
    harness.write_json(options.json, {**data, "rows": best, "prefill": large})
    if options.write:
        measured = {(*problem_of(row), row["config"]["kind"]): row for row in [*measured_table()["rows"], *best]}
        TABLE.write_text(written(data, sorted(measured.values(), key=lambda row: (*problem_of(row), row["us"]))))


def compiled_for(config: NVFP4Config, problem: Problem) -> tuple[Any, ...]:
    """Tells which problems share a kernel, as N is no constant of one, and of a streamed one no size is."""
    if config.kind == STREAMED:
        return (replace(config, splits=min(config.splits, 2)),)
    return config, problem.sizes.m, problem.sizes.k


def problem_of(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["n"], row["k"], row["m"]


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    floor = row["n"] * row["k"] * 9 / 16 / COPY * 1e6
    return (
        row["m"], f"{row['n']} x {row['k']}", table.number(row["us"], 1), f"{floor / row['us']:.0%}",
        table.number(row["bf16_us"] / row["us"]), table.number(row["bf16_us"], 1), NVFP4Config(**row["config"]),
    )  # fmt: skip


def written(data: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A row a line, so that a difference can be read."""
    lines = [json.dumps({**row, **{key: round(row[key], 1) for key in ("us", "bf16_us")}}) for row in rows]
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in data.items())
    return "{\n" + head + ' "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


if __name__ == "__main__":
    main()
