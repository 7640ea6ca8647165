"""The cast of kept weights in MXFP8 and NVFP4, in the place of `kept_weights_cast`: scales belong to small blocks, which a
tile holds whole. Arithmetic of `runtime/microscaling.py`, bit for bit."""

import triton
import triton.language as tl

from te_inductor.recipes.formats import E2M1, E4M3
from te_inductor.runtime.microscaling import (
    FP32_MAX,
    INFINITY_CODE,
    NAN_CODE,
    SMALLEST_BITS,
    TWO_LEVEL_MAX,
    reciprocal,
)
from te_inductor.templates.triton.kept_weights_kernels import (
    _AMAX,
    _DATA,
    _DATA_T,
    _INFINITY,
    _LEADING,
    _LEADING_T,
    _PARAMETER_COLUMNS,
    _SCALE_INV,
    _SCALE_INV_T,
    _WEIGHT,
    _WEIGHT_COLUMNS,
    _cast,
    _source,
    _strip,
    _target,
)

_FP32_MAX, _TWO_LEVEL_MAX = tl.constexpr(FP32_MAX), tl.constexpr(TWO_LEVEL_MAX)
_E4M3_MAX, _E2M1_INVERSE = tl.constexpr(E4M3.max), tl.constexpr(reciprocal(E2M1.max))
_INFINITY_CODE, _NAN_CODE = tl.constexpr(INFINITY_CODE), tl.constexpr(NAN_CODE)
_SMALLEST_BITS = tl.constexpr(SMALLEST_BITS)
_PADDING = tl.constexpr(32)  # what copies are padded to, in elements


@triton.jit
def kept_weights_cast_microscaled(
    parameters,  # (P, 15) int64
    weights,  # (W, 5) int64
    programs,  # int32, the parameter of each program
    stale,  # (W,) int32
    INPUT: tl.constexpr,
    ELEMENT: tl.constexpr,  # FP8, or uint8, two E2M1 values
    TWO_LEVEL: tl.constexpr,  # NVFP4, else MXFP8
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,  # 1 / LARGEST
    DOWN: tl.constexpr,  # rows and columns of a block
    ACROSS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    STEPS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    program = tl.program_id(0)
    row = parameters + tl.load(programs + program) * _PARAMETER_COLUMNS
    weight = tl.load(row + _WEIGHT)
    if tl.load(stale + weight) == 0:
        return
    source, ROWS, COLUMNS = _source(row, INPUT, ALIGNED)
    data, has_data, leading = _target(row + _DATA, row + _LEADING, ELEMENT, ALIGNED)
    data_t, has_data_t, leading_t = _target(row + _DATA_T, row + _LEADING_T, ELEMENT, ALIGNED)
    down, start = _strip(row, program, COLUMNS, WIDE * STEPS)
    r = down * HIGH + tl.arange(0, HIGH)
    vectors = weights + weight * _WEIGHT_COLUMNS
    amax = 0.0
    if TWO_LEVEL:
        amax = tl.load(tl.load(vectors + _AMAX).to(tl.pointer_type(tl.float32)))
    for step in range(STEPS):
        left = start + step * WIDE
        c = left + tl.arange(0, WIDE)
        inside = (r[:, None] < ROWS) & (c[None, :] < COLUMNS)
        x = tl.load(source + r[:, None] * COLUMNS + c[None, :], mask=inside, other=0.0).to(tl.float32)
        if has_data:
            _copy(
                *(x, amax, data, leading, tl.load(vectors + _SCALE_INV), down * HIGH, left, ROWS, COLUMNS),
                *(ELEMENT, TWO_LEVEL, LARGEST, INVERSE, DOWN, ACROSS, HIGH, WIDE),
            )
        if has_data_t:
            _copy(
                *(
                    tl.trans(x),
                    amax,
                    data_t,
                    leading_t,
                    tl.load(vectors + _SCALE_INV_T),
                    left,
                    down * HIGH,
                    COLUMNS,
                    ROWS,
                ),
                *(ELEMENT, TWO_LEVEL, LARGEST, INVERSE, DOWN, ACROSS, WIDE, HIGH),
            )


@triton.jit
def _copy(
    x,  # (HIGH, WIDE) fp32, zeros outside
    amax,  # of the tensor, where scales have two levels
    data,  # pointer
    leading,
    scale_inv,  # address
    above,  # where the tile begins
    left,
    ROWS,
    COLUMNS,
    ELEMENT: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile of one copy, whose rows are x's."""
    bits = tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (HIGH // DOWN, DOWN, WIDE // ACROSS, ACROSS))
    largest = tl.max(tl.max(bits, 3), 1).to(tl.float32, bitcast=True)
    if TWO_LEVEL:
        factor, stored = _two_level(largest, amax)
    else:
        factor, stored = _power_of_two(largest * INVERSE)
    # The padding too, which is zeros, or NaN where its block has one.
    down, across = above // DOWN + tl.arange(0, HIGH // DOWN), left // ACROSS + tl.arange(0, WIDE // ACROSS)
    wide = tl.cdiv(COLUMNS, _PADDING) * (_PADDING // ACROSS)
    high = ROWS if DOWN == 1 else tl.cdiv(ROWS, _PADDING) * (_PADDING // DOWN)
    pointer = scale_inv.to(tl.pointer_type(stored.dtype)) + down[:, None] * wide + across[None, :]
    tl.store(pointer, stored, mask=(down[:, None] < high) & (across[None, :] < wide))
    spread = tl.broadcast_to(factor[:, None, :, None], (HIGH // DOWN, DOWN, WIDE // ACROSS, ACROSS))
    value = x * tl.reshape(spread, (HIGH, WIDE))
    r = above + tl.arange(0, HIGH)
    if TWO_LEVEL:
        low, high_half = tl.split(tl.reshape(_e2m1(value), (HIGH, WIDE // 2, 2)))
        cast = (low | (high_half << 4)).to(tl.uint8)
        c = left // 2 + tl.arange(0, WIDE // 2)
        inside = (r[:, None] < ROWS) & (2 * c[None, :] < wide * ACROSS)
    else:
        cast = _cast(value, LARGEST, ELEMENT)
        c = left + tl.arange(0, WIDE)
        inside = (r[:, None] < ROWS) & (c[None, :] < wide * ACROSS)
    tl.store(data + r[:, None] * leading + c[None, :], cast, mask=inside)


@triton.jit
def _power_of_two(value):
    """The reciprocal of the smallest power of two that is no smaller, and its E8M0 code."""
    bits = value.to(tl.int32, bitcast=True)
    up = ((bits & 0x7FFFFF) != 0) & (bits > _SMALLEST_BITS)
    code = (bits >> 23) + up.to(tl.int32)
    code = tl.where(value == _INFINITY, _INFINITY_CODE, code)
    code = tl.where(value != value, _NAN_CODE, code)
    inverse = tl.where(code == _INFINITY_CODE, _SMALLEST_BITS, (254 - code) << 23)
    inverse = tl.where(code == _NAN_CODE, 0x7FC00000, inverse)
    return inverse.to(tl.float32, bitcast=True), code.to(tl.uint8)


@triton.jit
def _two_level(largest, amax):
    """The factor of values, and the E4M3 scale. Double quotients, as in `_encode`."""
    scale = (tl.full((), _TWO_LEVEL_MAX, tl.float64) / amax.to(tl.float64)).to(tl.float32)
    scale = tl.where(scale < _FP32_MAX, scale, _FP32_MAX)
    scale = tl.where((amax > 0.0) & (amax < _INFINITY), scale, 1.0)
    stored = largest * (scale * _E2M1_INVERSE)
    stored = tl.where(stored > _E4M3_MAX, _E4M3_MAX, stored).to(tl.float8e4nv)
    decode = stored.to(tl.float32) * (1.0 / scale.to(tl.float64)).to(tl.float32)
    factor = (1.0 / decode.to(tl.float64)).to(tl.float32)
    return tl.where(factor < _FP32_MAX, factor, _FP32_MAX), stored


@triton.jit
def _e2m1(value):
    """Codes, one each, to nearest, ties to even; NaN is the largest."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    # `microscaling.THRESHOLDS`
    code = 7 - (magnitude <= 0.25).to(tl.int32) - (magnitude < 0.75).to(tl.int32) - (magnitude <= 1.25).to(tl.int32)
    code = code - (magnitude < 1.75).to(tl.int32) - (magnitude <= 2.5).to(tl.int32)
    code = code - (magnitude < 3.5).to(tl.int32) - (magnitude <= 5.0).to(tl.int32)
    negative = (bits < 0) & (value == value)
    return code | (negative.to(tl.int32) << 3)
