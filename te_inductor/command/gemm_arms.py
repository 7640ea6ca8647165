"""The ways to compute one low-precision GEMM that `te-inductor tune` times against each other: cuBLASLt, with a
generated kernel behind it where the problem is more than a product, and each tile of CUTLASS's.

A wgrad that adds to an fp32 total in place is timed against cuBLASLt's, which writes fp32, and a kernel that adds. A
GEMM that writes the FP8 copy of GELU of its sum is timed against the table's GEMM and the generated kernel behind it.
One that adds another tensor, a residual, is timed against the table's GEMM that does not and a kernel that moves 4 bytes
an element, as the norm behind it does that has to add. Operands are random: on zeros a power-limited card runs faster
than it ever will in training."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor import ops
from te_inductor.backend import te
from te_inductor.kernels.cutlass_tables import Table, choose_in
from te_inductor.kernels.cutlass_tiles import ROUNDED, Tile, operands, scope_of, tiles
from te_inductor.kernels.problem import ANOTHER, NOTHING, OUTPUT, Epilogue, Problem
from te_inductor.numerics.activation import Activation, Gating
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import BLOCK_1X128, BLOCK_128X128, ROW, SCOPES, TENSOR
from te_inductor.runtime.eager import dense
from te_inductor.templates.cutlass import launch

GELU = Activation((("mul", 0, 0.5), ("mul", 0, 0.7071067811865476), ("erf", 2), ("add", 3, 1.0), ("mul", 1, 4)))
# The gradients of gate and up, of the gradient of h = silu(gate) * up (value 0), gate and up.
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
ONE_ROW = Quantizer("e4m3", power_2_scale=True, scope=BLOCK_1X128.name)
# Relative, between two bf16 outputs of the same product; a wrong operand or scale is off by far more. And of FP8
# copies, of which two roundings to bf16 move a few.
ERROR, ERROR_OF_COPIES = 0.01, 0.03

Call = Callable[[], Any]
Way = tuple[Call, Callable[[Tile], Call], float]  # the library, a tile, and what the output holds before


def arms(p: Problem, table: Table, complain: Callable[[str], None]) -> dict[Tile | None, Call]:
    """The library (None) and the tiles whose result agrees with it; `complain` is told of those whose does not. A product
    that another kernel reads is computed as `table` says."""
    a, b = (
        (torch.randn(size, p.sizes.k, device="cuda", dtype=torch.float32) * 8).to(dtype)
        for size, dtype in zip((p.sizes.m, p.sizes.n), operands(p), strict=True)
    )
    scales, out = _scales(p), torch.empty(p.sizes.m, p.sizes.n, device="cuda", dtype=p.out)
    ways = {NOTHING: _writing, OUTPUT: _adding, ANOTHER: _adding_another}
    more = p.epilogue
    way = _quantizing if more.activation is not None else _gating if more.gating is not None else ways[more.added]
    library, cutlass, before = way(p, table, a, b, scales, out)
    reference = _read(library(), out).clone().float()
    if p.epilogue.added == OUTPUT and _scope(p) == ROW.name:  # which Inductor's kernel multiplies where it adds
        reference = reference * (scales[0] * scales[1])
    found: dict[Tile | None, Call] = {None: library}
    for tile in tiles(p):
        out.fill_(before)
        call = cutlass(tile)
        difference = torch.linalg.vector_norm(_read(call(), out).float() - reference)
        error = float(difference / torch.linalg.vector_norm(reference))
        if error <= (ERROR if p.epilogue.gating is None else ERROR_OF_COPIES):  # NaN is not
            found[tile] = call
        else:
            complain(f"wrong by {error:.3g}, left out: {tile} on {p}")
    return found


def _read(result: Any, out: Tensor) -> Tensor:
    """What an arm has made: what its row copy stands for where it makes two copies, a tensor of its own, or `out`."""
    if isinstance(result, tuple | list):
        return dense.dequantize(result[0], result[1], ONE_ROW, torch.float32)
    return out if result is None else result


def _scales(p: Problem) -> list[Tensor]:
    """The scales as `torch._scaled_mm` takes them."""
    across = p.sizes.k // 128
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        ROW.name: ((p.sizes.m, 1), (1, p.sizes.n)),
        BLOCK_1X128.name: ((across, p.sizes.m), (across, p.sizes.n)),
        BLOCK_128X128.name: ((across, p.sizes.m), (p.sizes.n // 128, across)),
    }
    a_scale, b_scale = (
        torch.rand(shape, device="cuda", dtype=torch.float32) + 0.5 for shape in shapes.get(_scope(p), ((), ()))
    )
    if SCOPES[_scope(p)].blocked:
        a_scale = a_scale.t()
    return [a_scale, b_scale.t() if _scope(p) == BLOCK_128X128.name else b_scale]


def _scope(p: Problem) -> str:
    scope = scope_of(p)
    assert scope is not None  # there are tiles
    return scope


def _kind(p: Problem) -> dict[str, Any]:
    """What every launch is told."""
    return {"arch": p.target.cutlass, "scope": _scope(p), "fast_accum": p.gemm.fast_accum}


def _writing(p: Problem, table: Table, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Way:
    given = {**_kind(p), "out": out}
    a_scale, b_scale = scales

    def library() -> Tensor:
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=p.out, use_fast_accum=p.gemm.fast_accum, out=out)

    return library, lambda tile: lambda: launch.scaled_mm(a, b.t(), *scales, tile=tile.shape, **given), float("nan")


def _quantizing(p: Problem, table: Table, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Way:
    """All in CUDA graphs, as a compiled function's guards take the host longer than the smallest GEMM the GPU."""
    y, scale, quantizer = _rounded(p), torch.full((), 64.0, device="cuda", dtype=torch.float32), Quantizer("e4m3")
    scales = [scales[0] / (64 * p.sizes.k**0.5), scales[1]]  # so that sums are about 1, where GELU bends
    write = _product(replace(p, out=ROUNDED, epilogue=Epilogue()), table, a, b, scales, y)
    cast = _compiled(lambda y, scale: ops.quantize_delayed(F.gelu(y), scale, quantizer))
    given = {**_kind(p), "steps": GELU.steps}

    def two() -> Tensor:
        write()
        return cast(y, scale)

    def one(tile: Tile) -> Call:
        return _captured(lambda: launch.quantized_mm(a, b.t(), *scales, scale, tile=tile.shape, out=out, **given))

    return _captured(two), one, 0.0


def _gating(p: Problem, table: Table, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Way:
    """Gate and up lie side by side, as one GEMM writes them."""
    y = _rounded(p)
    scales = [scales[0] / (64 * p.sizes.k**0.5), scales[1]]
    write = _product(replace(p, out=ROUNDED, epilogue=Epilogue()), table, a, b, scales, y)
    gate, up = torch.randn(p.sizes.m, 2 * p.sizes.n, device="cuda", dtype=ROUNDED).split(p.sizes.n, 1)
    stored = [scale.t().contiguous().flatten() for scale in scales]
    gemm, cast = Gemm("dgrad", False, (BLOCK_1X128.name, _scope(p))), _compiled(_swiglu_copies)

    def two() -> Any:
        write()
        return cast(y, gate, up)

    def one(tile: Tile) -> Call:
        given = (a, stored[0], b, stored[1], gate, up, gemm, SWIGLU, ONE_ROW, tile, table.arch)
        return _captured(lambda: launch.gated_gradient(*given))

    return _captured(two), one, 0.0


def _swiglu_copies(dh: Tensor, gate: Tensor, up: Tensor) -> Any:
    """Writes the gradient as a model's graph has it, for Dynamo looks into no `Gating`."""
    dh, gate, up = dh.float(), gate.float(), up.float()
    sigmoid = gate.sigmoid()
    values = dh * up * (sigmoid * (1 + gate * (1 - sigmoid))), dh * (gate * sigmoid)
    return ops.quantize_pieces([value.to(ROUNDED) for value in values], 1, ONE_ROW)


def _adding_another(p: Problem, table: Table, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Way:
    """All in CUDA graphs, as above. The residual's rows are alike, so that adding it takes 4 bytes an element and no
    6."""
    product, row = torch.empty_like(out), torch.randn(p.sizes.n, device="cuda", dtype=p.out) * 64 * p.sizes.k**0.5
    write = _product(replace(p, epilogue=Epilogue()), table, a, b, scales, product)
    c = row.expand(p.sizes.m, p.sizes.n).contiguous()
    given = {**_kind(p), "added": ANOTHER}
    add = _compiled(lambda product, row: product + row)

    def two() -> Tensor:
        write()
        return add(product, row)

    def one(tile: Tile) -> Call:
        return _captured(lambda: launch.scaled_mm(a, b.t(), *scales, c, tile=tile.shape, out=out, **given))

    return _captured(two), one, float("nan")


def _adding(p: Problem, table: Table, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Way:
    scope, arch = _scope(p), table.arch
    gemm, one = Gemm("wgrad", p.gemm.fast_accum, (scope, scope)), torch.ones((), device="cuda", dtype=torch.float32)
    product = out.zero_().clone()
    of_tensor = scales if scope == TENSOR.name else (one, one)  # no library scales rows of an fp32 output

    def library() -> Tensor:
        given: dict[str, Any] = {"out_dtype": p.out, "use_fast_accum": p.gemm.fast_accum, "out": product}
        return out.add_(torch._scaled_mm(a, b.t(), *of_tensor, **given))

    b_scale = scales[1].t() if scope == ROW.name else scales[1]
    return library, lambda tile: lambda: launch.add_scaled_mm(out, a, scales[0], b, b_scale, gemm, tile, arch), 0.0


def _rounded(p: Problem) -> Tensor:
    """The tensor of a product that a second kernel reads."""
    return torch.empty(p.sizes.m, p.sizes.n, device="cuda", dtype=ROUNDED)


def _product(p: Problem, table: Table, a: Tensor, b: Tensor, scales: list[Tensor], out: Tensor) -> Call:
    """A plain GEMM, as the table has it so far."""
    library, cutlass, _ = _writing(p, table, a, b, scales, out)
    tile = choose_in(p, table)
    return library if tile is None else cutlass(tile)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function by the backend, for these sizes alone."""
    torch._dynamo.reset()
    return torch.compile(function, backend=te, dynamic=False)


def _captured(call: Call) -> Call:
    """Records a call as a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return functools.partial(_replay, graph, result, call)


def _replay(graph: torch.cuda.CUDAGraph, result: Any, _: Call) -> Any:
    """The call that was captured is handed along, as it holds what the graph reads and writes."""
    graph.replay()
    return result
