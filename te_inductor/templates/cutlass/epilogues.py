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

_OF_ROWS = {"a_scale": ColVecLoad("a_scale"), "b_scale": RowVecLoad("b_scale")}
_BIAS = {"bias": RowVecLoad("bias")}


@gemm_epilogue()
def scaled(acc, a_scale, b_scale):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale)}


@gemm_epilogue(ops=_BIAS)
def scaled_bias(acc, a_scale, b_scale, bias):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + bias}


@gemm_epilogue(ops=_OF_ROWS)
def row_scaled(acc, a_scale, b_scale):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale)}


@gemm_epilogue(ops={**_OF_ROWS, **_BIAS})
def row_scaled_bias(acc, a_scale, b_scale, bias):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + bias}


@gemm_epilogue()
def scaled_added(acc, c, a_scale, b_scale):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + c}


@gemm_epilogue(ops=_OF_ROWS)
def row_scaled_added(acc, c, a_scale, b_scale):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + c}


@gemm_epilogue(ops=_BIAS)
def scaled_bias_added(acc, c, a_scale, b_scale, bias):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + bias + c}


@gemm_epilogue(ops={**_OF_ROWS, **_BIAS})
def row_scaled_bias_added(acc, c, a_scale, b_scale, bias):  # type: ignore[no-untyped-def]
    return {"D": acc * (a_scale * b_scale) + bias + c}


@gemm_epilogue()
def plain(acc):  # type: ignore[no-untyped-def]
    return {"D": acc}


@gemm_epilogue(ops=_BIAS)
def plain_bias(acc, bias):  # type: ignore[no-untyped-def]
    return {"D": acc + bias}


@gemm_epilogue()
def factor(acc, alpha):  # type: ignore[no-untyped-def]
    return {"D": acc * alpha}


@gemm_epilogue(ops=_BIAS)
def factor_bias(acc, alpha, bias):  # type: ignore[no-untyped-def]
    return {"D": acc * alpha + bias}


# The epilogues by the scope of scales, whether there is a bias, and whether another tensor is added.
EPILOGUES = {
    (TENSOR.name, False, False): scaled,
    (TENSOR.name, True, False): scaled_bias,
    (TENSOR.name, False, True): scaled_added,
    (TENSOR.name, True, True): scaled_bias_added,
    (ROW.name, False, False): row_scaled,
    (ROW.name, True, False): row_scaled_bias,
    (ROW.name, False, True): row_scaled_added,
    (ROW.name, True, True): row_scaled_bias_added,
    (MX_1X32.name, False, False): plain,
    (MX_1X32.name, True, False): plain_bias,
    (NV_1X16.name, False, False): factor,
    (NV_1X16.name, True, False): factor_bias,
}


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
