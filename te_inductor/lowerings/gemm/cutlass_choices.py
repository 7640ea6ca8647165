"""What multiplies where Inductor asks: its own choices for `aten._scaled_mm`, CUTLASS's kernels beside or instead of
them.

Inductor asks its choices handler, which is ours during a compile (choices.py). Without autotuning there is one answer:
the tuned table's where it names a tile, else cuBLASLt. Under max-autotune Inductor measures all. GEMMs of MXFP8 and
NVFP4, whose alpha and bias `aten._scaled_mm` does not take, are measured by `fastest`."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import lowerings
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.virtualized import V

from te_inductor import compat, targets
from te_inductor.kernels import cublaslt, cutlass, cutlass_tiles, fp8_small_m
from te_inductor.kernels.cutlass_tiles import Tile
from te_inductor.kernels.problem import ANOTHER, OUTPUT, Epilogue, Problem, Program, Sizes
from te_inductor.kernels.select import select
from te_inductor.numerics.scaled_products import ScaledProduct
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import BLOCK_1X128, BLOCK_128X128, ELEMENTS, ROW, SCOPES, TENSOR
from te_inductor.templates.cutlass import build, launch

aten = torch.ops.aten
_ELEMENTS = {element.dtype: element.name for element in ELEMENTS.values() if not element.coded}
OP = "scaled_mm"  # Inductor's name for what it asks about
# Generated code calls them by these names, also code that a compile cache returns: `lowerings.install` imports this
# module.
_SCALED = ExternKernelChoice(launch.scaled_mm, name="te_inductor_cutlass_scaled_mm")
QUANTIZED = ExternKernelChoice(launch.quantized_mm, name="te_inductor_cutlass_quantized_mm")
_MICROSCALED = ExternKernelChoice(launch.microscaled_mm, name="te_inductor_cutlass_microscaled_mm")
_LIBRARY = ExternKernelChoice(launch.library_mm, name="te_inductor_cublaslt_microscaled_mm")


def extend(choices: list[Any], kernel_inputs: Any, overrides: dict[str, dict[str, Any]] | None) -> list[Any]:
    """`choices` for one `aten._scaled_mm`, with CUTLASS's."""
    problem = _problem_of_inputs(kernel_inputs, overrides or {})
    if problem is None or not choices:
        return choices
    choice = select(problem)
    if choice.family is cublaslt.FAMILY or cutlass.computes(problem) is not None:
        return choices
    bind = functools.partial(_bind, _SCALED, problem, kernel_inputs.nodes(), choices[0].layout)
    tiles = cutlass_tiles.tiles(problem) if choice.kernel is None else [choice.config]
    build.start(cutlass_tiles.kernel(problem, tile) for tile in tiles)
    ours = [bind(tile, fast_accum=problem.gemm.fast_accum) for tile in tiles]
    return [*choices, *ours] if choice.kernel is None else ours


def problem_of(
    a: ir.TensorBox,  # (M, K)
    b: ir.TensorBox,  # (N, K)
    bias: ir.TensorBox | None,  # (N,)
    gemm: Gemm,
    out: torch.dtype,
    **more: Any,  # of an `Epilogue`
) -> Problem:
    """What a GEMM of Inductor's IR computes."""
    known, packed = V.graph.sizevars, gemm.packed
    rows = a.get_size()[0]
    m, n, k = (_number(size) for size in (rows, b.get_size()[0], a.get_size()[1] * packed))
    at_most = fp8_small_m.at_most(
        lambda most: known.statically_known_leq(rows, most) and known.statically_known_geq(rows, 1)
    )
    sizes, epilogue = Sizes(m, n, k, at_most=at_most), Epilogue(bias is not None, **more)
    return Problem(targets.of(a.get_device_or_error()), sizes, gemm, out, epilogue, _program())


def _program() -> Program:
    """What the user asked Inductor for."""
    return Program(bool(config.max_autotune or config.max_autotune_gemm), V.graph.cpp_wrapper)


def accumulating(
    total: ir.TensorBox,  # (N, K) fp32
    a: ir.TensorBox,  # (N, M), or more rows
    b: ir.TensorBox,  # (K, M)
    gemm: Gemm,
) -> tuple[Tile, str] | None:
    """The tile, and its architecture, of the GEMM that adds to `total` in its epilogue; None where the table has none.
    Under max-autotune too: measuring would add."""
    problem = problem_of(a, b, None, gemm, total.get_dtype(), added=OUTPUT)
    choice = select(replace(problem, sizes=replace(problem.sizes, m=_number(total.get_size()[0]))))
    if choice.kernel is None:
        return None
    build.start([choice.kernel])
    return choice.config, choice.kernel.arch


def adding(
    product: ScaledProduct,  # its scales as `launch.scaled_mm` takes them
    bias: ir.TensorBox | None,  # (N,)
    added: ir.TensorBox,  # (M, N), of the output's dtype
) -> ir.TensorBox | None:  # (M, N)
    """The GEMM that adds a tensor in its epilogue; None where the table has no tile. Under max-autotune too, which does
    not see what the kernel behind it saves."""
    out = added.get_dtype()
    if bias is not None and bias.get_dtype() != out:
        return None
    problem = problem_of(product.a, product.b, bias, product.gemm, out, added=ANOTHER)
    return with_more(_SCALED, problem, product[:4], [*those(bias), added], added=ANOTHER)


def those(bias: ir.TensorBox | None) -> list[ir.TensorBox]:
    return [] if bias is None else [bias]


def with_more(
    choice: ExternKernelChoice,
    problem: Problem,
    operands: Sequence[ir.TensorBox],  # a, a_scale, b, b_scale
    rest: list[ir.TensorBox],  # what else is read
    **more: Any,  # what the launch takes
) -> ir.TensorBox | None:
    """The GEMM that does more in its epilogue, in the table's tile."""
    a, a_scale, b, b_scale = operands
    chosen, sizes, fast = select(problem), problem.sizes, problem.gemm.fast_accum
    if chosen.kernel is None:
        return None
    columns = ir.ExternKernel.realize_input(lowerings[aten.permute](b, [1, 0]))
    if _numbers(columns.get_stride()) != (1, sizes.k):
        return None
    build.start([chosen.kernel])
    nodes = [_contiguous(a), columns, *_scales(a_scale, b_scale, chosen.kernel.scope), *map(_contiguous, rest)]
    layout = ir.FixedLayout(a.get_device_or_error(), problem.out, [sizes.m, sizes.n])
    return _bind(choice, problem, nodes, layout, chosen.config, fast_accum=fast, **more).output_node()  # type: ignore[no-any-return]


def _scales(a_scale: ir.TensorBox, b_scale: ir.TensorBox, scope: str) -> list[Any]:
    """Puts scales in memory as `launch.scaled_mm` wants them."""
    if not SCOPES[scope].blocked:
        return [_contiguous(a_scale), _contiguous(b_scale)]
    orders = [0, 1], ([0, 1] if scope == BLOCK_128X128.name else [1, 0])  # 0 for the contiguous dimension
    realized = map(ir.ExternKernel.realize_input, (a_scale, b_scale))
    return [ir.ExternKernel.require_stride_order(x, order) for x, order in zip(realized, orders, strict=True)]


def _contiguous(x: Any) -> Any:
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))


def microscaled(
    a: ir.TensorBox,  # (M, K), or (M, K/2) of two a byte
    b: ir.TensorBox,
    bias: ir.TensorBox | None,
    gemm: Gemm,
    out_dtype: torch.dtype,
) -> Problem | None:
    """What is measured; None where nothing is, or no kernel of ours computes it."""
    if bias is not None and bias.get_dtype() != out_dtype:
        return None
    problem = problem_of(a, b, bias, gemm, out_dtype)
    measured = select(problem).family is cublaslt.AUTOTUNED and cutlass.computes(problem) is None
    return problem if measured and cutlass_tiles.tiles(problem) else None


def fastest(
    problem: Problem,
    operands: list[ir.TensorBox],  # as `launch.microscaled_mm` takes them
) -> ir.TensorBox:  # (M, N)
    """What Inductor measures to be the fastest of cuBLASLt and CUTLASS's tiles."""
    nodes = [_contiguous(x) for x in operands]
    layout = ir.FixedLayout(nodes[0].get_device_or_error(), problem.out, [problem.sizes.m, problem.sizes.n])
    tiles = cutlass_tiles.tiles(problem)
    build.start(cutlass_tiles.kernel(problem, tile) for tile in tiles)
    choices = [_LIBRARY.bind(nodes, layout, scope=cutlass_tiles.scope_of(problem))]
    choices += [_bind(_MICROSCALED, problem, nodes, layout, tile) for tile in tiles]
    return compat.autotune(_MICROSCALED.name, choices, nodes, layout)


def _bind(choice: ExternKernelChoice, problem: Problem, nodes: Any, layout: Any, tile: Tile, **given: Any) -> Any:
    arch, scope = problem.target.cutlass, cutlass_tiles.scope_of(problem)
    return choice.bind(nodes, layout, tile=tile.shape, arch=arch, scope=scope, **given)


def _problem_of_inputs(kernel_inputs: Any, overrides: dict[str, dict[str, Any]]) -> Problem | None:
    """The problem of an `aten._scaled_mm`; None where the sizes are symbolic, or an operand is laid out, scaled or
    typed as no kernel of ours takes it."""
    a, b, a_scale, b_scale, *bias = kernel_inputs.nodes()
    sizes = [_numbers(x.get_size()) for x in (a, b, a_scale, b_scale)]
    strides = [_numbers(x.get_stride()) for x in (a, b, a_scale, b_scale)]
    fast = [given["use_fast_accum"] for given in overrides.values() if "use_fast_accum" in given]
    if any(numbers is None for numbers in (*sizes, *strides)) or not fast:
        return None
    (m, k), (_, n), a_of, b_of = sizes  # type: ignore[misc]
    if strides[:2] != [(k, 1), (1, k)]:
        return None
    blocks = BLOCK_1X128.blocks(m, k)[1]
    if (a_of, b_of) == ((m, 1), (1, n)):
        scopes = (ROW.name, ROW.name)
    elif (a_of, b_of) in (((), ()), ((1, 1), (1, 1))):
        scopes = (TENSOR.name, TENSOR.name)
    elif (a_of, b_of, *strides[2:]) == ((m, blocks), (blocks, n), (1, m), (n, 1)):
        scopes = (BLOCK_1X128.name, BLOCK_1X128.name)
    elif (a_of, b_of, *strides[2:]) == ((m, blocks), (blocks, -(-n // 128)), (1, m), (1, blocks)):
        scopes = (BLOCK_1X128.name, BLOCK_128X128.name)
    else:
        return None
    out = kernel_inputs.out_dtype()
    if bias and bias[0].get_dtype() != out:
        return None
    dtypes = a.get_dtype(), b.get_dtype()
    if not _ELEMENTS.keys() >= set(dtypes):
        return None
    elements = _ELEMENTS[dtypes[0]], _ELEMENTS[dtypes[1]]
    gemm = Gemm("fprop", bool(fast[0]), scopes, elements)  # any: which one it is, is nothing to the kernel
    return Problem(targets.of(kernel_inputs.device()), Sizes(m, n, k), gemm, out, Epilogue(bool(bias)), _program())


def _numbers(sizes: Any) -> tuple[int, ...] | None:
    numbers = tuple(map(_number, sizes))
    return None if None in numbers else numbers  # type: ignore[return-value]


def _number(size: Any) -> int | None:
    return int(size) if isinstance(size, int) or getattr(size, "is_Integer", False) else None
