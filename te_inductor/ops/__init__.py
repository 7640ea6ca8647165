"""The op set: fine-grained, functional ops whose graph Inductor can fuse, and the linear layer made of them. One file a
family: `casts`, `gemm`, `delayed`, `linear`, `stored` (weights in low precision), `attention` (of decoding).
"""

from te_inductor.ops.casts import (
    Copy,
    copies,
    current_scale,
    dequantize,
    hadamard,
    quantize,
    quantize_delayed,
    quantize_pieces,
    quantize_pieces_delayed,
    quantize_rowcol,
    quantize_rowcol_delayed,
    tensor_amax,
)
from te_inductor.ops.delayed import delayed_step, read_scales, record_amax, update_scales
from te_inductor.ops.gemm import accumulate_wgrad, defer_wgrad, product, scaled_mm
from te_inductor.ops.linear import first_linears, linears, trace_linears

__all__ = [
    "Copy",
    "accumulate_wgrad",
    "copies",
    "current_scale",
    "defer_wgrad",
    "delayed_step",
    "dequantize",
    "first_linears",
    "hadamard",
    "linears",
    "product",
    "quantize",
    "quantize_delayed",
    "quantize_pieces",
    "quantize_pieces_delayed",
    "quantize_rowcol",
    "quantize_rowcol_delayed",
    "read_scales",
    "record_amax",
    "scaled_mm",
    "tensor_amax",
    "trace_linears",
    "update_scales",
]
