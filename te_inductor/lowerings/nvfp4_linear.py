"""Products with a stored NVFP4 weight: the Triton kernel's partial sums, added up where the result is read."""

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V

from te_inductor import compat, ops_stored
from te_inductor.lowerings.registry import lowering

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type


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
        return _eager(ops_stored.nvfp4_linear, x, stored, block_scale, tensor_scale, out_dtype)
    from te_inductor.templates.triton import nvfp4_linear as template
    from te_inductor.templates.triton import nvfp4_ops

    (m, k), n = x.get_size(), stored.get_size()[0]
    hints = [compat.size_hint(V.graph.sizevars, size) for size in (m, n, k)]
    problem = template.Problem(hints[0], hints[1], hints[2], x.get_dtype())
    config = template.choose(problem) if torch.cuda.get_device_capability(device) >= template.CAPABILITY else None
    if config is None:
        return _eager(ops_stored.nvfp4_linear, x, stored, block_scale, tensor_scale, out_dtype)
    if config.planes:
        x = lowerings[aten.permute](lowerings[aten.view](x, [m, k // 16, 4, 4]), [0, 2, 1, 3])
        x = lowerings[aten.view](lowerings[aten.clone](x, memory_format=torch.contiguous_format), [m, 4, k // 4])
    y = lowerings[aten.sum](_eager(nvfp4_ops.partial_sums, x, stored, block_scale, config), [0])
    factor = lowerings[aten.mul](tensor_scale, template.FACTOR)
    return lowerings[convert](lowerings[aten.mul](y, factor), out_dtype)  # type: ignore[no-any-return]


def _eager(op, *args):  # type: ignore[no-untyped-def]
    """The op's own kernel, on contiguous tensors."""
    for arg in args:
        if isinstance(arg, ir.TensorBox):
            arg.realize()  # once, for all its readers
    given = [ir.ExternKernel.require_contiguous(arg) if isinstance(arg, ir.TensorBox) else arg for arg in args]
    return fallback_handler(op, add_to_fallback_set=False)(*given)


@lowering(ops_stored.nvfp4_dequantize)
def nvfp4_dequantize(stored, block_scale, tensor_scale, k, dtype):  # type: ignore[no-untyped-def]
    _register(stored)
    return _eager(ops_stored.nvfp4_dequantize, stored, block_scale, tensor_scale, k, dtype)


@lowering(ops_stored.nvfp4_recast)
def nvfp4_recast(stored, block_scale, tensor_scale):  # type: ignore[no-untyped-def]
    _register(stored)
    return _eager(ops_stored.nvfp4_recast, stored, block_scale, tensor_scale)


def _register(tensor):  # type: ignore[no-untyped-def]
    if tensor.get_device_or_error().type == "cuda":
        from te_inductor.templates.triton import nvfp4_ops  # noqa: F401
