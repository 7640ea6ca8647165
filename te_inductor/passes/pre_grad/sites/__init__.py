"""The forms of linear layers. RULES are tried in order; the first that matches a node owns it."""

from te_inductor.passes.pre_grad.sites.grouped import Grouped, ManyBatched, Picked
from te_inductor.passes.pre_grad.sites.linear import Addmm, Batched, LinearCall, ParameterProduct

RULES = (LinearCall(), ParameterProduct(), Addmm(), Grouped(), Picked(), ManyBatched(), Batched())
