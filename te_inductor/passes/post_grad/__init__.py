"""The passes on Inductor's graphs, after autograd and the split into forward and backward. Graphs that neither quantize
nor have stored weights are left as they are."""

from te_inductor.passes.graph.casts import where_quantized
from te_inductor.passes.post_grad import (
    cse,
    decode_attention,
    delayed_scales,
    quantized_epilogue,
    residual_epilogue,
    rotary_tables,
    shared_sigmoid,
)

PASSES = (
    delayed_scales.check_scales,
    delayed_scales.release_scales,
    where_quantized(cse.share),
    where_quantized(shared_sigmoid.fold),
    where_quantized(rotary_tables.keep),
    where_quantized(residual_epilogue.fold),
    where_quantized(quantized_epilogue.fold),
    decode_attention.fold,
)
