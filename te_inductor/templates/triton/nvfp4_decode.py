"""The way from stored NVFP4 to bf16 in registers: what the kernels of this folder share.

Note [Order of a stored block] in numerics/nvfp4.py says where the bits are. Two neighbouring 16-bit words, one 32-bit
unit, are eight values; `VALUES` makes of it four registers of two bf16 each. Masked out of the rotated unit, a field is
its value times 2**-126, and an E4M3 byte shifted left by 4 is, as bf16, its value times 2**-120. `SCALE` multiplies
that by 2**239, in two steps, so that the one product of both is ``value * scale * 2**-7``: exact, with at most 6
significant bits, neither huge nor subnormal. `FACTOR` makes up for it where the sums are read."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FACTOR = 2.0**7


def _products(unit: str, scale: str, to: str) -> list[str]:
    """Four registers of two values each, times what `scale` holds twice. Two turns bring nothing round that the mask
    leaves, and are shifts, which the pipe of multiplications can do."""
    return [
        f"and.b32 t, {unit}, 0x81C081C0;",
        f"mul.bf16x2 {to}0, t, {scale};",
        f"shl.b32 t, {unit}, 6;",
        "and.b32 t, t, 0x81C081C0;",
        f"mul.bf16x2 {to}1, t, {scale};",
        f"shf.l.wrap.b32 t, {unit}, {unit}, 12;",
        "and.b32 t, t, 0x81C081C0;",
        f"mul.bf16x2 {to}2, t, {scale};",
        f"shf.l.wrap.b32 t, {unit}, {unit}, 10;",
        "and.b32 t, t, 0x81808180;",
        f"shl.b32 u, {unit}, 2;",
        "and.b32 u, u, 0x00400040;",
        "or.b32 t, t, u;",
        f"mul.bf16x2 {to}3, t, {scale};",
    ]


def _unpacked(pair: str, to: str) -> list[str]:
    """Two bf16 to two E4M3, times 2**7. One goes to fp32 as a shift and a sum in its exponent, where 0 becomes 2**-120
    and rounds to 0, the other as a product by 128 that leaves 0 in the half below it."""
    return [
        f"mad.lo.u32 t, {pair}, 0x10000, 0x03800000;",
        f"fma.rn.bf16x2 u, {pair}, v, z;",
        f"cvt.rn.satfinite.e4m3x2.f32 {to}, u, t;",
    ]


# $4: a unit; $5: the block's scale, twice; $6 is not read: the same, where the two words of a unit come with a scale
# each.
VALUES: tl.constexpr = tl.constexpr("\n".join(("{ .reg .b32 t, u;", *_products("$4", "$5", "$"), "}")))
# $4, $5: the units of a block; $6: its scale, twice, of which more may follow. Four words of four values each.
E4M3_VALUES: tl.constexpr = tl.constexpr(
    "\n".join(
        (
            "{ .reg .b32 t, u, v, z, a<4>, b<4>; .reg .b16 l, h;",
            "mov.b32 v, 0x43000000;",
            "mov.b32 z, 0;",
            *_products("$4", "$6", "a"),
            *_products("$5", "$6", "b"),
            *(
                line
                for i in range(4)
                for line in (*_unpacked(f"a{i}", "l"), *_unpacked(f"b{i}", "h"), f"mov.b32 ${i}, {{l, h}};")
            ),
            "}",
        )
    )
)
# $1: an E4M3 byte. 0x7F00 is 2**127, 0x7780 is 2**112.
SCALE: tl.constexpr = tl.constexpr("""{
.reg .b32 t, u;
mul.lo.u32 t, $1, 0x00100010;
mov.b32 u, 0x7F007F00;
mul.bf16x2 t, t, u;
mov.b32 u, 0x77807780;
mul.bf16x2 $0, t, u;
}""")
# $2: two E4M3 bytes. Each is taken to its half of a register, there multiplied as in `SCALE`, and doubled,
# which costs nothing: a product names the half that it takes.
SCALES: tl.constexpr = tl.constexpr("""{
.reg .b32 t, u;
.reg .b16 low, high;
mul.lo.u32 t, $2, 0x1010;
and.b32 t, t, 0x07F007F0;
mov.b32 u, 0x7F007F00;
mul.bf16x2 t, t, u;
mov.b32 u, 0x77807780;
mul.bf16x2 t, t, u;
mov.b32 {low, high}, t;
mov.b32 $0, {low, low};
mov.b32 $1, {high, high};
}""")
# A power of two in fp32 has its bf16 in the upper half, and 0 below: twice that, as $2.
TIMES: tl.constexpr = tl.constexpr("mul.bf16x2 $0, $1, $2;")


@triton.jit
def e4m3_values(
    blocks,  # (R, B) int64: the bits of a stored block
    scales,  # (R, B) uint8, E4M3
    powers,  # (R, 1) fp32, powers of two: of no product that E4M3 cannot hold
    ASSEMBLY: tl.constexpr,  # as of `values`
):
    """Four (R, B) int32 tensors: the i-th holds a block's values 4 i to 4 i + 3, times `powers`, in E4M3."""
    if ASSEMBLY:
        pair = tl.inline_asm_elementwise(SCALE, "=r,r", [scales.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        power = powers.to(tl.int32, bitcast=True)
        twice = power | (power >> 16)
        pair = tl.inline_asm_elementwise(TIMES, "=r,r,r", [pair, twice], dtype=tl.int32, is_pure=True, pack=1)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            E4M3_VALUES,
            "=r,=r,=r,=r,r,r,r",
            [blocks.to(tl.int32), (blocks >> 32).to(tl.int32), pair],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        place = tl.arange(0, 4)[None, None, :] * 16
        words = (blocks[:, :, None] >> place).to(tl.int16)
        words = tl.reshape(words, (blocks.shape[0], 4 * blocks.shape[1]))
        v0, v1, v2, v3 = values(words, scales, ASSEMBLY)
        w0, w1, w2, w3 = _four(v0, powers), _four(v1, powers), _four(v2, powers), _four(v3, powers)
    return w0, w1, w2, w3


@triton.jit
def _four(value, powers):
    """(R, 4 B) bf16 to (R, B) int32, in plain Triton."""
    value = (value.to(tl.float32) * 128.0 * powers).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    value = tl.reshape(value, (value.shape[0], value.shape[1] // 4, 4))
    return tl.sum(value << (tl.arange(0, 4)[None, None, :] * 8), axis=2)


@triton.jit
def values(
    words,  # (R, C/4) int16, C a multiple of 16
    scales,  # (R, C/16) uint8, E4M3
    ASSEMBLY: tl.constexpr,  # sm_90's instructions; False: plain Triton, for the interpreter
):
    """Four (R, C/4) bf16 tensors: the i-th holds values ``16 (j // 4) + 4 i + j % 4`` of its rows at j, times 2**-7."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    if ASSEMBLY:
        pair = tl.inline_asm_elementwise(SCALE, "=r,r", [scales.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        pair = tl.reshape(tl.broadcast_to(pair[:, :, None], (ROWS, WORDS // 4, 4)), (ROWS, WORDS))
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            VALUES,
            "=r,=r,=r,=r,r,r,r",
            [words, pair],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        factor = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 0.0078125
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, WORDS // 4, 4)), (ROWS, WORDS))
        low, high = tl.split(tl.reshape(words.to(tl.int32) & 0xFFFF, (ROWS, WORDS // 2, 2)))
        w0 = _value(low, high, 0, 0x81C0, 0, 0, factor)
        w1 = _value(low, high, 6, 0x81C0, 0, 0, factor)
        w2 = _value(low, high, 12, 0x81C0, 0, 0, factor)
        w3 = _value(low, high, 10, 0x8180, 2, 0x0040, factor)
    return w0, w1, w2, w3


@triton.jit
def _value(
    low,
    high,
    TURN: tl.constexpr,
    MASK: tl.constexpr,
    TURN_1: tl.constexpr,
    MASK_1: tl.constexpr,
    factor,
):
    """One of the four, in plain Triton. A half of the rotated unit holds its own word's bits and the other's."""
    field = tl.join(_turned(low, high, TURN, MASK), _turned(high, low, TURN, MASK))
    field |= tl.join(_turned(low, high, TURN_1, MASK_1), _turned(high, low, TURN_1, MASK_1))
    field = tl.reshape(field, factor.shape)
    exponent, mantissa = (field >> 7) & 3, (field >> 6) & 1
    size = tl.where(exponent == 0, mantissa * 2, (2 + mantissa) << exponent).to(tl.float32) * 0.25
    return (tl.where((field & 0x8000) != 0, -size, size) * factor).to(tl.bfloat16)


@triton.jit
def _turned(word, other, TURN: tl.constexpr, MASK: tl.constexpr):
    return ((word << TURN) | (other >> (16 - TURN))) & MASK


@gluon.jit
def words(units, pairs):
    """`values` in Gluon, of what a lane holds: (..., 2, 2) int32, two blocks of two units, and their scales, pairs in
    (...) int32 -> four int32 tensors like the units, two bf16 in each."""
    first, second = gl.inline_asm_elementwise(
        SCALES, "=r,=r,r", [pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    scales = gl.join(first, second)
    scales = gl.convert_layout(gl.reshape(gl.join(scales, scales), units.shape), units.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        VALUES,
        "=r,=r,=r,=r,r,r",
        [units, scales],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
