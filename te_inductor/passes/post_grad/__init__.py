"""The passes on Inductor's graphs, after autograd and the split into forward and backward. Graphs that neither quantize nor
have stored weights are left as they are.
"""

from te_inductor import fused
from te_inductor.passes.graph import activations, casts
from te_inductor.passes.graph.casts import where_quantized
from te_inductor.passes.post_grad import async_tp, delayed_scales, padded_rows, rotary_tables

PASSES = (
    delayed_scales.check_scales,
    delayed_scales.release_scales,
    where_quantized(casts.share),
    where_quantized(activations.share_sigmoids),
    where_quantized(rotary_tables.keep),
    where_quantized(padded_rows.pad),
    async_tp.expose,  # before what would take a product for a kernel of ours
    *fused.folds("post_grad"),
    where_quantized(activations.fold_gelu),  # of what no kernel above has taken
)
