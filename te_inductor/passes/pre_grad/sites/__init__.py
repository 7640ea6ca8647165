"""The forms of linear layers. RULES are tried in order; the first that matches a node owns it."""

from te_inductor.passes.pre_grad.sites.grouped import Grouped, ManyBatched
from te_inductor.passes.pre_grad.sites.linear import Addmm, Batched, LinearCall, ParameterProduct
from te_inductor.passes.pre_grad.sites.picked import Picked

RULES = (LinearCall(), ParameterProduct(), Addmm(), Grouped(), Picked(), ManyBatched(), Batched())
