"""The passes on AOTAutograd's joint graph, before it is split into forward and backward."""

from te_inductor import fused
from te_inductor.passes.graph.casts import where_quantized
from te_inductor.passes.joint import concatenations, gathers, recompute, token_order

PASSES = (
    where_quantized(token_order.compute),
    where_quantized(concatenations.cast_pieces),
    *fused.folds("joint"),
    recompute.mark,
    gathers.mark,
)
LAST_PASSES = (gathers.mark,)  # behind torch's own passes, and the user's
