"""The passes on AOTAutograd's joint graph, before it is split into forward and backward."""

from te_inductor import fused
from te_inductor.passes.joint import recompute

PASSES = (*fused.folds("joint"), recompute.mark)
