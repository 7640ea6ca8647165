"""What multiplies where Inductor asks: its own choices for `aten._scaled_mm`, CUTLASS's kernels beside or instead of
them.

Inductor asks its choices handler, which is ours during a compile (choices.py). Without autotuning there is one answer:
the tuned table's where it names a tile, else cuBLASLt. Under max-autotune Inductor measures all. GEMMs of MXFP8 and
NVFP4, whose alpha and bias `aten._scaled_mm` does not take, are measured by `fastest`."""

import functools
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.virtualized import V

from te_inductor import compat
from te_inductor.passes.graph.gemm_nodes import measures, scope_of
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import BLOCK_1X128, BLOCK_128X128, E2M1, ROW, SCOPES, TENSOR, Scope
from te_inductor.runtime import small_m
from te_inductor.runtime.activation import Activation
from te_inductor.templates.cutlass import build, launch
from te_inductor.templates.cutlass import scaled_mm as template
from te_inductor.templates.cutlass.scaled_mm import ANOTHER, NOTHING, OUTPUT, Problem, Tile

aten = torch.ops.aten
OP = "scaled_mm"  # Inductor's name for what it asks about
# Generated code calls them by these names, also code that a compile cache returns: `lowerings.install` imports this
# module.
_SCALED = ExternKernelChoice(launch.scaled_mm, name="te_inductor_cutlass_scaled_mm")
_QUANTIZED = ExternKernelChoice(launch.quantized_mm, name="te_inductor_cutlass_quantized_mm")
_MICROSCALED = ExternKernelChoice(launch.microscaled_mm, name="te_inductor_cutlass_microscaled_mm")
_LIBRARY = ExternKernelChoice(launch.library_mm, name="te_inductor_cublaslt_microscaled_mm")


def extend(choices: list[Any], kernel_inputs: Any, overrides: dict[str, dict[str, Any]] | None) -> list[Any]:
    """`choices` for one `aten._scaled_mm`, with CUTLASS's."""
    arch = _architecture(kernel_inputs.device())
    problem = None if arch is None else _problem(arch, kernel_inputs, overrides or {})
    if problem is None or not choices:
        return choices
    bind = functools.partial(_bind, _SCALED, problem, kernel_inputs.nodes(), choices[0].layout)
    chosen = template.choose(problem)
    tiles = template.tiles(problem) if measures() else [chosen] if chosen else []
    build.start(problem.kernel(tile) for tile in tiles)
    ours = [bind(tile, fast_accum=problem.fast_accum) for tile in tiles]
    return [*choices, *ours] if measures() else ours or choices


def accumulating(
    total: ir.TensorBox,  # (N, K) fp32
    a: ir.TensorBox,  # (N, M), or more rows
    b: ir.TensorBox,  # (K, M)
    gemm: Gemm,
) -> tuple[Tile, str] | None:
    """The tile, and its architecture, of the GEMM that adds to `total` in its epilogue; None where the table has none.
    Under max-autotune too: measuring would add."""
    arch = _architecture(total.get_device_or_error())
    sizes = _numbers([*total.get_size(), a.get_size()[1]])
    if arch is None or sizes is None:
        return None
    (m, n, k), scope = sizes, gemm.scopes[0]
    dtypes = a.get_dtype(), b.get_dtype(), total.get_dtype()
    problem = Problem(arch, m, n, k, *dtypes, scope, False, gemm.fast_accum, OUTPUT)
    tile = template.choose(problem)
    if tile is None:
        return None
    build.start([problem.kernel(tile)])
    return tile, arch


def adding(
    a: ir.TensorBox,  # (M, K)
    a_scale: ir.TensorBox,  # as `launch.scaled_mm` takes them
    b: ir.TensorBox,  # (N, K)
    b_scale: ir.TensorBox,
    bias: ir.TensorBox | None,  # (N,)
    added: ir.TensorBox,  # (M, N), of the output's dtype
    gemm: Gemm,
) -> ir.TensorBox | None:  # (M, N)
    """The GEMM that adds a tensor in its epilogue; None where the table has no tile. Under max-autotune too, which does
    not see what the kernel behind it saves."""
    operands, rest = (a, a_scale, b, b_scale), [*_those(bias), added]
    return _with_more(_SCALED, operands, rest, bias, gemm, added.get_dtype(), added=ANOTHER)


def quantizing(
    a: ir.TensorBox,  # as above
    a_scale: ir.TensorBox,
    b: ir.TensorBox,
    b_scale: ir.TensorBox,
    bias: ir.TensorBox | None,
    activation: Activation,
    scale: ir.TensorBox,  # (), of the copy
    gemm: Gemm,
    out: torch.dtype,  # FP8
) -> ir.TensorBox | None:  # (M, N)
    """The GEMM that writes the quantized activation of its sum; None where the table has no tile. Under max-autotune
    too."""
    operands, rest = (a, a_scale, b, b_scale), [scale, *_those(bias)]
    return _with_more(_QUANTIZED, operands, rest, bias, gemm, out, activation=activation)


def of_few_rows(a: ir.TensorBox, b: ir.TensorBox, gemm: Gemm) -> small_m.Config | None:
    """How the kernel for few rows cuts ``a @ b.T``, if it takes it."""
    (m, _), sizes, known = a.get_size(), _numbers(b.get_size()), V.graph.sizevars
    if sizes is None or V.graph.cpp_wrapper:
        return None
    most = small_m.at_most(lambda rows: known.statically_known_leq(m, rows) and known.statically_known_geq(m, 1))
    return small_m.choose(a.get_device_or_error(), most, sizes, (a.get_dtype(), b.get_dtype()), gemm)


def _those(bias: ir.TensorBox | None) -> list[ir.TensorBox]:
    return [] if bias is None else [bias]


def _with_more(
    choice: ExternKernelChoice,
    operands: tuple[ir.TensorBox, ...],  # a, a_scale, b, b_scale
    rest: list[ir.TensorBox],  # what else is read
    bias: ir.TensorBox | None,
    gemm: Gemm,
    out: torch.dtype,
    added: str = NOTHING,
    activation: Activation | None = None,
) -> ir.TensorBox | None:
    """The GEMM that does more in its epilogue, in the table's tile."""
    a, a_scale, b, b_scale = operands
    arch, wide = _architecture(a.get_device_or_error()), out if activation is None else template.ROUNDED
    sizes = _numbers([a.get_size()[0], b.get_size()[0], a.get_size()[1]])
    if arch is None or sizes is None or (bias is not None and bias.get_dtype() != wide):
        return None
    (m, n, k), dtypes = sizes, (a.get_dtype(), b.get_dtype())
    scope, has_bias = scope_of(gemm, k), bias is not None
    if scope is None:
        return None
    problem = Problem(arch, m, n, k, *dtypes, out, scope, has_bias, gemm.fast_accum, added, activation)
    tile = template.choose(problem)
    if tile is None:
        return None
    columns = ir.ExternKernel.realize_input(lowerings[aten.permute](b, [1, 0]))
    if _numbers(columns.get_stride()) != (1, k):
        return None
    build.start([problem.kernel(tile)])
    nodes = [_contiguous(a), columns, *_scales(a_scale, b_scale, scope), *map(_contiguous, rest)]
    layout = ir.FixedLayout(a.get_device_or_error(), out, [m, n])
    more: dict[str, Any] = {"added": added} if activation is None else {"steps": activation.steps}
    return _bind(choice, problem, nodes, layout, tile, fast_accum=gemm.fast_accum, **more).output_node()  # type: ignore[no-any-return]


def _scales(a_scale: ir.TensorBox, b_scale: ir.TensorBox, scope: str) -> list[Any]:
    """In memory as `launch.scaled_mm` wants them."""
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
    scope: Scope,
    out_dtype: torch.dtype,
) -> Problem | None:
    """What is measured; None where nothing is, or no kernel of ours computes it."""
    arch = _architecture(a.get_device_or_error()) if measures() else None
    sizes = _numbers([a.get_size()[0], b.get_size()[0], a.get_size()[1]])
    if arch is None or sizes is None or (bias is not None and bias.get_dtype() != out_dtype):
        return None
    (m, n, k), dtypes = sizes, (a.get_dtype(), b.get_dtype())
    if scope.two_level:
        k, dtypes = k * E2M1.packed, (E2M1.library, E2M1.library)
    problem = Problem(arch, m, n, k, *dtypes, out_dtype, scope.name, bias is not None, fast_accum=False)
    return problem if template.tiles(problem) else None


def fastest(
    problem: Problem,
    operands: list[ir.TensorBox],  # as `launch.microscaled_mm` takes them
) -> ir.TensorBox:  # (M, N)
    """What Inductor measures to be the fastest of cuBLASLt and CUTLASS's tiles."""
    nodes = [_contiguous(x) for x in operands]
    layout = ir.FixedLayout(nodes[0].get_device_or_error(), problem.out, [problem.m, problem.n])
    tiles = template.tiles(problem)
    build.start(problem.kernel(tile) for tile in tiles)
    choices = [_LIBRARY.bind(nodes, layout, scope=problem.scope)]
    choices += [_bind(_MICROSCALED, problem, nodes, layout, tile) for tile in tiles]
    return compat.autotune(_MICROSCALED.name, choices, nodes, layout)


def _architecture(device: torch.device) -> str | None:
    return None if V.graph.cpp_wrapper or device.type != "cuda" else template.architecture(device)


def _bind(choice: ExternKernelChoice, problem: Problem, nodes: Any, layout: Any, tile: Tile, **given: Any) -> Any:
    return choice.bind(nodes, layout, tile=tile.shape, arch=problem.arch, scope=problem.scope, **given)


def _problem(arch: str, kernel_inputs: Any, overrides: dict[str, dict[str, Any]]) -> Problem | None:
    """None where the sizes are symbolic, or an operand is laid out, scaled or typed as no kernel of ours takes it."""
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
        scope = ROW.name
    elif (a_of, b_of) == ((), ()):
        scope = TENSOR.name
    elif (a_of, b_of, *strides[2:]) == ((m, blocks), (blocks, n), (1, m), (n, 1)):
        scope = BLOCK_1X128.name
    elif (a_of, b_of, *strides[2:]) == ((m, blocks), (blocks, -(-n // 128)), (1, m), (1, blocks)):
        scope = BLOCK_128X128.name
    else:
        return None
    out = kernel_inputs.out_dtype()
    if bias and bias[0].get_dtype() != out:
        return None
    return Problem(arch, m, n, k, a.get_dtype(), b.get_dtype(), out, scope, bool(bias), bool(fast[0]))


def _numbers(sizes: Any) -> tuple[int, ...] | None:
    if not all(isinstance(size, int) or getattr(size, "is_Integer", False) for size in sizes):
        return None
    return tuple(int(size) for size in sizes)
