"""Quantization in Inductor IR, so that it fuses with whatever produces the tensor."""

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings

from te_inductor import ops
from te_inductor.lowerings import blocks, values
from te_inductor.lowerings.registry import lowering
from te_inductor.recipes import Quantizer

aten = torch.ops.aten


def _amax_of_tensor(x: ir.TensorBox) -> ir.TensorBox:  # () fp32
    amax = lowerings[aten.amax](lowerings[aten.abs](x), [0, 1])
    return lowerings[torch.ops.prims.convert_element_type](amax, torch.float32)  # type: ignore[no-any-return]


def _amax_of_rows(x: ir.TensorBox) -> ir.TensorBox:  # (R, 1) fp32
    load = x.make_loader()
    bits = ir.Pointwise.create(
        device=x.get_device(),
        dtype=torch.int32,
        inner_fn=lambda index: values.magnitude(load(index)),
        ranges=x.get_size(),
    )
    load_bits = lowerings[aten.amax](bits, [1], keepdims=True).make_loader()
    return ir.Pointwise.create(  # type: ignore[return-value]
        device=x.get_device(),
        dtype=torch.float32,
        inner_fn=lambda index: values.from_bits(load_bits(index)),
        ranges=[x.get_size()[0], 1],
    )


def _encode_scale(x: ir.TensorBox, quantizer: Quantizer) -> tuple[ir.TensorBox, ir.TensorBox]:
    """scale and scale_inv, fp32, of the scope's shape."""
    amax = (_amax_of_tensor if quantizer.granularity.transposes else _amax_of_rows)(x)
    load, dtype = amax.make_loader(), x.get_dtype()

    def scale(index):  # type: ignore[no-untyped-def]
        return values.encode_scale(load(index), quantizer, dtype)

    def scale_inv(index):  # type: ignore[no-untyped-def]
        return values.decode_scale(scale(index))

    boxes = [
        ir.Pointwise.create(device=x.get_device(), dtype=torch.float32, inner_fn=f, ranges=list(amax.get_size()))
        for f in (scale, scale_inv)
    ]
    for box in boxes:
        box.realize()  # computed once, in the reduction's epilogue, and not again by every thread of the cast
        _freeze(box)
    return boxes[0], boxes[1]


def _cast(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    """The low-precision copy, columns padded with zeros."""
    rows, columns = x.get_size()
    missing = quantizer.padded(columns) - columns
    if missing != 0:
        x = lowerings[aten.constant_pad_nd](x, [0, missing], 0.0)
    load = x.make_loader()
    load_scale = lowerings[aten.expand](scale, [rows, columns + missing]).make_loader()
    box = ir.Pointwise.create(
        device=x.get_device(),
        dtype=quantizer.format.dtype,
        inner_fn=lambda index: values.cast(load(index), load_scale(index), quantizer),
        ranges=[rows, columns + missing],
    )
    # Left alone, Inductor may lay the columnwise copy out like x, which no fp8 GEMM reads.
    box.realize()
    _freeze(box)
    return box


def _freeze(box: ir.TensorBox) -> None:
    """Contiguous, whatever the strides of what it was made from."""
    box.data.data.freeze_layout_with_stride_order(list(reversed(range(len(box.get_size())))))  # type: ignore[attr-defined]


@lowering(ops.quantize)
def quantize(x: ir.TensorBox, quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    if quantizer.granularity.blocked:
        return blocks.quantize(x, quantizer)
    scale, scale_inv = _encode_scale(x, quantizer)
    return _cast(x, scale, quantizer), scale_inv


@lowering(ops.quantize_rowcol)
def quantize_rowcol(x: ir.TensorBox, quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    if quantizer.granularity.blocked:
        return blocks.quantize_rowcol(x, quantizer)
    scale, scale_inv = _encode_scale(x, quantizer)
    transposed = lowerings[aten.permute](x, [1, 0])
    scale_t, scale_inv_t = (
        (scale, scale_inv) if quantizer.granularity.transposes else _encode_scale(transposed, quantizer)
    )
    return _cast(x, scale, quantizer), scale_inv, _cast(transposed, scale_t, quantizer), scale_inv_t


@lowering(ops.dequantize)
def dequantize(data: ir.TensorBox, scale_inv: ir.TensorBox, quantizer: Quantizer, dtype: torch.dtype) -> ir.TensorBox:
    if quantizer.granularity.blocked:
        scale_inv = blocks.spread(scale_inv, quantizer.granularity, *data.get_size())
    wide = lowerings[aten.mul](lowerings[torch.ops.prims.convert_element_type](data, torch.float32), scale_inv)
    return lowerings[torch.ops.prims.convert_element_type](wide, dtype)  # type: ignore[no-any-return]
