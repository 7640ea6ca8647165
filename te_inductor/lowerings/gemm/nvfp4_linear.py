"""Products with a stored NVFP4 weight: the kernels' partial sums, added up where the result is read."""

import functools

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from te_inductor import compat, targets
from te_inductor.kernels import nvfp4_fp8
from te_inductor.kernels import nvfp4_linear as policy
from te_inductor.kernels.problem import Sizes
from te_inductor.lowerings.gemm.partial_sums import added_up, called
from te_inductor.lowerings.registry import lowering
from te_inductor.ops import nvfp4_store
from te_inductor.ops import stored as ops_stored

aten = torch.ops.aten


@lowering(ops_stored.nvfp4_linear)
def nvfp4_linear(
    x: ir.TensorBox,  # (M, K)
    stored: ir.TensorBox,  # (N, K/2)
    block_scale: ir.TensorBox,  # (N, K/16)
    tensor_scale: ir.TensorBox,  # ()
    out_dtype: torch.dtype,
) -> ir.TensorBox:  # (M, N)
    device = x.get_device_or_error()
    if device.type != "cuda":
        return called(ops_stored.nvfp4_linear, x, stored, block_scale, tensor_scale, out_dtype)
    from te_inductor.templates.triton import stored_ops

    (m, k), n = x.get_size(), stored.get_size()[0]
    sizes = [compat.size_hint(V.graph.sizevars, size) for size in (m, n, k)]
    config = policy.configured(policy.problem(targets.of(device), Sizes(*sizes), x.get_dtype(), out_dtype))
    if config is None:
        return called(ops_stored.nvfp4_linear, x, stored, block_scale, tensor_scale, out_dtype)
    given = (_ARRANGED[config.kind](x), stored, block_scale, tensor_scale, config, out_dtype)
    return added_up(stored_ops.partial_sums, *given, splits=config.splits, out_dtype=out_dtype)


# x in the order of each kernel, as part of the kernel that makes x.


def _planes(x: ir.TensorBox) -> ir.TensorBox:
    m, k = x.get_size()
    x = lowerings[aten.permute](lowerings[aten.view](x, [m, k // 16, 4, 4]), [0, 2, 1, 3])
    x = lowerings[aten.clone](x, memory_format=torch.contiguous_format)
    return lowerings[aten.view](x, [m, 4, k // 4])  # type: ignore[no-any-return]


def _fragments(x: ir.TensorBox) -> ir.TensorBox:
    m, k = x.get_size()
    if m == 1:
        return x
    # The copy goes over rows first, as a norm does, so that it becomes part of its kernel.
    x = lowerings[aten.view](x, [m, k // 128, 4, 4, 8])
    x = ir.TensorBox(ir.ExternKernel.require_exact_strides(x, [32, 128 * m, 8, 32 * m, 1]))
    return lowerings[aten.view](lowerings[aten.permute](x, [1, 3, 0, 2, 4]), [k // 32, m, 32])  # type: ignore[no-any-return]


def _streamed(x: ir.TensorBox) -> ir.TensorBox:
    m, k = x.get_size()
    x = lowerings[aten.view](x, [m, k // 128, 4, 2, 4, 2, 2])
    x = ir.TensorBox(ir.ExternKernel.require_exact_strides(x, [k, 128, 2, 64, 16, 8, 1]))
    return lowerings[aten.view](lowerings[aten.permute](x, [0, 1, 3, 4, 5, 2, 6]), [m, k])  # type: ignore[no-any-return]


_ARRANGED = {"plain": _planes, "direct": _fragments, "streamed": _streamed}


@lowering(ops_stored.nvfp4_linear_fp8)
def nvfp4_linear_fp8(
    x: ir.TensorBox,  # (M, K)
    x_scale: ir.TensorBox,  # (M, 1)
    stored: ir.TensorBox,  # (N, K/2)
    block_scale: ir.TensorBox,  # (N, K/16)
    tensor_scale: ir.TensorBox,  # ()
    out_dtype: torch.dtype,
) -> ir.TensorBox:  # (M, N)
    given = x, x_scale, stored, block_scale, tensor_scale
    device, rows = x.get_device_or_error(), x.get_size()[0]
    # Where this is not known, the op asks how many there are, as it runs.
    few = V.graph.sizevars.statically_known_leq(rows, nvfp4_fp8.PROMPT_ROWS)
    if not few or not nvfp4_fp8.runs(targets.of(device)):
        return called(ops_stored.nvfp4_linear_fp8, *given, out_dtype)
    from te_inductor.templates.triton import stored_ops

    sizes = *x.get_size(), stored.get_size()[0]
    m, k, n = (compat.size_hint(V.graph.sizevars, size) for size in sizes)
    config = nvfp4_fp8.configured(m, n, k, targets.of(device).limits)
    # The copy goes over columns as they were, as the cast does, so that it becomes part of its kernel.
    cut = lowerings[aten.view](x, [sizes[0], k // 128, 4, 2, 4, 4])
    cut = ir.TensorBox(ir.ExternKernel.require_exact_strides(cut, [k, 128, 4, 16, 32, 1]))
    x = lowerings[aten.view](lowerings[aten.permute](cut, [0, 1, 4, 3, 2, 5]), [sizes[0], k])
    op, args = stored_ops.fp8_partial_sums, (x, *given[1:], config, out_dtype)
    return added_up(op, *args, splits=config.splits, out_dtype=out_dtype, early=False)


for _op in (ops_stored.nvfp4_dequantize, ops_stored.nvfp4_recast, nvfp4_store):
    lowering(_op)(functools.partial(called, _op))
