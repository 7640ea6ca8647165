"""One fp32 number in a CuTe DSL kernel: the steps of an `Activation`, in the instructions that Triton's kernels have
for them. Read by `build.py`'s process alone."""

# mypy: ignore-errors

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from te_inductor.templates.triton.ptx import SIGMOID


def _assembly(text: str, x, loc, ip):
    """PTX that makes one fp32 number of another."""
    value = Float32(x).ir_value(loc=loc, ip=ip)
    return Float32(llvm.inline_asm(T.f32(), [value], text, "=f,f", has_side_effects=False, loc=loc, ip=ip))


@dsl_user_op
def rounded(x, *, loc=None, ip=None):
    """Rounds to bf16 and back: in the upper half of a word with zeros below, it is that fp32 number."""
    return _assembly("{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $1, 0f00000000; mov.b32 $0, t; }", x, loc, ip)


@dsl_user_op
def _sigmoid(x, *, loc=None, ip=None):
    return _assembly(SIGMOID, x, loc, ip)


@dsl_user_op
def _relu(x, *, loc=None, ip=None):
    """NaN stays."""
    values = (Float32(operand).ir_value(loc=loc, ip=ip) for operand in (x, 0.0))
    return Float32(arith.maximumf(*values, loc=loc, ip=ip))


# What the steps of an activation are of one number.
STEPS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "neg": lambda x: -x,
    "relu": _relu,
    "erf": cute.math.erf,
    "tanh": cute.math.tanh,
    "sigmoid": _sigmoid,
}
