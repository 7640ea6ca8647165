"""The forms of linear layers. RULES are tried in order; the first that matches a node owns it."""

from te_inductor.passes.pre_grad.sites.grouped import Grouped, ManyBatched
from te_inductor.passes.pre_grad.sites.linear import Addmm, Batched, Linear, Product
from te_inductor.passes.pre_grad.sites.picked import Picked

RULES = (Linear(), Product(), Addmm(), Grouped(), Picked(), ManyBatched(), Batched())
