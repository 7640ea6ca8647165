"""Times every CUTLASS tile against cuBLASLt and writes the table by which fp8 GEMMs are chosen.

    python -m benchmarks.tune_gemm --write
    python -m benchmarks.tune_gemm --models llama-3-70b --tokens 8192    # "table": what is chosen there as it stands

Shapes are those of the GEMMs of a layer, q, k, v and gate, up as one; of Llama-3-8B apart with one scale a row. A wgrad
that adds to an fp32 total in place ("output") is timed against cuBLASLt's, which writes fp32, and a kernel that adds;
there each weight has its own. A GEMM that writes the FP8 copy of GELU of its sum ("quantized") is timed against the
table's GEMM and the generated kernel behind it. One that adds another tensor, a residual ("another"), is timed against
the table's GEMM that does not and a kernel that moves 4 bytes an element, as the norm behind it does that has to add.
Operands are random: on zeros a power-limited card runs faster than it ever will in training. A tile is chosen where it
takes at most `GAIN` of cuBLASLt's time."""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, table
from te_inductor import ops
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import BLOCK_1X128, BLOCK_128X128, ROW, SCOPES, TENSOR
from te_inductor.runtime import eager
from te_inductor.runtime.activation import Activation, Gating
from te_inductor.templates.cutlass import build, launch, scaled_mm, versions
from te_inductor.templates.cutlass.scaled_mm import ANOTHER, NOTHING, OUTPUT, ROUNDED, TABLE, Problem, Tile, tiles

TOKENS = (2048, 4096, 8192, 16384)
LLAMA = "llama-3-8b"
MODELS = {  # N x K of each weight
    LLAMA: ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "llama-3.2-3b": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "qwen-2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "llama-2-13b": ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
APART = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336))  # of LLAMA
BLOCKS = "blocks"  # scales of them, which nothing is added to
QUANTIZED = "quantized"  # the output, with an activation
GATED = "gated"  # the gradients of a gated activation, both copies
MLPS = ((4096, 1024), (8192, 2048), (16384, 4096))  # N x K of the layer in front of the activation
GELU = Activation((("mul", 0, 0.5), ("mul", 0, 0.7071067811865476), ("erf", 2), ("add", 3, 1.0), ("mul", 1, 4)))
# Of the gradient of h = silu(gate) * up (value 0), gate and up: theirs.
SWIGLU = Gating(
    (
        ("sigmoid", 1),
        ("mul", 1, 3),
        ("mul", 0, 4),
        ("mul", 0, 2),
        ("sub", 1.0, 3),
        ("mul", 1, 7),
        ("add", 8, 1.0),
        ("mul", 3, 9),
        ("mul", 6, 10),
    ),
    (11, 5),
)
GAIN = 0.985
ARCH = "90"
ONE_ROW = Quantizer("e4m3", power_2_scale=True, scope=BLOCK_1X128.name)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Relative, between two bf16 outputs of the same product; a wrong operand or scale is off by far more. And of FP8
# copies, of which two roundings to bf16 move a few.
ERROR, ERROR_OF_COPIES = 0.01, 0.03


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="for plain GEMMs and blocks")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=5, help="arms take turns; the median round counts")
    parser.add_argument("--iters", type=int, default=10)
    kinds = [NOTHING, OUTPUT, ANOTHER, BLOCKS, QUANTIZED, GATED]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds, help="what is added, or what else differs")
    parser.add_argument("--write", action="store_true", help="into the package's table; rows not measured stay")
    parser.add_argument("--json", type=Path, default=Path("out/tune_gemm.json"))
    return parser.parse_args()


def problems(models: list[str], tokens: list[int], kinds: list[str]) -> list[Problem]:
    own = {NOTHING: plain, ANOTHER: residuals, BLOCKS: blocks, GATED: gated}
    of_all = {OUTPUT: totals, QUANTIZED: quantized}
    found = [of_all[kind](tokens) if kind in of_all else own[kind](model, tokens) for kind in kinds for model in models]
    return list(dict.fromkeys(problem for several in found for problem in several))


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """Of what was measured."""
    sizes = (row[name] for name in ("m", "n", "k", "scope", "fast_accum", "added"))
    return (*sizes, *(row.get(kind, False) for kind in (QUANTIZED, GATED)))


def kind_of(row: dict[str, Any]) -> str:
    for kind in (QUANTIZED, GATED):
        if row.get(kind, False):
            return kind
    return BLOCKS if SCOPES[row["scope"]].blocked and row["added"] == NOTHING else row["added"]


def quantized(tokens: list[int]) -> list[Problem]:
    """fprop of the layer in front of the activation."""
    kind = (TENSOR.name, False, True, NOTHING, GELU)
    return [Problem(ARCH, m, n, k, E4M3, E4M3, E4M3, *kind) for m in tokens for n, k in MLPS]


def blocks(model: str, tokens: list[int]) -> list[Problem]:
    """fprop and dgrad with square blocks of the weight, wgrad without."""
    square, one_row = BLOCK_128X128.name, BLOCK_1X128.name
    return [
        Problem(ARCH, *sizes, E4M3, E4M3, torch.bfloat16, scope, False, False)
        for m in tokens
        for n, k in MODELS[model]
        for sizes, scope in (((m, n, k), square), ((m, k, n), square), ((n, k, m), one_row))
    ]


def residuals(model: str, tokens: list[int]) -> list[Problem]:
    """fprop of o and down, with one scale a tensor and with square blocks of the weight."""
    return [
        Problem(ARCH, m, n, k, E4M3, E4M3, torch.bfloat16, scope, False, fast, ANOTHER)
        for scope, fast in ((TENSOR.name, True), (BLOCK_128X128.name, False))
        for m in tokens
        for n, k in MODELS[model]
        if n <= k
    ]


def gated(model: str, tokens: list[int]) -> list[Problem]:
    """dgrad of down, the last of a model's weights."""
    k, n = MODELS[model][-1]
    kind = (BLOCK_128X128.name, False, False)
    return [Problem(ARCH, m, n, k, E4M3, E4M3, E4M3, *kind, gating=SWIGLU) for m in tokens]


def totals(tokens: list[int]) -> list[Problem]:
    return [
        Problem(ARCH, n, k, m, E5M2 if scope == "tensor" else E4M3, E4M3, torch.float32, scope, False, False, OUTPUT)
        for scope in (TENSOR.name, ROW.name)
        for m in tokens
        for n, k in APART
    ]


def plain(model: str, tokens: list[int]) -> list[Problem]:
    """fprop accumulates fast; dgrad and wgrad split, as the recipes' defaults say."""
    formats = {TENSOR.name: E5M2, ROW.name: E4M3}  # of gradients: "current" and "delayed", "rowwise"
    return [
        Problem(ARCH, *sizes, a, E4M3, torch.bfloat16, scope, False, fast)
        for scope, grad in formats.items()
        for m in tokens
        for n, k in (APART if model == LLAMA and scope == ROW.name else MODELS[model])
        for sizes, a, fast in (((m, n, k), E4M3, True), ((m, k, n), grad, False), ((n, k, m), grad, False))
    ]


def time_us(calls: list[Callable[[], Any]], rounds: int, iters: int) -> list[float]:
    """Launches of one arm follow each other closely enough: the shortest kernel here takes as long as a launch."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(iters):
                call()
            end.record()
            end.synchronize()
            taken.append(1e3 * start.elapsed_time(end) / iters)
    return [statistics.median(taken) for taken in times]


def arms(p: Problem) -> dict[Tile | None, Callable[[], Any]]:
    """cuBLASLt (None) and the tiles whose result agrees with it."""
    a, b = ((torch.randn(size, p.k, device="cuda") * 8).to(dtype) for size, dtype in ((p.m, p.a), (p.n, p.b)))
    scales = _scales(p)
    out = torch.empty(p.m, p.n, device="cuda", dtype=p.out)
    ways = {NOTHING: _writing, OUTPUT: _adding, ANOTHER: _adding_another}
    how = _quantizing if p.activation is not None else _gating if p.gating is not None else ways[p.added]
    library, cutlass, before = how(p, a, b, scales, out)
    reference = _read(library(), out).clone()
    if p.added == OUTPUT and p.scope == "row":  # which Inductor's kernel multiplies where it adds
        reference = reference * (scales[0] * scales[1])
    found: dict[Tile | None, Callable[[], Any]] = {None: library}
    for tile in tiles(p):
        out.fill_(before)
        call = cutlass(tile)
        found_here = _read(call(), out)
        error = harness.relative_error(found_here.float(), reference.float())["relative"]
        if error <= (ERROR if p.gating is None else ERROR_OF_COPIES):  # NaN is not
            found[tile] = call
        else:
            print(f"WRONG by {error:.3g}: {tile} on {p}")
    return found


def _read(result: Any, out: Tensor) -> Tensor:
    """What an arm has made: `out`, or what its row copy stands for."""
    return eager.dequantize(*result[:2], ONE_ROW, torch.float32) if isinstance(result, tuple) else out


def _scales(p: Problem) -> list[Tensor]:
    """As `torch._scaled_mm` takes them."""
    across = p.k // 128
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        ROW.name: ((p.m, 1), (1, p.n)),
        BLOCK_1X128.name: ((across, p.m), (across, p.n)),
        BLOCK_128X128.name: ((across, p.m), (p.n // 128, across)),
    }
    a_scale, b_scale = (torch.rand(shape, device="cuda") + 0.5 for shape in shapes.get(p.scope, ((), ())))
    if SCOPES[p.scope].blocked:
        a_scale = a_scale.t()
    return [a_scale, b_scale.t() if p.scope == BLOCK_128X128.name else b_scale]


Arms = tuple[Callable[[], Any], Callable[[Tile], Callable[[], Any]], float]  # and what the output holds before


def _writing(p: Problem, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Arms:
    given = {"arch": p.arch, "scope": p.scope, "fast_accum": p.fast_accum, "out": out}

    def library() -> Tensor:
        return torch._scaled_mm(a, b.t(), *scales, out_dtype=p.out, use_fast_accum=p.fast_accum, out=out)

    return library, lambda tile: lambda: launch.scaled_mm(a, b.t(), *scales, tile=tile.shape, **given), float("nan")


def _quantizing(p: Problem, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Arms:
    """All in CUDA graphs, as a compiled function's guards take the host longer than the smallest GEMM the GPU."""
    wide, y = replace(p, out=ROUNDED, activation=None), torch.empty(p.m, p.n, device="cuda", dtype=ROUNDED)
    scales = [scales[0] / (64 * p.k**0.5), scales[1]]  # so that sums are about 1, where GELU bends
    library, cutlass, _ = _writing(wide, a, b, scales, y)
    tile, scale, quantizer = scaled_mm.choose(wide), torch.full((), 64.0, device="cuda"), Quantizer("e4m3")
    write = library if tile is None else cutlass(tile)
    torch._dynamo.reset()
    cast = torch.compile(lambda y, scale: ops.quantize_delayed(F.gelu(y), scale, quantizer), backend="te")
    given = {"arch": p.arch, "scope": p.scope, "fast_accum": p.fast_accum, "steps": GELU.steps, "out": out}

    def two() -> Tensor:
        write()
        return cast(y, scale)

    def one(tile: Tile) -> Callable[[], Any]:
        return _captured(lambda: launch.quantized_mm(a, b.t(), *scales, scale, tile=tile.shape, **given))

    return _captured(two), one, 0.0


def _gating(p: Problem, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Arms:
    """Gate and up lie side by side, as one GEMM writes them."""
    wide, y = replace(p, out=ROUNDED, gating=None), torch.empty(p.m, p.n, device="cuda", dtype=ROUNDED)
    scales = [scales[0] / (64 * p.k**0.5), scales[1]]
    library, cutlass, _ = _writing(wide, a, b, scales, y)
    gate, up = torch.randn(p.m, 2 * p.n, device="cuda", dtype=ROUNDED).split(p.n, 1)
    tile, stored = scaled_mm.choose(wide), [scale.t().contiguous().flatten() for scale in scales]
    write, gemm = library if tile is None else cutlass(tile), Gemm("dgrad", False, (BLOCK_1X128.name, p.scope))
    torch._dynamo.reset()
    cast = torch.compile(_swiglu_copies, backend="te", dynamic=False)

    def two() -> Any:
        write()
        return cast(y, gate, up)

    def one(tile: Tile) -> Callable[[], Any]:
        given = (a, stored[0], b, stored[1], gate, up, gemm, SWIGLU, ONE_ROW, tile, p.arch)
        return _captured(lambda: launch.gated_gradient(*given))

    return _captured(two), one, 0.0


def _swiglu_copies(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """As a model's graph has it, for Dynamo looks into no `Gating`."""
    dh, gate, up = dh.float(), gate.float(), up.float()
    sigmoid = gate.sigmoid()
    values = dh * up * (sigmoid * (1 + gate * (1 - sigmoid))), dh * (gate * sigmoid)
    return ops.quantize_pieces([value.to(ROUNDED) for value in values], 1, ONE_ROW)  # type: ignore[no-any-return]


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return functools.partial(_replay, graph, result, call)


def _replay(graph: torch.cuda.CUDAGraph, result: Any, _: Callable[[], Any]) -> Any:
    """The call that was captured is handed along, as it holds what the graph reads and writes."""
    graph.replay()
    return result


def _adding_another(p: Problem, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Arms:
    """All in CUDA graphs, as above. The residual's rows are alike, so that adding it takes 4 bytes an element and no
    6."""
    alone, product = replace(p, added=NOTHING), torch.empty_like(out)
    library, cutlass, before = _writing(alone, a, b, scales, product)
    tile, row = scaled_mm.choose(alone), torch.randn(p.n, device="cuda", dtype=p.out) * 64 * p.k**0.5
    write, c = library if tile is None else cutlass(tile), row.expand(p.m, p.n).contiguous()
    given = {"arch": p.arch, "scope": p.scope, "fast_accum": p.fast_accum, "added": ANOTHER, "out": out}
    torch._dynamo.reset()
    add = torch.compile(lambda product, row: product + row)

    def two() -> Tensor:
        write()
        return add(product, row)

    def one(tile: Tile) -> Callable[[], Any]:
        return _captured(lambda: launch.scaled_mm(a, b.t(), *scales, c, tile=tile.shape, **given))

    return _captured(two), one, before


def _adding(p: Problem, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Arms:
    gemm, one, product = (
        Gemm("wgrad", p.fast_accum, (p.scope, p.scope)),
        torch.ones((), device="cuda"),
        out.zero_().clone(),
    )
    of_tensor = scales if p.scope == "tensor" else (one, one)  # no library scales rows of an fp32 output

    def library() -> Tensor:
        given = {"out_dtype": p.out, "use_fast_accum": p.fast_accum, "out": product}
        return out.add_(torch._scaled_mm(a, b.t(), *of_tensor, **given))

    b_scale = scales[1].t() if p.scope == "row" else scales[1]
    return library, lambda tile: lambda: launch.add_scaled_mm(out, a, scales[0], b, b_scale, gemm, tile, p.arch), 0.0


def measure(p: Problem, args: argparse.Namespace) -> dict[str, Any]:
    found, named = arms(p), scaled_mm.choose(p)
    us = dict(zip(found, time_us(list(found.values()), args.rounds, args.iters), strict=True))
    library = us.pop(None)
    tile = min(us, key=lambda t: us[t], default=None)
    chosen = tile if tile is not None and us[tile] <= GAIN * library else None
    return {
        "m": p.m,
        "n": p.n,
        "k": p.k,
        "scope": p.scope,
        "fast_accum": p.fast_accum,
        "added": p.added,
        **({QUANTIZED: True} if p.activation is not None else {}),
        **({GATED: True} if p.gating is not None else {}),
        "tile": None if chosen is None else asdict(chosen),
        "us": None if tile is None else round(us[tile], 1),
        "cublaslt_us": round(library, 1),
        "named_us": round(library if named is None else us[named], 1),
        "all_us": {str(t): round(value, 1) for t, value in us.items()},
    }


def main() -> None:
    args = parse()
    asked = problems(args.models, args.tokens, args.kinds)
    build.start(p.kernel(tile) for p in asked for tile in tiles(p))
    environment, rows = harness.environment("cuda"), []
    for p in asked:
        rows.append(measure(p, args) | {"date": environment["date"][:10]})
        harness.write_json(args.json, {"environment": environment, "rows": rows})
    show(rows)
    if args.write:
        head = {
            "arch": ARCH,
            "device": environment["device"],
            "torch": environment["torch"],
        }
        head["packages"] = [" ".join(version.split()[:2]) for version in versions()]
        measured = {identity(row) for row in rows}
        kept = [row for row in scaled_mm.table()["rows"] if identity(row) not in measured]
        kept += [{key: value for key, value in row.items() if key not in ("all_us", "named_us")} for row in rows]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in kept)
        TABLE.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
        print(f"table: {TABLE}")


def show(rows: list[dict[str, Any]]) -> None:
    cells = [
        (
            f"{row['m']} x {row['n']} x {row['k']}",
            row["scope"],
            "fast" if row["fast_accum"] else "split",
            kind_of(row),
            f"{row['cublaslt_us']:.1f}",
            f"{2e-6 * row['m'] * row['n'] * row['k'] / row['cublaslt_us']:.0f}",
            min(row["all_us"], key=row["all_us"].get, default="-"),
            row["us"],
            None if row["us"] is None else f"{row['cublaslt_us'] / row['us']:.3f}",
            f"{row['cublaslt_us'] / row['named_us']:.3f}",
            "" if row["tile"] is None else "taken",
        )
        for row in rows
    ]
    head = ("M x N x K", "scales", "accumulation", "added to", "cuBLASLt us", "TF/s")
    columns = (*head, "best tile", "us", "over", "table: over", "")
    table.show("fp8 GEMM, CUTLASS over cuBLASLt", columns, cells)


if __name__ == "__main__":
    main()
