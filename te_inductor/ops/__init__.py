"""The op set: fine-grained, functional ops whose graph Inductor can fuse, and the linear layer made of them. One file a
family: `casts`, `gemm`, `delayed`, `linear`, `grouped` and `grouped_linear` (of experts), `stored` (weights in low
precision), `attention` (of decoding).
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
    transpose,
)
from te_inductor.ops.delayed import delayed_step, read_scales, record_amax, update_scales
from te_inductor.ops.gemm import accumulate_wgrad, defer_wgrad, product, scaled_mm
from te_inductor.ops.grouped import (
    accumulate_grouped_wgrad,
    defer_grouped_wgrad,
    experts_scale,
    grouped_mm,
    grouped_wgrad,
    quantize_experts,
    quantize_experts_delayed,
    quantize_experts_rows,
    quantize_groups,
    scaled_grouped_mm,
    transpose_groups,
)
from te_inductor.ops.grouped_linear import (
    equal_groups,
    first_grouped_linears,
    grouped_linears,
    mask_rows,
    permute_rows,
    places_of,
    trace_grouped_linears,
)
from te_inductor.ops.linear import first_linears, linears, trace_linears
from te_inductor.ops.parallel_linear import first_parallel_linears, parallel_linears, record_shard_amax
from te_inductor.ops.sharded_weight import first_gather_weight, gather_weight, record_weight_amax, shard_scales

__all__ = [
    "Copy",
    "accumulate_grouped_wgrad",
    "accumulate_wgrad",
    "copies",
    "current_scale",
    "defer_grouped_wgrad",
    "defer_wgrad",
    "delayed_step",
    "dequantize",
    "equal_groups",
    "experts_scale",
    "first_gather_weight",
    "first_grouped_linears",
    "first_linears",
    "first_parallel_linears",
    "gather_weight",
    "grouped_linears",
    "grouped_mm",
    "grouped_wgrad",
    "hadamard",
    "linears",
    "mask_rows",
    "parallel_linears",
    "permute_rows",
    "places_of",
    "product",
    "quantize",
    "quantize_delayed",
    "quantize_experts",
    "quantize_experts_delayed",
    "quantize_experts_rows",
    "quantize_groups",
    "quantize_pieces",
    "quantize_pieces_delayed",
    "quantize_rowcol",
    "quantize_rowcol_delayed",
    "read_scales",
    "record_amax",
    "record_shard_amax",
    "record_weight_amax",
    "scaled_grouped_mm",
    "scaled_mm",
    "shard_scales",
    "tensor_amax",
    "trace_grouped_linears",
    "trace_linears",
    "transpose",
    "transpose_groups",
    "update_scales",
]
