"""The passes on Inductor's graphs, after autograd and the split into forward and backward. Graphs that neither quantize nor
have stored weights are left as they are.
"""

import torch
from torch import fx

from te_inductor import fused, ops
from te_inductor.errors import StateError
from te_inductor.passes.graph import activations, casts
from te_inductor.passes.graph.casts import where_quantized
from te_inductor.passes.post_grad import async_tp, padded_rows, rotary_tables


def check_scales(graph: fx.Graph) -> None:
    """Checks that no backward reads delayed scaling's scales for itself, which recompute.py has torch save: they would
    be the next step's.

    Raises:
        StateError: one does.
    """
    backward = any("tangent" in str(node.target) for node in graph.find_nodes(op="placeholder"))
    if backward and graph.find_nodes(op="call_function", target=ops.read_scales):
        raise StateError(
            "delayed scaling's scales are read again by the backward, behind the update of the step, expected those of"
            " its forward: torch's partitioner was told to save them and did not; set"
            " torch._functorch.config.activation_memory_budget = 1, or take a recipe without state"
        )


def release_scales(graph: fx.Graph) -> None:
    """The end of delayed scaling's step has the copies of its scales for the partitioner's sake (Note [A step under
    delayed scaling]). Inductor would make all weights' casts first for it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
        if node.args[0] is ops.update_scales and node.kwargs.get("read") is not None:
            node.update_kwarg("read", None)


PASSES = (
    check_scales,
    release_scales,
    where_quantized(casts.share),
    where_quantized(activations.share_sigmoids),
    where_quantized(rotary_tables.keep),
    where_quantized(padded_rows.pad),
    async_tp.expose,  # before what would take a product for a kernel of ours
    *fused.folds("post_grad"),
    where_quantized(activations.fold_gelu),  # of what no kernel above has taken
)
