"""AOTAutograd's partitioner under an activation memory budget."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from te_inductor.compat.patches import patch


def let_marks_be_saved(joint_graph: torch.fx.Graph) -> None:
    """What an activation memory budget wants of a graph in which something is marked as MUST_SAVE. Before 2.15 torch
    saves nothing but inputs under 0, not even that: the least budget stands in for it. A region's (from 2.13) has to be
    on every node of the forward, and is not on those by which AOTAutograd writes state back."""
    from torch._functorch import config

    least, region = 1e-9, "_region_activation_memory_budget"  # torch.fx.traceback.MEMORY_BUDGET_ANNOTATION_KEY
    budgets = {node.meta.get("custom", {}).get(region) for node in joint_graph.nodes} - {None}
    for node in joint_graph.nodes:
        if config.activation_memory_budget == 0:
            node.meta["memory_budget"] = least
        custom = node.meta.get("custom", {})
        written = node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"
        if len(budgets) == 1 and (region in custom or written):
            node.meta["custom"] = {**custom, region: max(*budgets, least)}


@contextmanager
def saving_a_minimum_cut() -> Iterator[None]:
    """Have torch's partitioner save one of its minimum cuts under every budget between 0 and 1: of a list that is
    marked as MUST_SAVE its tensors. Before 2.14, where a graph leaves nothing to weigh, it saves inputs and marked
    nodes as they are, a list as such, or, where an input is a size, not at all (pytorch/pytorch#188014). The last cut
    is what 2.14 saves."""
    from torch._functorch import partitioners

    choose, cut = partitioners.choose_saved_values_set, partitioners.solve_min_cut

    def choose_a_cut(*args: Any, **kwargs: Any) -> list[fx.Node]:
        cuts: list[list[fx.Node]] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = cut(*args, **kwargs)
            cuts.append(found[0])
            return found

        with patch("torch._functorch.partitioners.solve_min_cut", recorded):
            chosen = choose(*args, **kwargs)
        return chosen if not cuts or any(chosen is one for one in cuts) else cuts[-1]

    with patch("torch._functorch.partitioners.choose_saved_values_set", choose_a_cut):
        yield
