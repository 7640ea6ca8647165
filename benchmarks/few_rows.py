"""FP8 GEMMs of few rows, as a step of generation or a short prompt has them: our kernel, cuBLASLt's and bf16.

    python -m benchmarks.few_rows
    python -m benchmarks.few_rows --all 5 --cast     # every way to cut the work, the five fastest of each

Weights rotate through more memory than the L2 cache holds. Our kernel counts with the one that adds its partial sums
up, that of eager code: in a compiled model it is Inductor's, with what comes next in it. With `--cast` FP8 counts with
the cast of x, a program a row, which lets the next kernel start early as generated code does. Under `--all` a second
table says what follows for kernels/fp8_small_m.py."""

import argparse
import functools
import itertools
import math
import multiprocessing
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import harness, table
from benchmarks.decode import COLD, COPY
from te_inductor.kernels import fp8_small_m as small_m
from te_inductor.kernels.fp8_small_m import SmallMConfig, Way
from te_inductor.targets import sm90
from te_inductor.templates.triton import fp8_small_m, partial_sums

LAYERS = (
    (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (14336, 4096), (128256, 4096), (2560, 4096), (2560, 9728),
    (6144, 2560),
)  # fmt: skip
# Ways that --all tries, by the number of rows at most. No registers are spilled.
TRIED = {
    16: [Way(64, 16, block_k, 4, programs) for block_k in (128, 256) for programs in (1, 2)],
    32: [Way(64, 32, block_k, 4, programs) for block_k in (128, 256) for programs in (1, 2)],
    64: [
        *(Way(64, 64, block_k, 4, programs) for block_k in (128, 256) for programs in (1, 2)),
        *(Way(128, 64, 128, warps, 1) for warps in (4, 8)),
    ],
    128: [Way(128, 128, 128, 8, 1), *(Way(*tile, 128, 8, p) for tile in ((64, 128), (128, 64)) for p in (1, 2))],
    256: [
        *(Way(*tile, 128, 8, 1) for tile in ((128, 128), (64, 256), (64, 128))),
        *(Way(*tile, 128, 8, 2) for tile in ((64, 128), (128, 64))),
    ],
}
L2, ONE = 6.5e12, 68e9  # bytes a second that all multiprocessors have read, and one of them (docs/ledger.md)
WORTH = 1.4  # times the least estimate of a product: what takes longer is not measured
TOLERANCE = 3e-3  # of the norm: the tensor core aligns 32 products to the largest and keeps 14 bits, bf16 keeps 8


@dataclass(frozen=True)
class Measured:
    """One way to cut one product, in microseconds."""

    n: int
    k: int
    m: int
    us: float
    bf16_us: float
    library_us: float
    config: SmallMConfig
    ways: tuple[Way, ...]  # which cut it so
    chosen: bool  # by the package, if it takes the product

    @property
    def programs(self) -> int:
        return -(-self.n // self.config.block_n) * -(-self.m // self.config.rows) * self.config.splits

    def cells(self) -> tuple[Any, ...]:
        c, of_copy = self.config, self.n * self.k / COPY * 1e6 / self.us
        return (
            f"{self.n} x {self.k}", self.m, table.number(self.us, 1), f"{of_copy:.0%}",
            table.number(self.bf16_us / self.us), table.number(self.bf16_us, 1), table.number(self.library_us, 1),
            f"{c.block_n} x {c.rows}, {c.warps}", f"{c.block_k}, {c.splits}, {c.stages}", self.programs,
            "chosen" if self.chosen else "",
        )  # fmt: skip


COLUMNS = (
    "N x K", "M", "us", "of copy", "over bf16", "bf16 us", "cuBLASLt us", "tile, warps", "columns, splits, stages",
    "programs", "",
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "few_rows", device=None, replays=9)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, *small_m.ROWS])
    parser.add_argument("--layers", nargs="+", default=[f"{n}x{k}" for n, k in LAYERS])
    parser.add_argument("--all", type=int, metavar="TOP", help="of all configs, so many are shown")
    parser.add_argument("--cast", action="store_true", help="FP8 counts with the cast of x")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--seconds", type=float, default=math.inf, help="what is not measured by then is left out")
    return parser.parse_args()


def configs(m: int, n: int, k: int, options: argparse.Namespace) -> dict[SmallMConfig, tuple[Way, ...]]:
    """What is measured, and the ways that cut so; the package's own first."""
    chosen = small_m.cut(m, n, k)
    rows = small_m.at_most(lambda rows: m <= rows) or small_m.ROWS[-1]
    found: dict[SmallMConfig, tuple[Way, ...]] = {chosen: (small_m.WAYS[rows],)}
    if options.all is None:
        return found
    for way in TRIED[rows]:
        for config in depths(small_m.cut(m, n, k, way), m, n):
            found[config] = tuple(dict.fromkeys((*found.get(config, ()), way)))
    least = min(estimate(config, m, n, k) for config in found)
    return {c: ways for c, ways in found.items() if c == chosen or estimate(c, m, n, k) <= WORTH * least}


def depths(config: SmallMConfig, m: int, n: int) -> list[SmallMConfig]:
    """The config with as many stages as the package has; where a multiprocessor has one program, with all of its memory
    too, and for few rows with so few stages that two fit."""
    stage, tiles = (config.block_n + config.rows) * config.block_k, -(-n // config.block_n) * -(-m // config.rows)
    alone = tiles * config.splits <= sm90.LIMITS.multiprocessors
    deep = [sm90.LIMITS.shared_memory // stage] * alone
    shared = [small_m.half(sm90.LIMITS) // stage] * (alone and m <= small_m.FEW)
    return [replace(config, stages=stages) for stages in dict.fromkeys((config.stages, *deep, *shared))]


def estimate(config: SmallMConfig, m: int, n: int, k: int) -> float:
    """Microseconds that the bytes of all multiprocessors, or of the fullest one, and the partial sums take."""
    programs = -(-n // config.block_n) * -(-m // config.rows) * config.splits
    turns = math.ceil(k / config.block_k / config.splits)
    program = turns * (config.block_n + config.rows) * config.block_k
    fullest = -(-programs // sm90.LIMITS.multiprocessors) * program
    sums = 8 * config.splits * m * n if config.splits > 1 else 0
    return 1e6 * (max(programs * program / L2, fullest / ONE) + sums / L2) + 2.0


def compile_ahead(job: tuple[SmallMConfig, int, int]) -> None:
    """Compiles into Triton's cache, which the measuring process reads."""
    config, m, k = job
    x, b = (torch.ones(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, config.block_n))
    run(Input(x), torch.ones(config.block_n, 1, device="cuda"), config, True, b.to(small_m.DTYPE))


class Input:
    """x, and what its cast writes."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.a, self.a_scale = torch.empty_like(x, dtype=small_m.DTYPE), torch.empty(len(x), 1, device=x.device)
        self.cast(early=False)

    def cast(self, early: bool) -> None:
        (m, k), block = self.x.shape, triton.next_power_of_2(self.x.shape[1])
        _cast[(m,)](
            self.x, self.a, self.a_scale, k, BLOCK=block, EARLY=early, num_warps=max(1, block // 1024), launch_pdl=early
        )


@triton.jit
def _cast(x, a, a_scale, K, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), 0)
    tl.store(a + row * K + columns, (value * (448.0 / amax)).to(a.dtype.element_ty), mask=columns < K)
    tl.store(a_scale + row, amax / 448.0)


def run(given: Input, b_scale: Tensor, config: SmallMConfig, cast: bool, b: Tensor) -> Tensor:
    """b comes last, as a layer's weights are what calls differ by."""
    if cast:
        given.cast(early=True)
    dtype = given.x.dtype
    return partial_sums.add_up(fp8_small_m.partial_sums(given.a, given.a_scale, b, b_scale, config, dtype), dtype)


def library(given: Input, b_scale: Tensor, cast: bool, b: Tensor) -> Tensor:
    if cast:
        given.cast(early=False)
    scales = {"scale_a": given.a_scale, "scale_b": b_scale.t()}
    return torch._scaled_mm(given.a, b.t(), **scales, out_dtype=given.x.dtype, use_fast_accum=True)


def measure(m: int, n: int, k: int, options: argparse.Namespace, left_out: set[Any]) -> list[Measured]:
    count = max(2, round(COLD / (n * k)))
    weights = [(torch.randn(n, k, device="cuda") * 8).to(small_m.DTYPE) for _ in range(count)]
    plain = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, count // 2))]
    given, b_scale = Input(torch.randn(m, k, device="cuda", dtype=torch.bfloat16)), torch.rand(n, 1, device="cuda") + 1
    bf16_us = _us([functools.partial(torch.mm, given.x, w.t()) for w in plain], options)
    library_us = _us([functools.partial(library, given, b_scale, options.cast, w) for w in weights], options)
    exact = given.a.double() @ weights[0].double().t() * given.a_scale.double() * b_scale.t().double()
    found = []
    for config, ways in configs(m, n, k, options).items():
        if (config, m, k) in left_out:
            continue
        error = harness.relative_error(run(given, b_scale, config, options.cast, weights[0]).double(), exact)
        if not error["relative"] < TOLERANCE:
            raise SystemExit(f"{config} is wrong by {error['relative']} of its norm")
        us = _us([functools.partial(run, given, b_scale, config, options.cast, w) for w in weights], options)
        chosen = config == small_m.cut(m, n, k)
        found.append(Measured(n, k, m, us, bf16_us, library_us, config, ways, chosen))
    return sorted(found, key=lambda one: one.us)


def _us(calls: Any, options: argparse.Namespace) -> float:
    return harness.call_us(calls, "cuda", options.replays, warmup=1)


def compile_all(jobs: list[Any], options: argparse.Namespace) -> set[Any]:
    """Compiles in processes, for half of the time there is at most; the jobs that were not done, or failed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        futures = {pool.submit(compile_ahead, job): job for job in jobs}
        wait(futures, timeout=None if math.isinf(options.seconds) else options.seconds / 2)
        pool.shutdown(cancel_futures=True)
    left_out = {job for future, job in futures.items() if future.cancelled() or future.exception() is not None}
    for future, job in futures.items():
        if job in left_out:
            print(f"left out: {job}: {'not in time' if future.cancelled() else future.exception()}")
    return left_out


def ranked(rows: list[Measured]) -> list[tuple[Any, ...]]:
    """Ranks, for each number of rows, the ways by their mean distance from the fastest of each layer; and each way with
    more stages than the package gives it, or with so few that two programs share a multiprocessor."""
    shares: dict[tuple[int, Way, str], list[float]] = defaultdict(list)
    best: dict[tuple[int, int, int], float] = {}
    for row in rows:
        place = row.n, row.k, row.m
        best[place] = min(best.get(place, row.us), row.us)
    for row in rows:
        for way in row.ways:
            more = row.config.stages - small_m.cut(row.m, row.n, row.k, way).stages
            stages = "all" if more > 0 else "two share" if more < 0 else "the package's"
            shares[row.m, way, stages].append(best[row.n, row.k, row.m] / row.us)
    cells = [
        (m, str(way), stages, len(each), table.number(math.exp(sum(map(math.log, each)) / len(each))))
        for (m, way, stages), each in shares.items()
    ]
    return sorted(cells, key=lambda row: (row[0], -row[3], -float(row[4])))


def against_library(rows: list[Measured]) -> list[tuple[Any, ...]]:
    """Compares, above FEW rows, the tiles and columns by which PAYS chooses."""
    cells = []
    for row in sorted((row for row in rows if row.chosen and row.m > small_m.FEW), key=lambda row: row.m):
        tiles = -(-row.m // small_m.TILE) * -(-row.n // small_m.TILE)
        fastest = min(other.us for other in rows if (other.n, other.k, other.m) == (row.n, row.k, row.m))
        ratios = (table.number(row.library_us / us) for us in (row.us, fastest))
        cells.append((row.m, tiles, row.k, *ratios, "ours" if small_m.pays(row.m, row.n, row.k) else "cuBLASLt's"))
    return cells


def main() -> None:
    options, start = parse(), time.perf_counter()
    layers = [tuple(map(int, layer.split("x"))) for layer in options.layers]
    products = [(m, n, k) for (n, k), m in itertools.product(layers, options.batches)]
    jobs = dict.fromkeys((c, m, k) for m, n, k in products for c in configs(m, n, k, options))
    left_out = compile_all(list(jobs), options)
    took = time.perf_counter() - start
    environment = harness.environment("cuda")
    rows: list[Measured] = []
    shown: list[Measured] = []
    for product in products:
        if time.perf_counter() - start > options.seconds:
            print(f"left out: M, N, K = {product}: not in time")
            continue
        found = measure(*product, options, left_out)
        rows += found
        shown += [row for place, row in enumerate(found) if place < (options.all or 1) or row.chosen]
        data = {"environment": environment, "cast": options.cast, "rows": [asdict(row) for row in rows]}
        harness.write_json(options.json, data)
    what = "with the cast of x" if options.cast else "x cast before"
    title = f"FP8 GEMMs of few rows, {what}, {table.headline(environment)}"
    table.show(title, COLUMNS, [row.cells() for row in shown])
    if options.all is not None:
        table.show("WAYS: layers, and the mean of fastest / us", ("M", "way", "stages", "layers", "mean"), ranked(rows))
        columns = ("M", "tiles", "K", "cuBLASLt us / us, chosen", "fastest", "runs today")
        table.show("PAYS: where cuBLASLt us / us is above 1", columns, against_library(rows))
    print(f"{len(jobs)} kernels compiled in {took:.0f} s, {len(left_out)} left out")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
