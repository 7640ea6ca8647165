"""Compiles CUTLASS's kernels of one architecture, in the environment that `build.environment` gives:

    python -m tests.offline.cutlass_kernels KERNELS OUT

KERNELS is JSON; OUT/0.o, 1.o, … are what the compiler made. Each launch is compared with that of quack's own host code,
argument by argument, and the order of scales with quack's.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from quack.blockscaled.quantize import pack_scale_2d_to_blocked_contig
from quack.epilogue.ops import Scalar
from quack.gemm_runtime.host import run_gemm_epi_plan
from torch import Tensor

from te_inductor.kernels.cutlass_tiles import ANOTHER, OUTPUT, ROUNDED, Kernel, Tile
from te_inductor.numerics.activation import Gating
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import BLOCK_1X128, BLOCK_128X128, SCOPES, Scope
from te_inductor.templates.cutlass import build, builder, launch
from tests.offline.tensor_cores import unswizzled

M, N, K = 272, 400, 544  # no tile divides them


def main(kernels: list[Kernel], out: Path) -> None:
    for number, kernel in enumerate(kernels):
        compiled = builder.compiled_function(kernel)
        compiled.export_to_c(object_file_path=str(out / f"{number}.o"), function_name=build.FUNCTION)
        if kernel.gating is not None:
            check_launch_of_gating(kernel)
            continue
        if kernel.scope in (BLOCK_1X128.name, BLOCK_128X128.name):
            check_launch_of_blocks(kernel)
            continue
        ours, theirs = launches(kernel, builder.plan(kernel))
        assert described(ours) == described(theirs), kernel
    check_order_of_scales()


def launches(kernel: Kernel, plan: Any) -> tuple[Any, Any]:
    """The arguments with which our code and quack's call the kernel."""
    out = torch.empty(M, N, dtype=getattr(torch, kernel.out))
    a, b = (builder.empty((rows, K), getattr(torch, name)) for rows, name in ((M, kernel.a), (N, kernel.b)))
    bias = torch.zeros(N, dtype=out.dtype if kernel.activation is None else ROUNDED) if kernel.bias else None
    c = torch.zeros(M, N, dtype=out.dtype) if kernel.added == ANOTHER else None
    tile = (kernel.tile_m, kernel.tile_n, kernel.cluster_m, kernel.cluster_n, kernel.pingpong, 8)
    given = {"tile": tile, "arch": kernel.arch, "scope": kernel.scope, "out": out}
    values: dict[str, Any] = {} if bias is None else {"bias": bias.view(1, -1)}
    scales: dict[str, Any] = {}
    if SCOPES[kernel.scope].microscaled:
        operands, factors, scales = microscaled(SCOPES[kernel.scope], a, b)
        call = functools.partial(launch.microscaled_mm, *operands, *([] if bias is None else [bias]), **given)
    else:
        factors = {name: torch.ones(size) for name, size in (("a_scale", (M, 1)), ("b_scale", (1, N)))}
        if kernel.scope == "tensor":
            factors = {name: torch.ones(()) for name in factors}
        if kernel.added == OUTPUT:
            gemm = Gemm("wgrad", kernel.fast_accum, (kernel.scope, kernel.scope))
            a_scale, b_scale = (factor.view(-1, 1) if factor.dim() else factor for factor in factors.values())
            call = functools.partial(launch.add_scaled_mm, out, a, a_scale, b, b_scale, gemm, Tile(*tile), kernel.arch)
        elif kernel.activation is not None:
            factors["scale"] = torch.ones(())
            given |= {"fast_accum": kernel.fast_accum, "steps": kernel.activation}
            call = functools.partial(
                launch.quantized_mm, a, b.t(), *factors.values(), *([] if bias is None else [bias]), **given
            )
        else:
            rest = [tensor for tensor in (bias, c) if tensor is not None]
            given |= {"fast_accum": kernel.fast_accum, "added": kernel.added}
            call = functools.partial(launch.scaled_mm, a, b.t(), *factors.values(), *rest, **given)
    values |= {name: factor.view(1, -1) if factor.dim() else factor for name, factor in factors.items()}
    theirs: list[Any] = []
    watched = plan._replace(compiled_fn=lambda *call: theirs.append(call))
    with mock.patch.object(Scalar, "_validate_pointer_value", lambda *_: None):  # that it is on a GPU
        run_gemm_epi_plan(watched, a, b, out, c, values, **scales)
    return recorded(call, plan.max_active_clusters * plan.cluster_M * plan.cluster_N), theirs[0]


def check_launch_of_blocks(kernel: Kernel) -> None:
    """Our own kernel's arguments, as it has them, from those of `torch._scaled_mm`."""
    a, b = (builder.empty((rows, K), getattr(torch, name)) for rows, name in ((M, kernel.a), (N, kernel.b)))
    out, across, down = torch.empty(M, N, dtype=getattr(torch, kernel.out)), -(-K // 128), -(-N // 128)
    square = kernel.scope == BLOCK_128X128.name
    scales = torch.empty(across, M).t(), (torch.empty(down, across).t() if square else torch.empty(across, N))
    tile = (kernel.tile_m, kernel.tile_n, kernel.cluster_m, kernel.cluster_n, kernel.pingpong, 8)
    given = {"tile": tile, "arch": kernel.arch, "scope": kernel.scope, "fast_accum": False, "out": out}
    rest = [torch.empty_like(out)] if kernel.added == ANOTHER else []
    call = functools.partial(launch.scaled_mm, a, b.t(), *scales, *rest, **given, added=kernel.added)
    clusters, c = 132 // (kernel.cluster_m * kernel.cluster_n), (*rest, None)[0]
    assert described(recorded(call, 132)) == described((a, b, out, c, scales[0].t(), scales[1], clusters, 8))


def check_launch_of_gating(kernel: Kernel) -> None:
    """Scales of one row lie beside those of other rows, as they are stored; those of square blocks are transposed."""
    m, n, k = 1024, 768, 512
    a, b = (builder.empty((rows, k), getattr(torch, name)) for rows, name in ((m, kernel.a), (n, kernel.b)))
    gate, up = torch.empty(m, 2 * n, dtype=torch.bfloat16).split(n, 1)
    a_scale, b_scale = torch.empty(k // 128 * m), torch.empty(n // 128 * (k // 128))
    gemm, gating = Gemm("dgrad", False, (BLOCK_1X128.name, BLOCK_128X128.name)), Gating(*kernel.gating)  # type: ignore[misc]
    element = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[kernel.out]
    quantizer = Quantizer(element, power_2_scale=True, scope=BLOCK_1X128.name)
    tile = Tile(kernel.tile_m, kernel.tile_n, kernel.cluster_m, kernel.cluster_n, kernel.pingpong, 8)
    given = (a, a_scale, b, b_scale, gate, up, gemm, gating, quantizer, tile, kernel.arch)
    made: list[Any] = []
    call = recorded(lambda: made.extend(launch.gated_gradient(*given)), 132)
    assert described(call[:4]) == described((a, b, gate, up))
    shapes = [tuple(made_of.shape) for made_of in call[4:8]]
    assert shapes == [(m, 2 * n), (2 * n, m), (2 * n // 128, m), (m // 128, 2 * n)]
    assert all(made_of.is_contiguous() for made_of in call[4:8])
    assert [x.data_ptr() for x in made] == [call[place].data_ptr() for place in (4, 6, 5, 7)]
    scales = a_scale.view(k // 128, m), b_scale.view(n // 128, k // 128).t()
    assert described(call[8:]) == described((*scales, 132 // (kernel.cluster_m * kernel.cluster_n), 8))


def microscaled(scope: Scope, a: Tensor, b: Tensor) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Operands as Inductor has them, bytes and swizzled scales; alpha; scales as quack has them."""
    across = -(-K // scope.block[1] // 4)
    flat = [builder.empty((-(-rows // 128) * across * 512,), scope.scale.library) for rows in (M, N)]
    blocks = (scale.view(-1, across, 32, 4, 4) for scale in flat)
    alpha = {"alpha": torch.ones(())} if scope.two_level else {}
    operands = [a.view(torch.uint8), b.view(torch.uint8)] if scope.two_level else [a, b]
    operands += [scale.view(scope.scale.dtype) for scale in flat]
    return [*operands, *alpha.values()], alpha, dict(zip(("SFA", "SFB"), blocks, strict=True))


def recorded(function: Callable[[], Any], multiprocessors: int) -> Any:
    calls: list[Any] = []
    with (
        mock.patch.object(launch, "_function", lambda *_: lambda *call: calls.append(call)),
        mock.patch("te_inductor.targets.multiprocessors", lambda device: multiprocessors),
    ):
        function()
    return calls[0]


def described(argument: Any) -> Any:
    """Describes for comparisons: where a tensor lies and what it is, the value of a number, whatever type holds it."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), argument.dtype, tuple(argument.shape), argument.stride()
    if isinstance(argument, tuple):
        return tuple(described(part) for part in argument)
    return getattr(argument, "value", argument)


def check_order_of_scales() -> None:
    """Note [Swizzled scales], written down once more in tensor_cores.py, is quack's order."""
    rows, blocks = 200, 10
    scale = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
    packed = pack_scale_2d_to_blocked_contig(scale)
    assert packed.numel() == 256 * 12
    assert torch.equal(unswizzled(packed.flatten(), rows, blocks).to(torch.uint8), scale)


if __name__ == "__main__":
    main([Kernel(**fields) for fields in json.loads(sys.argv[1])], Path(sys.argv[2]))
