"""The op set: fine-grained, functional ops whose graph Inductor can fuse, and the linear layer made of them. One file a
family: `casts`, `gemm`, `delayed`, `grouped` (of experts), `layers` (linear layers), `stored` (weights in low
precision), `masked_attention`, `losses` (of output layers), `fixed_order` (sums in one
order); `written_out` (what leaves this process).
"""

from te_inductor.ops import masked_attention, stored
from te_inductor.ops.casts import (
    Copy,
    copies,
    current_scale,
    dequantize,
    hadamard,
    pad_rows,
    quantize,
    quantize_delayed,
    quantize_pieces,
    quantize_pieces_delayed,
    quantize_rowcol,
    quantize_rowcol_delayed,
    tensor_amax,
    transpose,
    values,
)
from te_inductor.ops.delayed import delayed_step, read_scales, record_amax, scale_at, update_scales
from te_inductor.ops.fixed_order import fixed_attention, fixed_linear, fixed_mm
from te_inductor.ops.gemm import accumulate_wgrad, defer_wgrad, product, scaled_mm
from te_inductor.ops.grouped import (
    accumulate_grouped_wgrad,
    equal_groups,
    experts_scale,
    grouped_mm,
    grouped_wgrad,
    mask_copy,
    mask_rows,
    quantize_experts,
    quantize_experts_delayed,
    quantize_experts_rows,
    quantize_groups,
    scaled_grouped_mm,
    transpose_groups,
)
from te_inductor.ops.layers.call import (
    exported_grouped_linears,
    exported_linears,
    layers,
    record_shard_amax,
    trace_layers,
)
from te_inductor.ops.layers.layer import LayerSpec
from te_inductor.ops.layers.losses import output_loss
from te_inductor.ops.layers.operands import local_of, replicated
from te_inductor.ops.losses import scaled_token_losses, token_losses
from te_inductor.ops.masked_attention import decode_attention
from te_inductor.ops.permutations import permute_rows, place_rows, places_of, spread_rows, sum_rows, take_rows
from te_inductor.ops.sharded_weight import gather_weight, record_weight_amax, shard_scales
from te_inductor.ops.stored import nvfp4_shared_amax, nvfp4_store, nvfp4_trained
