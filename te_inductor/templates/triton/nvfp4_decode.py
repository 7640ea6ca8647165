"""From stored NVFP4 to bf16 in registers: what the kernels of this folder share.

Note [Order of a stored block] in runtime/nvfp4.py says where the bits are. Two neighbouring 16-bit words, one 32-bit unit,
are eight values; `VALUES` makes of it four registers of two bf16 each. Masked out of the rotated unit, a field is its value
times 2**-126, and an E4M3 byte shifted left by 4 is, as bf16, its value times 2**-120. `_SCALE` multiplies that by 2**239,
in two steps, so that the one product of both is ``value * scale * 2**-7``: exact, with at most 6 significant bits, neither
huge nor subnormal. `FACTOR` makes up for it where the sums are read.
"""

import triton
import triton.language as tl

FACTOR = 2.0**7

# $4: a unit; $5: the block's scale, twice; $6 is not read: the same, where the two words of a unit come with a scale each.
# Two turns bring nothing round that the mask leaves, and are shifts, which the pipe of multiplications can do.
VALUES: tl.constexpr = tl.constexpr("""{
.reg .b32 t, u;
and.b32 t, $4, 0x81C081C0;
mul.bf16x2 $0, t, $5;
shl.b32 t, $4, 6;
and.b32 t, t, 0x81C081C0;
mul.bf16x2 $1, t, $5;
shf.l.wrap.b32 t, $4, $4, 12;
and.b32 t, t, 0x81C081C0;
mul.bf16x2 $2, t, $5;
shf.l.wrap.b32 t, $4, $4, 10;
and.b32 t, t, 0x81808180;
shl.b32 u, $4, 2;
and.b32 u, u, 0x00400040;
or.b32 t, t, u;
mul.bf16x2 $3, t, $5;
}""")
# $1: an E4M3 byte. 0x7F00 is 2**127, 0x7780 is 2**112.
_SCALE: tl.constexpr = tl.constexpr("""{
.reg .b32 t, u;
mul.lo.u32 t, $1, 0x00100010;
mov.b32 u, 0x7F007F00;
mul.bf16x2 t, t, u;
mov.b32 u, 0x77807780;
mul.bf16x2 $0, t, u;
}""")


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
        pair = tl.inline_asm_elementwise(_SCALE, "=r,r", [scales.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
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
