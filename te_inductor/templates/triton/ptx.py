"""PTX for Triton's `inline_asm_elementwise`; no import of Triton.

# Note [Casts in PTX]
A cast makes words of four elements. Triton's own makes pairs of 16 bits by the same instruction. Where a kernel stores
them both as they are and, transposed, byte by byte, ptxas 12.8, which Triton 3.6 and 3.7 bring, may read halves of a
pair before it writes them: a quarter of a column copy is then what registers held before. Seen on an H200, 2026-11-22,
with Triton 3.6 and sources that torch 2.13 wrote, in a weight's copies with square blocks and in SwiGLU's backward
under delayed scaling. The PTX is right, and which kernels are hit changes with everything else; Triton issue 11111
looks like it. Pairs that become a word and are used nowhere else leave nothing to be moved."""

import math
import struct

import torch

# 1 / (1 + 2**(x * -log2(e))), in four instructions. Triton's takes twelve on sm_90, of which eight are for exponentials
# below 2**-126 and denominators above 2**126. Neither changes a sigmoid above 2**-126; below, this one is 0. Both
# approximations are to 2 ulp or better (PTX ISA, ex2.approx.ftz.f32, rcp.approx.ftz.f32), as Triton's are.
SIGMOID = (
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"
    " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"
)

# erfc(x), for z = |x| and t = 1 / (1 + z / 2) as t exp(-z^2 + a polynomial of t), of which x < 0 takes 2 less: Press et
# al., Numerical Recipes, "erfcc", within 1.2e-7 of erfc, relative. The exponent's rounding adds z^2 / 2^24 to that.
_ERFC_POLYNOMIAL = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip


def _float(value: float) -> str:
    """Writes an fp32 constant as PTX does."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


ERFC = "".join(
    (
        "{ .reg .f32 z, t, e, minus; .reg .pred low; ",
        f"abs.f32 z, $1; fma.rn.f32 t, z, {_float(0.5)}, {_float(1.0)}; rcp.approx.ftz.f32 t, t; ",
        f"mov.f32 e, {_float(_ERFC_POLYNOMIAL[0])}; ",
        *(f"fma.rn.f32 e, e, t, {_float(coefficient)}; " for coefficient in _ERFC_POLYNOMIAL[1:]),
        "neg.f32 minus, z; fma.rn.f32 e, minus, z, e; ",
        f"mul.f32 e, e, {_float(math.log2(math.e))}; ex2.approx.ftz.f32 e, e; mul.f32 e, e, t; ",
        f"setp.lt.f32 low, $1, {_float(0.0)}; sub.f32 t, {_float(2.0)}, e; selp.f32 $0, t, e, low; }}",
    )
)


def _cast(element: str) -> str:
    """Casts four fp32, the first into the lowest byte: to nearest even, saturating, an infinity too; NaN stays."""
    pair = f"cvt.rn.satfinite.{element}x2.f32"
    return f"{{ .reg .b16 low, high; {pair} low, $2, $1; {pair} high, $4, $3; mov.b32 $0, {{low, high}}; }}"


CASTS = {torch.float8_e4m3fn: _cast("e4m3"), torch.float8_e5m2: _cast("e5m2")}
CAST_CONSTRAINTS, CAST_PACK = "=r,f,f,f,f", 4

# The bytes of two words by turns: Note [Pairs of rows] in lowerings/codegen/column_pairs.py.
PAIRS = "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;"
PAIRS_CONSTRAINTS, PAIRS_PACK = "=r,=r,r,r", 4
