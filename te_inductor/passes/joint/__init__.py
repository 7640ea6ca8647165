"""The passes on AOTAutograd's joint graph, before it is split into forward and backward."""

from te_inductor.passes.joint import gated_dgrad, recompute
from te_inductor.passes.post_grad import residual_epilogue

PASSES = (residual_epilogue.fold, gated_dgrad.fold, recompute.mark)
