"""Words of 32 bits in a CuTe DSL kernel: pairs of bf16, fours of FP8, and how warps move them through shared memory.
Read by `build.py`'s process alone."""

# mypy: ignore-errors

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from te_inductor.templates.triton.ptx import CAST_CONSTRAINTS, CASTS


def _value(x, loc, ip):
    return x.ir_value(loc=loc, ip=ip)


def _word(text, constraints, *operands, loc, ip):
    """Computed of its operands alone."""
    values = [_value(x, loc, ip) for x in operands]
    return Int32(llvm.inline_asm(T.i32(), values, text, constraints, has_side_effects=False, loc=loc, ip=ip))


def _effect(result, text, constraints, *operands, loc, ip):
    """Reads or writes memory, in its place among what else does."""
    values = [_value(x, loc, ip) for x in operands]
    constraints = f"{constraints},~{{memory}}"
    return llvm.inline_asm(result, values, text, constraints, has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def pair(low, high, *, loc=None, ip=None):
    """Two fp32, rounded to bf16."""
    return _word("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", Float32(low), Float32(high), loc=loc, ip=ip)


@dsl_user_op
def magnitudes(word, *, loc=None, ip=None):
    """The magnitudes of a pair, without the signs: as unsigned numbers NaN is above infinity, and that above all
    others."""
    return _word("and.b32 $0, $1, 0x7FFF7FFF;", "=r,r", word, loc=loc, ip=ip)


@dsl_user_op
def larger(one, other, *, loc=None, ip=None):
    """The larger of two pairs of magnitudes, half by half."""
    return _word("max.u16x2 $0, $1, $2;", "=r,r,r", one, other, loc=loc, ip=ip)


@dsl_user_op
def largest(word, *, loc=None, ip=None):
    """The largest of a pair of magnitudes, in both halves."""
    text = "{ .reg .b32 t; prmt.b32 t, $1, $1, 0x1032; max.u16x2 $0, $1, t; }"
    return _word(text, "=r,r", word, loc=loc, ip=ip)


@dsl_user_op
def cast(element, first, second, third, fourth, *, loc=None, ip=None):
    """Four fp32 to FP8, the first into the lowest byte."""
    values = [Float32(x) for x in (first, second, third, fourth)]
    return _word(CASTS[element], CAST_CONSTRAINTS, *values, loc=loc, ip=ip)


def _number(text, word, loc, ip):
    """fp32, of a word."""
    text = f"{{ .reg .b32 t; {text} mov.b32 $0, t; }}"
    value = llvm.inline_asm(T.f32(), [_value(word, loc, ip)], text, "=f,r", has_side_effects=False, loc=loc, ip=ip)
    return Float32(value)


@dsl_user_op
def upper(word, *, loc=None, ip=None):
    """The fp32 number of a bf16 in the upper half."""
    return _number("and.b32 t, $1, 0xFFFF0000;", word, loc, ip)


@dsl_user_op
def lower(word, *, loc=None, ip=None):
    return _number("shl.b32 t, $1, 16;", word, loc, ip)


@dsl_user_op
def number(word, *, loc=None, ip=None):
    """The fp32 number with these bits."""
    return Float32(llvm.bitcast(T.f32(), _value(word, loc, ip), loc=loc, ip=ip))


def both(word):
    """The two fp32 numbers of a pair of bf16."""
    return lower(word), upper(word)


@dsl_user_op
def load_words(address, *, loc=None, ip=None):
    """Two, of shared memory."""
    two = llvm.StructType.get_literal([T.i32(), T.i32()])
    found = _effect(two, "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", address, loc=loc, ip=ip)
    return tuple(Int32(llvm.extractvalue(T.i32(), found, [place], loc=loc, ip=ip)) for place in range(2))


@dsl_user_op
def load_word(address, *, loc=None, ip=None):
    return Int32(_effect(T.i32(), "ld.shared.b32 $0, [$1];", "=r,r", address, loc=loc, ip=ip))


@dsl_user_op
def load_numbers(address, *, loc=None, ip=None):
    """Four fp32, of shared memory."""
    four = llvm.StructType.get_literal([T.f32()] * 4)
    text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    found = _effect(four, text, "=f,=f,=f,=f,r", address, loc=loc, ip=ip)
    return [Float32(llvm.extractvalue(T.f32(), found, [place], loc=loc, ip=ip)) for place in range(4)]


@dsl_user_op
def store_numbers(address, first, second, *, loc=None, ip=None):
    """Two fp32."""
    _effect(None, "st.shared.v2.f32 [$0], {$1, $2};", "r,f,f", address, Float32(first), Float32(second), loc=loc, ip=ip)


@dsl_user_op
def store_words(address, first, second, unless, *, loc=None, ip=None):
    """Two, where `unless` is 0."""
    text = "{ .reg .pred p; setp.eq.u32 p, $3, 0; @p st.shared.v2.b32 [$0], {$1, $2}; }"
    _effect(None, text, "r,r,r,r", address, first, second, unless, loc=loc, ip=ip)


@dsl_user_op
def store_matrices(address, words, transposed, *, loc=None, ip=None):
    """Four of 8 x 8 times 16 bits, a word of each a lane: the lane's row and two of its columns, or, `transposed`, the
    other way round. Of the i-th eight lanes the addresses are those of the rows of the i-th matrix in shared memory."""
    turn = ".trans" if transposed else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{turn}.shared.b16 [$0], {{$1, $2, $3, $4}};"
    _effect(None, text, "r,r,r,r,r", address, *words, loc=loc, ip=ip)
