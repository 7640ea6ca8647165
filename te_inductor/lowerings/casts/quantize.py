"""Quantization in Inductor IR, so that it fuses with whatever produces the tensor.

# Note [Numbers of one tensor]
The scales of a step are one tensor. A kernel that read it would have the place of its scale in its code, so that layers
had no kernel in common: each would be another one for Triton to compile, and the more the deeper the model is. So each
number is a buffer, which the wrapper makes of the tensor, at no launch; of two dimensions, as a library that multiplies
has it. Nothing may be written to it, or be put where it was."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as inductor_ops
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv

from te_inductor import ops
from te_inductor.lowerings.casts import blocks, in_memory, pointwise, values
from te_inductor.lowerings.casts.algebra import INDUCTOR
from te_inductor.lowerings.casts.narrowing import overflowing
from te_inductor.lowerings.codegen.amax import raise_to_amax
from te_inductor.lowerings.registry import lowering
from te_inductor.numerics import arithmetic
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import padded

aten = torch.ops.aten


def _amax_of_tensor(x: ir.TensorBox) -> ir.TensorBox:  # () fp32
    """0 where x has no elements, which may be known at run time alone: a reduction makes -inf of nothing."""
    elements, known = sympy_product(x.get_size()), V.graph.sizevars
    zero = lowerings[aten.full]([], 0.0, dtype=torch.float32, device=x.get_device())
    if known.statically_known_equals(elements, 0):
        return zero  # type: ignore[no-any-return]
    amax = lowerings[aten.abs](x)
    # Inductor cuts a reduction of which it knows no size into no parts: one program looked at 134 million values for
    # two seconds (65536 rows of 2048 from other ranks, H200, 2026-11-26).
    for dims in [[1], [0]] if free_unbacked_symbols(elements) else [[0, 1]]:
        amax = lowerings[aten.amax](amax, dims)
    amax = lowerings[torch.ops.prims.convert_element_type](amax, torch.float32)
    return amax if known.statically_known_gt(elements, 0) else lowerings[aten.maximum](amax, zero)  # type: ignore[no-any-return]


def magnitude_bits(x: ir.TensorBox) -> ir.TensorBox:  # int32
    """Ordered as the magnitudes of x are."""
    load = x.make_loader()
    return pointwise(x, torch.int32, x.get_size(), lambda index: values.magnitude(load(index)))


def _amax_of_rows(pieces: Sequence[ir.TensorBox]) -> ir.TensorBox:  # (R, 1) fp32
    """The amaxes of rows of pieces side by side."""
    bits = [lowerings[aten.amax](magnitude_bits(piece), [1], keepdims=True) for piece in pieces]
    load_bits = functools.reduce(lowerings[aten.maximum], bits).make_loader()
    ranges = [pieces[0].get_size()[0], 1]
    return pointwise(pieces[0], torch.float32, ranges, lambda index: INDUCTOR.from_bits(load_bits(index)))


def _amax(x: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    return _amax_of_tensor(x) if quantizer.granularity.whole else _amax_of_rows([x])


def encode_scale(amax: ir.TensorBox, quantizer: Quantizer, dtype: torch.dtype) -> tuple[ir.TensorBox, ir.TensorBox]:
    """scale and scale_inv, fp32, of the scope's shape, for a tensor of `dtype`; in memory."""
    scale, scale_inv = _scale_and_inverse(amax, quantizer, dtype)
    return scale, in_memory(scale_inv)


def _scale_and_inverse(
    amax: ir.TensorBox, quantizer: Quantizer, dtype: torch.dtype
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """scale_inv is yet to be put somewhere."""
    load = amax.make_loader()
    scalars = functools.partial(pointwise, amax, torch.float32, amax.get_size())
    scale = scalars(lambda index: arithmetic.encode_scale(INDUCTOR, load(index), quantizer, dtype))
    # Computed once, in the reduction's epilogue, and not again by every thread of the cast.
    load_scale = in_memory(scale).make_loader()
    return scale, scalars(lambda index: arithmetic.decode_scale(INDUCTOR, load_scale(index), quantizer))


def _cast(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    """The low-precision copy, in memory."""
    box = _cast_values(x, scale, quantizer)
    # Left alone, Inductor may lay the columnwise copy out like x, which no fp8 GEMM reads.
    return in_memory(box)


def _cast_pieces(
    pieces: Sequence[ir.TensorBox], dim: int, scales: Sequence[ir.TensorBox], quantizer: Quantizer
) -> ir.TensorBox:
    """The low-precision copy of all pieces side by side along `dim`, each cast with its scale into its place."""
    return _cat([_cast_values(*piece, quantizer) for piece in zip(pieces, scales, strict=True)], dim)


def _cat(boxes: Sequence[ir.TensorBox], dim: int) -> ir.TensorBox:
    """What is in no memory yet is computed into its place."""
    return ir.TensorBox(ir.ConcatKernel.create(boxes, dim))


def _copy_pieces(pieces: Sequence[ir.TensorBox], dim: int, quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    """data and scale_inv, of rows, of all pieces side by side along `dim`: beside each other they share rows."""
    dtype = pieces[0].get_dtype()
    if dim == 1:
        scale, scale_inv = encode_scale(_amax_of_rows(pieces), quantizer, dtype)
        return _cast_pieces(pieces, dim, [scale] * len(pieces), quantizer), scale_inv
    pairs = [_scale_and_inverse(_amax_of_rows([piece]), quantizer, dtype) for piece in pieces]
    scales, inverses = zip(*pairs, strict=True)
    return _cast_pieces(pieces, dim, scales, quantizer), _cat(inverses, dim)


def _cast_values(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    """What the low-precision copy holds, columns padded with zeros."""
    rows, columns = x.get_size()
    missing = quantizer.padded(columns, floordiv=FloorDiv) - columns
    if missing != 0:
        x = lowerings[aten.constant_pad_nd](x, [0, missing], 0.0)
    load, device, dtype = x.make_loader(), x.get_device_or_error(), x.get_dtype()
    load_scale = lowerings[aten.expand](scale, [rows, columns + missing]).make_loader()

    def cast(index: Any) -> Any:
        return values.cast(load(index), load_scale(index), quantizer, device, dtype)

    return pointwise(x, quantizer.format.dtype, [rows, columns + missing], cast)


@lowering(ops.quantize)
def quantize(
    x: ir.TensorBox, quantizer: Quantizer, amax: ir.TensorBox | None = None, seed: ir.TensorBox | None = None
) -> tuple[ir.TensorBox, ...]:
    if quantizer.granularity.blocked:
        return blocks.quantize(x, quantizer, amax, seed)
    scale, scale_inv = encode_scale(_amax(x, quantizer), quantizer, x.get_dtype())
    return _cast(x, scale, quantizer), scale_inv


@lowering(ops.quantize_rowcol)
def quantize_rowcol(
    x: ir.TensorBox, quantizer: Quantizer, amax: ir.TensorBox | None = None
) -> tuple[ir.TensorBox, ...]:
    _is_read_again(x)
    if quantizer.granularity.blocked:
        return blocks.quantize_rowcol(x, quantizer, amax, _wanted())
    scale, scale_inv = encode_scale(_amax(x, quantizer), quantizer, x.get_dtype())
    transposed = lowerings[aten.permute](x, [1, 0])
    scale_t, scale_inv_t = (
        (scale, scale_inv)
        if quantizer.granularity.whole
        else encode_scale(_amax_of_rows([transposed]), quantizer, x.get_dtype())
    )
    return _cast(x, scale, quantizer), scale_inv, _cast(transposed, scale_t, quantizer), scale_inv_t


@lowering(ops.quantize_pieces)
def quantize_pieces(pieces: list[ir.TensorBox], dim: int, quantizer: Quantizer) -> tuple[ir.TensorBox | None, ...]:
    """A copy that nobody reads is None: pieces that are written into their places would be written for nobody too."""
    wanted = _wanted()
    if quantizer.granularity.blocked:
        return blocks.quantize_pieces(pieces, dim, quantizer, wanted)
    for piece in pieces:
        _is_read_again(piece)
    made: list[ir.TensorBox | None] = []
    for wants, how in zip(wanted, _both_ways(pieces, dim), strict=True):
        made += _copy_pieces(*how, quantizer) if wants else (None, None)
    return tuple(made)


def _is_read_again(x: ir.TensorBox) -> None:
    """A tensor of which one op makes an amax and two casts has more readers than Inductor sees, which computes what is
    long once and keeps it, as the gradient of a loss: its softmax again in each of them took 9.1 ms of a step where the
    casts of a tensor in memory take 2.2 (16384 x 128256, scales of rows, H200, 2026-11-23)."""
    x.mark_reuse(2)


@lowering(ops.hadamard)
def hadamard(x: ir.TensorBox) -> ir.TensorBox:
    return blocks.hadamard(x)


@lowering(ops.pad_rows)
def pad_rows(x: ir.TensorBox, rows: int) -> ir.TensorBox:
    """Computed by the kernels that read it. Inductor's own padding may be two kernels that write all of it."""
    load, (known, columns) = x.make_loader(), x.get_size()

    def padded_value(index: Any) -> Any:
        row, end = (inductor_ops.index_expr(one, torch.int64) for one in (index[0], known))
        return inductor_ops.masked(inductor_ops.lt(row, end), lambda: load(index), 0.0)

    return pointwise(x, x.get_dtype(), [rows, columns], padded_value)


@lowering(ops.tensor_amax)
def tensor_amax(x: ir.TensorBox, of_rows: bool = False) -> ir.TensorBox:
    """Infinite where x overflows fp16: Note [Overflow stays visible] in values.py."""
    amax = _amax_of_rows([x]) if of_rows else _amax_of_tensor(x)
    if x.get_dtype() == torch.float16:
        amax = overflowing(amax)
    amax.realize()
    return amax


@lowering(ops.quantize_delayed)
def quantize_delayed(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> ir.TensorBox:
    return _cast(x, scale, quantizer)


@lowering(ops.quantize_rowcol_delayed)
def quantize_rowcol_delayed(x: ir.TensorBox, scale: ir.TensorBox, quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    return _cast(x, scale, quantizer), _cast(lowerings[aten.permute](x, [1, 0]), scale, quantizer)


@lowering(ops.transpose)
def transpose(data: ir.TensorBox, columns: Any) -> ir.TensorBox:
    """Transposes bytes, which no kernel casts."""
    dtype = data.get_dtype()
    x = lowerings[aten.slice](lowerings[aten.view.dtype](data, torch.uint8), 1, 0, columns)
    x = lowerings[aten.permute](x, [1, 0])
    rows = x.get_size()[1]
    missing = padded(rows, floordiv=FloorDiv) - rows
    if missing != 0:
        x = lowerings[aten.constant_pad_nd](x, [0, missing], 0)
    made = pointwise(x, torch.uint8, x.get_size(), x.make_loader())
    return lowerings[aten.view.dtype](in_memory(made), dtype)  # type: ignore[no-any-return]


@lowering(ops.current_scale)
def current_scale(pieces: list[ir.TensorBox], quantizer: Quantizer) -> tuple[ir.TensorBox, ...]:
    amaxes = [_amax_of_tensor(piece) for piece in pieces]
    amax = functools.reduce(lowerings[aten.maximum], amaxes)
    return encode_scale(amax, quantizer, pieces[0].get_dtype())


@lowering(ops.quantize_pieces_delayed)
def quantize_pieces_delayed(
    pieces: list[ir.TensorBox], dim: int, scale: ir.TensorBox, quantizer: Quantizer
) -> tuple[ir.TensorBox | None, ...]:
    """A copy that nobody reads is None, as of `quantize_pieces`."""
    read, scales = _outputs_read(), [scale] * len(pieces)
    return tuple(
        _cast_pieces(*how, scales, quantizer) if place in read else None
        for place, how in enumerate(_both_ways(pieces, dim))
    )


def _both_ways(pieces: list[ir.TensorBox], dim: int) -> tuple[tuple[list[ir.TensorBox], int], ...]:
    """Returns pieces side by side along `dim`, and those of the transpose."""
    return (pieces, dim), ([lowerings[aten.permute](piece, [1, 0]) for piece in pieces], 1 - dim)


def _outputs_read() -> set[Any]:
    """The outputs of the node that is being lowered that somebody reads."""
    return {user.args[1] for user in V.graph.current_node.users}


def _wanted() -> list[bool]:
    """Whether somebody reads the row copy that the node makes with a scale of its own, and the column copy."""
    read = _outputs_read()
    return [bool(read & outputs) for outputs in ({0, 1}, {2, 3})]


class _Place(ir.NonOwningLayout):
    """The place of a number in another buffer."""

    def maybe_guard_aligned(self) -> bool:
        return True  # they are 16 bytes apart


class _Number(ir.NopKernel):
    """A number of another buffer: Note [Numbers of one tensor]."""

    def get_inputs_that_alias_output(self) -> Sequence[str]:
        return [self.inputs[0].get_name()]  # type: ignore[union-attr]

    def should_allocate(self) -> bool:
        return True


@lowering(ops.scale_at)
def scale_at(read: ir.TensorBox, place: int) -> ir.TensorBox:
    read.realize()
    device, dtype = read.get_device_or_error(), read.get_dtype()
    at = ir.FixedLayout(device, dtype, [1, 1], [1, 1], read.get_stride()[0] * place)
    view = ir.ReinterpretView(data=read.data, layout=at)
    number = _Number(name=None, layout=_Place(view), inputs=[read.data.data])  # type: ignore[attr-defined]
    number.name = V.graph.register_buffer(number)
    V.graph.register_operation(number)
    V.graph.never_reuse_buffers.add(number.name)
    return lowerings[aten.view](ir.TensorBox(ir.StorageBox(number)), [])  # type: ignore[no-any-return]


@lowering(ops.record_amax)
def record_amax(pieces: list[ir.TensorBox], amax: ir.TensorBox) -> None:
    if amax.get_device_or_error().type != "cuda":
        first = lowerings[aten.select](amax, 0, 0) if amax.get_size() else amax  # of state
        amaxes = [first, *(_amax_of_tensor(piece) for piece in pieces)]
        lowerings[aten.copy_](first, functools.reduce(lowerings[aten.maximum], amaxes))
        return
    # A kernel changes a buffer once, so pieces that one kernel computes raise it together.
    together = _computed_together(pieces)
    if len(together) > 1:
        raise_to_amax(amax, functools.reduce(lowerings[aten.maximum], map(magnitude_bits, together)))
    for piece in pieces:
        if len(together) == 1 or not any(piece is other for other in together):
            raise_to_amax(amax, magnitude_bits(piece))


def _computed_together(pieces: Sequence[ir.TensorBox]) -> list[ir.TensorBox]:
    """Returns the pieces of one size that are expressions, which their readers' kernels compute, and those which
    Inductor will write, as they read many tensors, of which an expression reads one, too."""
    expressions = [piece for piece in pieces if isinstance(_data_of(piece), ir.Pointwise)]
    if not expressions:
        return []
    size, read = list(expressions[0].get_size()), {name for one in expressions for name in _large_reads(one)}
    written = [piece for piece in pieces if isinstance(_data_of(piece), ir.ComputedBuffer)]
    also = [one for one in written if isinstance(_data_of(one).data, ir.Pointwise) and read & _large_reads(one)]
    return [piece for piece in [*expressions, *also] if list(piece.get_size()) == size]


def _data_of(x: ir.TensorBox) -> Any:
    """The data of a tensor's storage: a buffer, or an expression that has none."""
    storage = x.data.unwrap_view() if isinstance(x.data, ir.BaseView) else x.data
    return storage.data if isinstance(storage, ir.StorageBox) else None


def _large_reads(x: ir.TensorBox) -> set[str]:
    """Names of tensors as large as it, or larger, of which it is computed."""
    data = _data_of(x)
    names = data.get_read_names() if isinstance(data, ir.ComputedBuffer) else x.get_read_names()
    least = sympy_product(x.get_size())
    return {name for name in names if V.graph.sizevars.statically_known_geq(V.graph.get_numel(name), least)}


@lowering(ops.dequantize)
def dequantize(data: ir.TensorBox, scale_inv: ir.TensorBox, quantizer: Quantizer, dtype: torch.dtype) -> ir.TensorBox:
    if quantizer.granularity.blocked:
        return blocks.dequantize(data, scale_inv, quantizer.format, quantizer.granularity, dtype)
    wide = lowerings[aten.mul](lowerings[torch.ops.prims.convert_element_type](data, torch.float32), scale_inv)
    return lowerings[torch.ops.prims.convert_element_type](wide, dtype)  # type: ignore[no-any-return]
