"""What the GEMM's kernel does to the fp32 accumulator before it is stored. Read by `build.py`'s process alone.

quack calls each of these once an element while it traces the kernel; `a_scale`, `b_scale`, `alpha` and `bias` are
values of that element's row, column or of the whole tensor. What has scales of blocks comes multiplied with them."""

import functools
from typing import Any

from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import ColVecLoad, RowVecLoad

from te_inductor.numerics.activation import PointwiseStep, evaluate
from te_inductor.recipes.formats import MX_1X32, NV_1X16, ROW, TENSOR
from te_inductor.templates.cutlass.scalar_math import STEPS, rounded

_BIAS = {"bias": RowVecLoad("bias")}
_OF_ROWS = {"a_scale": ColVecLoad("a_scale"), "b_scale": RowVecLoad("b_scale")}


def scaled(acc, a_scale, b_scale):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale)}


def scaled_bias(acc, a_scale, b_scale, bias):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + bias}


def scaled_added(acc, c, a_scale, b_scale):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + c}


def scaled_bias_added(acc, c, a_scale, b_scale, bias):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + bias + c}


def plain(acc):  # type: ignore[no-untyped-def]
    return {"D": acc}


def plain_bias(acc, bias):  # type: ignore[no-untyped-def]
    return {"D": acc + bias}


def factor(acc, alpha):  # type: ignore[no-untyped-def]
    return {"D": acc * alpha}


def factor_bias(acc, alpha, bias):  # type: ignore[no-untyped-def]
    return {"D": acc * alpha + bias}


# The functions by the scope of scales, whether there is a bias, and whether another tensor is added.
_SCALED = {
    (False, False): scaled,
    (True, False): scaled_bias,
    (False, True): scaled_added,
    (True, True): scaled_bias_added,
}
_FUNCTIONS = {
    TENSOR.name: _SCALED,
    ROW.name: _SCALED,
    MX_1X32.name: {(False, False): plain, (True, False): plain_bias},
    NV_1X16.name: {(False, False): factor, (True, False): factor_bias},
}


def unquantized(scope: str, bias: bool, added: bool) -> Any:
    of_rows = _OF_ROWS if scope == ROW.name else {}
    return gemm_epilogue(ops=of_rows | (_BIAS if bias else {}))(_FUNCTIONS[scope][bias, added])


def quantized(steps: tuple[PointwiseStep, ...], bias: bool) -> Any:
    """One scale a tensor; the sum rounded to bf16 as if it were stored, the activation of it in fp32, and what is cast
    where it is stored, to nearest even, saturating; NaN stays, and an infinity becomes it."""
    activation = functools.partial(evaluate, steps, functions=STEPS)

    def scaled(value, scale):  # type: ignore[no-untyped-def]
        return value * scale + value * 0.0  # Note [Overflow stays visible] in lowerings/casts/values.py

    def plain(acc, a_scale, b_scale, scale):  # type: ignore[no-untyped-def]
        return {"D": scaled(activation(rounded(acc * (a_scale * b_scale))), scale)}

    def biased(acc, a_scale, b_scale, scale, bias):  # type: ignore[no-untyped-def]
        return {"D": scaled(activation(rounded(acc * (a_scale * b_scale) + bias)), scale)}

    return gemm_epilogue(ops=_BIAS)(biased) if bias else gemm_epilogue()(plain)
