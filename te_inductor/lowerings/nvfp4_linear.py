"""Products with a stored NVFP4 weight: the Triton kernel's partial sums, added up where the result is read."""

import functools
import operator

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V

from te_inductor import compat, ops_stored
from te_inductor.lowerings.early_start import start_early
from te_inductor.lowerings.registry import lowering

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type
_CUTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor)
_SAME = (
    operator.getitem,
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    convert.default,
)


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
    start_early()
    parts = _eager(
        nvfp4_ops.partial_sums, _arranged(x, config.direct), stored, block_scale, tensor_scale, config, out_dtype
    )
    summands = [lowerings[aten.select](parts, 0, i) for i in range(config.splits)]
    if config.splits == 1:
        return summands[0]  # type: ignore[no-any-return]
    # Additions, and no reduction, as elementwise code becomes part of what reads the result, a norm's reduction too.
    y = lowerings[convert](functools.reduce(lowerings[aten.add], summands), out_dtype)
    if _is_cut_twice(V.graph.current_node):
        y.realize()
    return y  # type: ignore[no-any-return]


def _arranged(x: ir.TensorBox, direct: bool) -> ir.TensorBox:
    """`fragments` or `planes`, in the kernel that makes x."""
    m, k = x.get_size()
    if direct and m == 1:
        return x
    if direct:
        # The copy goes over rows first, as a norm does, so that it becomes part of its kernel.
        x = lowerings[aten.view](x, [m, k // 128, 4, 4, 8])
        x = ir.TensorBox(ir.ExternKernel.require_exact_strides(x, [32, 128 * m, 8, 32 * m, 1]))
        return lowerings[aten.view](lowerings[aten.permute](x, [1, 3, 0, 2, 4]), [k // 32, m, 32])  # type: ignore[no-any-return]
    x = lowerings[aten.permute](lowerings[aten.view](x, [m, k // 16, 4, 4]), [0, 2, 1, 3])
    x = lowerings[aten.clone](x, memory_format=torch.contiguous_format)
    return lowerings[aten.view](x, [m, 4, k // 4])  # type: ignore[no-any-return]


def _is_cut_twice(node: torch.fx.Node, cuts: int = 0) -> bool:
    """Whether pieces are taken of pieces, as where q, k and v are one layer and their halves are turned: Inductor would add
    the sums up in a kernel for each of them."""
    users = [user for user in node.users if user.target in (*_CUTS, *_SAME)]
    return cuts > 1 or any(_is_cut_twice(user, cuts + (user.target in _CUTS)) for user in users)


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
