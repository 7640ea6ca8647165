"""`te-inductor tune`: times CUTLASS's tiles against cuBLASLt on this machine's GPU, and writes the table by which FP8
GEMMs are chosen. By default the shapes are those of the GEMMs of a layer of six models, q, k, v and gate, up as one."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from te_inductor import config, targets
from te_inductor.command.gemm_arms import GELU, SWIGLU, arms
from te_inductor.errors import OptionError, unknown
from te_inductor.kernels import cutlass_packages
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.kernels.cutlass_tables import Table
from te_inductor.kernels.cutlass_tiles import Tile, kernel, scope_of, tiles
from te_inductor.kernels.problem import ANOTHER, NOTHING, OUTPUT, Epilogue, Problem, Sizes
from te_inductor.presentation.progress import progress
from te_inductor.presentation.tables import Column, tabulated
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import BLOCK_1X128, BLOCK_128X128, E4M3, E5M2, ROW, SCOPES, TENSOR
from te_inductor.targets import Target
from te_inductor.templates.cutlass import build

TOKENS = (2048, 4096, 8192, 16384)
WEIGHTS = {  # N x K of each weight of a layer; the last one is down's
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "llama-3.2-3b": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "qwen-2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "llama-2-13b": ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
APART = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336))  # of Llama-3-8B, each weight by itself
MLPS = ((4096, 1024), (8192, 2048), (16384, 4096))  # N x K of the layer in front of an activation
ARCH = "90"  # the only one whose kernels a table may name
GAIN = 0.985  # a tile is taken where it needs at most this part of cuBLASLt's time, twice
MOST_CALLS = 12  # of one arm that follow each other
ROUND, FP8_FLOPS = (
    5e-3,
    1.2e15,
)  # seconds that they are to take, and what a GEMM computes in one, to be ready in minutes
Weights = Sequence[tuple[int, int]]


_FPROP, _DGRAD, _WGRAD = "mnk", "mkn", "nkm"  # M, N and K of each GEMM of m tokens and a weight of n x k


class _TunedGemm(NamedTuple):
    """A GEMM that is measured for each number of tokens and each weight."""

    order: str
    scope: str
    fast: bool = False
    a: str = E4M3.name  # elements of the left operand; those of the right one are E4M3

    def gemm(self) -> Gemm:
        left = BLOCK_1X128.name if self.scope == BLOCK_128X128.name else self.scope
        return Gemm("fprop", self.fast, (left, self.scope), (self.a, E4M3.name))


class _TunedKind(NamedTuple):
    """GEMMs of layers that differ in sizes and scales alone."""

    weights: Sequence[Weights]  # by default
    gemms: Sequence[_TunedGemm]
    out: torch.dtype = torch.bfloat16
    epilogue: Epilogue = Epilogue()


_ALL = [*WEIGHTS.values()]
_SQUARE, _SHRINKING = BLOCK_128X128.name, [[(n, k) for n, k in weights if n <= k] for weights in _ALL]  # o and down
# Elements of gradients are those of "current" and "delayed", and of "rowwise". fprop accumulates fast; dgrad and wgrad
# split, as the recipes' defaults say.
_GRADIENTS = {TENSOR.name: E5M2.name, ROW.name: E4M3.name}
BLOCKS, QUANTIZED, GATED = "blocks", "quantized", "gated"
KINDS = {
    "plain": [  # one scale a tensor or a row
        _TunedKind(
            [APART if scope == ROW.name and name == "llama-3-8b" else weights for name, weights in WEIGHTS.items()],
            [_TunedGemm(_FPROP, scope, True), _TunedGemm(_DGRAD, scope, a=grad), _TunedGemm(_WGRAD, scope, a=grad)],
        )
        for scope, grad in _GRADIENTS.items()
    ],
    BLOCKS: [
        _TunedKind(
            _ALL, [_TunedGemm(_FPROP, _SQUARE), _TunedGemm(_DGRAD, _SQUARE), _TunedGemm(_WGRAD, BLOCK_1X128.name)]
        )
    ],
    OUTPUT: [  # added to an fp32 total
        _TunedKind(
            [APART],
            [_TunedGemm(_WGRAD, scope, a=grad) for scope, grad in _GRADIENTS.items()],
            torch.float32,
            Epilogue(added=OUTPUT),
        )
    ],
    ANOTHER: [  # a residual added
        _TunedKind(
            _SHRINKING,
            [_TunedGemm(_FPROP, TENSOR.name, True), _TunedGemm(_FPROP, _SQUARE)],
            epilogue=Epilogue(added=ANOTHER),
        )
    ],
    # An activation and a cast to FP8 behind the product, in inference.
    QUANTIZED: [_TunedKind([MLPS], [_TunedGemm(_FPROP, TENSOR.name, True)], E4M3.dtype, Epilogue(activation=GELU))],
    # The gradients of a gated activation, cast both ways: dgrad of down.
    GATED: [_TunedKind([one[-1:] for one in _ALL], [_TunedGemm(_DGRAD, _SQUARE)], E4M3.dtype, Epilogue(gating=SWIGLU))],
}


def run(arguments: argparse.Namespace) -> int:
    """Measure, and write after each GEMM, so that a run that is stopped keeps what it has measured."""
    folder = arguments.folder or config.tables()
    if folder is None:
        raise OptionError(f"no folder for the table: pass --folder, or set {config.TABLES}")
    for kind in arguments.kinds or KINDS:
        if kind not in KINDS:
            raise OptionError(unknown("kind of GEMMs", kind, KINDS))
    target = _target()
    asked = problems(target, arguments.shapes, arguments.tokens or TOKENS, arguments.kinds or KINDS)
    if not asked:
        raise OptionError("no kernel takes a GEMM of these shapes and kinds: sizes are multiples of 16, M 128 or more")
    print(f"{len(asked)} GEMMs on {target.product}", file=sys.stderr)
    start = time.monotonic()
    table = started(target.product, folder)
    build.start(kernel(p, tile) for p in asked for tile in tiles(p))
    taken = 0
    with progress(len(asked), "tune") as advance:
        for done, p in enumerate(asked, 1):
            row = measured(p, table, arguments.rounds)
            taken += row["tile"] is not None
            table = with_row(table, row)
            tables.write(table)
            advance()
            if not sys.stderr.isatty() and (done % 50 == 0 or done == len(asked)):
                print(f"{done} of {len(asked)}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(summary(table))
    print(f"\n{table.path}: {taken} of {len(asked)} GEMMs run faster than cuBLASLt in one of CUTLASS's tiles")
    if config.tables() != folder.absolute():
        print(f"to use it: export {config.TABLES}={folder.absolute()}")
    return 0


def _target() -> Target:
    """The GPU.

    Raises:
        OptionError: there is none, or none whose kernels can be built.
    """
    if not torch.cuda.is_available():
        raise OptionError("torch finds no GPU here; tune on the device that the table is for")
    device = torch.device("cuda")
    why = cutlass_packages.missing()
    if why is not None:
        raise OptionError(f"there is nothing to compare with cuBLASLt: {why}")
    target = targets.of(device)
    if target.cutlass != ARCH:
        raise OptionError(
            f"{targets.described(device)}: tables are for compute capability 9.0, elsewhere cuBLASLt multiplies, or what"
            ' mode="max-autotune" measures'
        )
    return target


def started(device: str, folder: Path) -> Table:
    """The table to go on with, in `folder`: what that has of this device, or else the package; rows that are measured
    anew take the place of others."""
    path = folder.absolute() / tables.file_name(device)
    packages = tuple(" ".join(version.split()[:2]) for version in cutlass_packages.versions())
    found = tables.read(path) if path.exists() else tables.of(device)
    rows = () if found is None else found.rows
    return Table(device, ARCH, torch.__version__, packages, rows, path)


def with_row(table: Table, row: dict[str, Any]) -> Table:
    kept = tuple(one for one in table.rows if identity(one) != identity(row))
    return replace(table, rows=(*kept, row))


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """Identifies what was measured."""
    sizes = (row[name] for name in ("m", "n", "k", "scope", "fast_accum", "added"))
    return (*sizes, *(row.get(kind, False) for kind in (QUANTIZED, GATED)))


def kind_of(row: dict[str, Any]) -> str:
    """A key of KINDS."""
    for kind in (QUANTIZED, GATED):
        if row.get(kind, False):
            return kind
    if SCOPES[row["scope"]].blocked and row["added"] == NOTHING:
        return BLOCKS
    return "plain" if row["added"] == NOTHING else row["added"]


def measured(p: Problem, table: Table, rounds: int) -> dict[str, Any]:
    """A row of the table. The fastest of several noisy times is too good to be true, so the tile that won is timed
    against cuBLASLt once more, and taken where it wins again."""
    found = arms(p, table, lambda text: print(f"\n{text}", file=sys.stderr))
    calls = max(MOST_CALLS // 4, min(MOST_CALLS, int(ROUND * FP8_FLOPS / (2 * p.sizes.m * p.sizes.n * p.sizes.k))))
    us = dict(zip(found, time_us(list(found.values()), rounds, calls), strict=True))
    library = us.pop(None)
    best: Tile | None = min(us, key=lambda tile: us[tile], default=None)
    chosen = None
    if best is not None and us[best] <= GAIN * library:
        library, us[best] = time_us([found[None], found[best]], rounds, calls)
        chosen = best if us[best] <= GAIN * library else None
    return {
        **{name: getattr(p.sizes, name) for name in tables.SIZES},
        "scope": scope_of(p),
        "fast_accum": p.gemm.fast_accum,
        "added": p.epilogue.added,
        **({QUANTIZED: True} if p.epilogue.activation is not None else {}),
        **({GATED: True} if p.epilogue.gating is not None else {}),
        "tile": None if chosen is None else asdict(chosen),
        "us": None if best is None else round(us[best], 1),
        "cublaslt_us": round(library, 1),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def time_us(arms: Sequence[Callable[[], Any]], rounds: int, calls: int) -> list[float]:
    """Returns the microseconds of one call of each, the median of rounds in which they take turns. Launches of one arm
    follow each other closely enough: the shortest kernel here takes as long as a launch."""
    times: list[list[float]] = [[] for _ in arms]
    for _ in range(rounds):
        for call, taken in zip(arms, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            taken.append(1e3 * start.elapsed_time(end) / calls)
    return [statistics.median(taken) for taken in times]


def summary(table: Table) -> str:
    """How much the table's tiles gain, by kind."""
    lines = []
    for kind in KINDS:
        rows = [row for row in table.rows if kind_of(row) == kind]
        gains = [row["cublaslt_us"] / row["us"] for row in rows if row["tile"] is not None]
        if rows:
            most = f"{statistics.median(gains):.3f}, {max(gains):.3f}" if gains else ""
            lines.append((kind, str(len(rows)), str(len(gains)), most))
    names = Column("GEMMs"), Column("measured", right=True), Column("faster", right=True), Column("median, most")
    return tabulated(names, lines)


def problems(target: Target, shapes: Weights | None, tokens: Sequence[int], kinds: Iterable[str]) -> list[Problem]:
    """What is measured: those that some tile computes. Of `shapes` the GEMMs of each weight (None: the six models')."""
    found = [
        Problem(
            target, Sizes(*map({"m": m, "n": n, "k": k}.get, one.order)), one.gemm(), measured.out, measured.epilogue
        )
        for kind in kinds
        for measured in KINDS[kind]
        for weights in ([shapes] if shapes is not None else measured.weights)
        for one in measured.gemms
        for m in tokens
        for n, k in weights
    ]
    return [problem for problem in dict.fromkeys(found) if tiles(problem)]
