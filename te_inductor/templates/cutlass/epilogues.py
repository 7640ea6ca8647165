"""What the GEMM's kernel does to the fp32 accumulator before it is stored. Read by `build.py`'s process alone.

quack calls each of these once an element while it traces the kernel; `a_scale`, `b_scale` and `bias` are values of that
element's row, column or of the whole tensor.
"""

from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import ColVecLoad, RowVecLoad

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


# By whether scales are of rows, and whether there is a bias.
EPILOGUES = {
    (False, False): scaled,
    (False, True): scaled_bias,
    (True, False): row_scaled,
    (True, True): row_scaled_bias,
}
