"""What users say of a region of a graph by `torch.fx.traceback.annotate`, and what torch says by it, such as
`torch.autograd.graph.region_activation_memory_budget`, which refuses a graph of which some op is not in its region."""

from collections.abc import Iterable

from torch import fx

_KEY = "custom"  # where `annotate` writes


def spread(graph: fx.Graph) -> None:
    """Give nodes that a rewrite has made, which are the ones without any meta, the annotations of the node behind them,
    for whose sake they stand there; at the end of the graph, those of the node in front."""
    for nodes in (reversed(graph.nodes), graph.nodes):
        _copy(node for node in nodes if node.op.startswith("call_"))


def _copy(nodes: Iterable[fx.Node]) -> None:
    annotations = None
    for node in nodes:
        if not node.meta and annotations:
            node.meta[_KEY] = annotations
        annotations = node.meta.get(_KEY)
