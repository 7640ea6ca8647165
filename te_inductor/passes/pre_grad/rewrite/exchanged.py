"""What is left of an exchange of rows between ranks that a layer does itself: how many rows came."""

from collections.abc import Iterable

import torch

from te_inductor.passes.graph.values import value
from te_inductor.passes.pre_grad.plan import Candidate
from te_inductor.passes.pre_grad.sites.exchanges import Exchanges


def ask_for_sizes(sites: Iterable[Candidate]) -> None:
    """Have what asks for sizes of the rows that came ask a tensor of those sizes, whose values nobody reads."""
    for site in sites:
        part = site.match.part(Exchanges)
        found = None if part is None else part.arrives
        for node in part.sizes_of if part is not None else ():
            if found is None or found.waited not in node.all_input_nodes:  # done for another site
                continue
            graph = node.graph
            with graph.inserting_before(node):
                rows = graph.call_function(torch.sym_sum, (list(found.received),))
                shape = [rows, *value(found.rows).shape[1:]]
                like = graph.call_function(torch.ops.aten.new_empty.default, (found.rows, shape))
            like.meta = dict(found.waited.meta)
            node.replace_input_with(found.waited, like)
