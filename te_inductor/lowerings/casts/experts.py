"""Casts of experts' weights that Inductor writes as well as a template: rows of each expert, as the matrix that they
are below each other, and blocks of MXFP8, MXFP4 and NVFP4. Others are the ops' own kernels."""

import functools
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import ops as inductor_ops

from te_inductor import ops
from te_inductor.lowerings.casts import in_memory, pointwise
from te_inductor.lowerings.casts import quantize as casts
from te_inductor.lowerings.registry import lowering
from te_inductor.ops.grouped import is_one_matrix
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import ROW

aten = torch.ops.aten
_quantize, _quantize_delayed = (
    fallback_handler(op, add_to_fallback_set=False) for op in (ops.quantize_experts, ops.quantize_experts_delayed)
)


@lowering(ops.experts_scale)
def experts_scale(weights: list[ir.TensorBox], quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    amaxes = [lowerings[aten.amax](lowerings[aten.abs](weight), [1, 2]) for weight in weights]
    amax = lowerings[torch.ops.prims.convert_element_type](
        functools.reduce(lowerings[aten.maximum], amaxes), torch.float32
    )
    return casts.encode_scale(amax, quantizer, weights[0].get_dtype())


@lowering(ops.quantize_experts_delayed)
def quantize_experts_delayed(
    w: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer, transposed: bool = False
) -> Any:
    if transposed:
        return _quantize_delayed(w, scale, quantizer, True)
    experts, rows, _ = w.get_size()
    if scale.get_size():
        scale = lowerings[aten.expand](lowerings[aten.view](scale, [experts, 1]), [experts, rows])
        scale = lowerings[aten.view](scale, [experts * rows, 1])
    return _restored(casts.quantize_delayed(_flat(w), scale, quantizer), w)


@lowering(ops.quantize_experts)
def quantize_experts(
    w: ir.TensorBox, quantizer: Quantizer, amax: ir.TensorBox | None = None, transposed: bool = False
) -> Any:
    if not is_one_matrix(w.get_size(), quantizer, transposed):
        return _quantize(w, quantizer, amax, transposed)
    w = lowerings[aten.permute](w, [0, 2, 1]) if transposed else w
    data, scale_inv = casts.quantize(_flat(w), quantizer, amax)
    experts, rows, _ = w.get_size()
    each = rows if quantizer.granularity is ROW else scale_inv.get_size()[0] // experts
    return _restored(data, w), lowerings[aten.view](scale_inv, [experts, each])


@lowering(ops.mask_copy)
def mask_copy(data: ir.TensorBox, ends: ir.TensorBox) -> ir.TensorBox:
    """Bytes in memory, which all that read them read in their format: each would make a copy of its own."""
    dtype, as_dtype = data.get_dtype(), lowerings[aten.view.dtype]
    rows, last = as_dtype(data, torch.uint8), lowerings[aten.select](ends, 0, -1)
    load, load_last = rows.make_loader(), last.make_loader()

    def masked(index: Any) -> Any:
        row = inductor_ops.index_expr(index[0], torch.int64)
        inside = inductor_ops.lt(row, inductor_ops.to_dtype(load_last([]), torch.int64))
        return inductor_ops.where(inside, load(index), inductor_ops.constant(0, torch.uint8))

    return as_dtype(in_memory(pointwise(data, torch.uint8, rows.get_size(), masked)), dtype)  # type: ignore[no-any-return]


def _flat(w: ir.TensorBox) -> ir.TensorBox:  # (E * R, C)
    experts, rows, columns = w.get_size()
    return lowerings[aten.view](w, [experts * rows, columns])  # type: ignore[no-any-return]


def _restored(data: ir.TensorBox, w: ir.TensorBox) -> ir.TensorBox:  # (E, R, pad(C))
    experts, rows, _ = w.get_size()
    return lowerings[aten.view](data, [experts, rows, data.get_size()[1]])  # type: ignore[no-any-return]
