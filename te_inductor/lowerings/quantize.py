"""Quantization in Inductor IR, so that it fuses with whatever produces the tensor."""

import functools

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops as prims

from te_inductor import ops
from te_inductor.lowerings.amax import raise_to_amax
from te_inductor.lowerings.registry import lowering
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import ROW, TENSOR
from te_inductor.recipes.quantizers import padded
from te_inductor.runtime.eager import EXPONENT_MASK, FP32_MAX

aten = torch.ops.aten


def _amax_of_tensor(x: ir.TensorBox) -> ir.TensorBox:  # () fp32
    amax = lowerings[aten.amax](lowerings[aten.abs](x), list(TENSOR.reduced))
    return lowerings[torch.ops.prims.convert_element_type](amax, torch.float32)  # type: ignore[no-any-return]


def magnitude_bits(x: ir.TensorBox) -> ir.TensorBox:
    """The bit patterns of |x| in fp32, int32: ordered as the magnitudes are, infinity above every number, NaN above that."""
    load = x.make_loader()

    def magnitude(index):  # type: ignore[no-untyped-def]
        bits = prims.to_dtype_bitcast(prims.to_dtype(load(index), torch.float32), torch.int32, torch.float32)
        return prims.bitwise_and(bits, prims.constant(0x7FFFFFFF, torch.int32))

    return ir.Pointwise.create(device=x.get_device(), dtype=torch.int32, inner_fn=magnitude, ranges=x.get_size())  # type: ignore[return-value]


def _amax_of_rows(x: ir.TensorBox) -> ir.TensorBox:  # (R, 1) fp32
    """The largest of `magnitude_bits`. Inductor fuses this with the cast of the row, so that one kernel may hold both it and
    a transposed fp8 store; with a float max that would be Triton issue 11111 (`_cast`) on torch 2.15."""
    load_bits = lowerings[aten.amax](magnitude_bits(x), list(ROW.reduced), keepdims=ROW.keepdim).make_loader()
    return ir.Pointwise.create(  # type: ignore[return-value]
        device=x.get_device(),
        dtype=torch.float32,
        inner_fn=lambda index: prims.to_dtype_bitcast(load_bits(index), torch.float32, torch.int32),
        ranges=ROW.scale_shape(x.get_size()[0]),
    )


def _amax(x: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    return (_amax_of_tensor if quantizer.granularity.transposes else _amax_of_rows)(x)


def _encode_scale(amax: ir.TensorBox, quantizer: Quantizer) -> tuple[ir.TensorBox, ir.TensorBox]:
    """scale and scale_inv, fp32, of the scope's shape. Mirrors `eager.encode_scale`."""
    load = amax.make_loader()

    def scale(index):  # type: ignore[no-untyped-def]
        value = load(index)
        epsilon, one = prims.constant(quantizer.amax_epsilon, torch.float32), prims.constant(1.0, torch.float32)
        value = prims.where(prims.lt(value, epsilon), epsilon, value)
        usable = prims.and_(
            prims.gt(value, prims.constant(0.0, torch.float32)),
            prims.lt(value, prims.constant(float("inf"), torch.float32)),
        )
        encoded = _divide(prims.constant(quantizer.format.max, torch.float64), value)
        largest = prims.constant(FP32_MAX, torch.float32)
        encoded = prims.where(prims.gt(encoded, largest), largest, encoded)
        if quantizer.power_2_scale:
            bits = prims.to_dtype_bitcast(encoded, torch.int32, torch.float32)
            bits = prims.bitwise_and(bits, prims.constant(EXPONENT_MASK, torch.int32))
            encoded = prims.to_dtype_bitcast(bits, torch.float32, torch.int32)
        return prims.where(usable, encoded, one)

    def scale_inv(index):  # type: ignore[no-untyped-def]
        return _divide(prims.constant(1.0, torch.float64), scale(index))

    boxes = [
        ir.Pointwise.create(device=amax.get_device(), dtype=torch.float32, inner_fn=f, ranges=list(amax.get_size()))
        for f in (scale, scale_inv)
    ]
    for box in boxes:
        box.realize()  # computed once, in the reduction's epilogue, and not again by every thread of the cast
        _freeze(box)
    return boxes[0], boxes[1]


def _divide(numerator, denominator):  # type: ignore[no-untyped-def]
    """IEEE fp32 division on every device. Triton's own fp32 division may be off by 2 ulp; the double quotient of two
    fp32 values, rounded to fp32, is the correctly rounded quotient, since 53 >= 2 * 24 + 2 bits."""
    return prims.to_dtype(prims.truediv(numerator, prims.to_dtype(denominator, torch.float64)), torch.float32)


def _cast(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    """The low-precision copy, in memory."""
    box = _cast_values(x, scale, quantizer)
    # Left alone, Inductor may lay the columnwise copy out like x, which no fp8 GEMM reads.
    box.realize()
    _freeze(box)
    return box


def _cast_pieces(pieces: list[ir.TensorBox], dim: int, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    """The low-precision copy of all pieces side by side along `dim`, each written into its place."""
    return ir.TensorBox(ir.ConcatKernel.create([_cast_values(piece, scale, quantizer) for piece in pieces], dim))


def _cast_values(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    """What the low-precision copy holds, columns padded with zeros. Saturates by plain comparisons: NaN passes through, and
    NaN-propagating min/max of floats beside transposed fp8 stores would meet Triton issue 11111."""
    rows, columns = x.get_size()
    missing = padded(columns) - columns
    if missing != 0:
        x = lowerings[aten.constant_pad_nd](x, [0, missing], 0.0)
    saturates = _conversion_saturates(x.get_device_or_error())
    load = x.make_loader()
    load_scale = lowerings[aten.expand](scale, [rows, columns + missing]).make_loader()

    def inner(index):  # type: ignore[no-untyped-def]
        value = prims.mul(prims.to_dtype(load(index), torch.float32), load_scale(index))
        if not saturates:
            high = prims.constant(quantizer.format.max, torch.float32)
            low = prims.constant(-quantizer.format.max, torch.float32)
            value = prims.where(prims.gt(value, high), high, value)
            value = prims.where(prims.lt(value, low), low, value)
        return prims.to_dtype(value, quantizer.format.dtype)

    return ir.Pointwise.create(  # type: ignore[return-value]
        device=x.get_device(), dtype=quantizer.format.dtype, inner_fn=inner, ranges=[rows, columns + missing]
    )


def _conversion_saturates(device: torch.device) -> bool:
    """Whether fp32 to fp8 in generated code turns what is too large, infinity too, into the largest value and keeps NaN:
    PTX's cvt.rn.satfinite, which Triton emits from compute capability 8.9 on, where our sites begin."""
    return device.type == "cuda"


def _freeze(box: ir.TensorBox) -> None:
    """Contiguous, whatever the strides of what it was made from."""
    box.data.data.freeze_layout_with_stride_order(list(reversed(range(len(box.get_size())))))  # type: ignore[attr-defined]


@lowering(ops.quantize)
def quantize(x: ir.TensorBox, quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    scale, scale_inv = _encode_scale(_amax(x, quantizer), quantizer)
    return _cast(x, scale, quantizer), scale_inv


@lowering(ops.quantize_rowcol)
def quantize_rowcol(x: ir.TensorBox, quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    scale, scale_inv = _encode_scale(_amax(x, quantizer), quantizer)
    transposed = lowerings[aten.permute](x, [1, 0])
    scale_t, scale_inv_t = (
        (scale, scale_inv)
        if quantizer.granularity.transposes
        else _encode_scale(_amax(transposed, quantizer), quantizer)
    )
    return _cast(x, scale, quantizer), scale_inv, _cast(transposed, scale_t, quantizer), scale_inv_t


@lowering(ops.quantize_delayed)
def quantize_delayed(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    return _cast(x, scale, quantizer)


@lowering(ops.quantize_rowcol_delayed)
def quantize_rowcol_delayed(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    return _cast(x, scale, quantizer), _cast(lowerings[aten.permute](x, [1, 0]), scale, quantizer)


@lowering(ops.current_scale)
def current_scale(pieces: list[ir.TensorBox], quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    amaxes = [_amax_of_tensor(piece) for piece in pieces]
    return _encode_scale(functools.reduce(lowerings[aten.maximum], amaxes), quantizer)


@lowering(ops.quantize_pieces_delayed)
def quantize_pieces_delayed(
    pieces: list[ir.TensorBox], dim: int, scale: ir.TensorBox, quantizer: Quantizer
) -> tuple[ir.TensorBox, ...]:
    transposed = [lowerings[aten.permute](piece, [1, 0]) for piece in pieces]
    return _cast_pieces(pieces, dim, scale, quantizer), _cast_pieces(transposed, 1 - dim, scale, quantizer)


@lowering(ops.record_amax)
def record_amax(pieces: list[ir.TensorBox], amax: ir.TensorBox) -> None:
    if amax.get_device_or_error().type != "cuda":
        amaxes = [amax, *(_amax_of_tensor(piece) for piece in pieces)]
        lowerings[aten.copy_](amax, functools.reduce(lowerings[aten.maximum], amaxes))
        return
    # A kernel changes a buffer once, so pieces that one kernel computes raise it together.
    computed = [piece for piece in pieces if _is_computed(piece)]
    together = [piece for piece in computed if list(piece.get_size()) == list(computed[0].get_size())]
    if len(together) > 1:
        raise_to_amax(amax, functools.reduce(lowerings[aten.maximum], map(magnitude_bits, together)))
    for piece in pieces:
        if len(together) == 1 or not any(piece is other for other in together):
            raise_to_amax(amax, magnitude_bits(piece))


def _is_computed(x: ir.TensorBox) -> bool:
    """Whether it is an expression that its readers' kernels compute, and not a tensor in memory."""
    storage = x.data.unwrap_view() if isinstance(x.data, ir.BaseView) else x.data
    return isinstance(storage, ir.StorageBox) and isinstance(storage.data, ir.Pointwise)


@lowering(ops.dequantize)
def dequantize(data: ir.TensorBox, scale_inv: ir.TensorBox, quantizer: Quantizer, dtype: torch.dtype) -> ir.TensorBox:
    wide = lowerings[aten.mul](lowerings[torch.ops.prims.convert_element_type](data, torch.float32), scale_inv)
    return lowerings[torch.ops.prims.convert_element_type](wide, dtype)  # type: ignore[no-any-return]
