"""The region of `autocast` that each node of a Dynamo graph is in: Note [Regions] in te_inductor/recipes/regions.py."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import fx
from torch._guards import TracingContext

from te_inductor.diagnostics import Refusal
from te_inductor.passes.graph.bodies import in_order
from te_inductor.recipes.regions import Region, enter_region, exit_region

_MARKERS = (enter_region, exit_region)

# Regions that a piece of a graph leaves open, by the trace that it is a piece of: DistributedDataParallel cuts Dynamo's
# graph between its buckets, and has the pieces compiled in order.
_open: WeakKeyDictionary[TracingContext, list[Region | None]] = WeakKeyDictionary()


def regions_of(root: fx.GraphModule) -> dict[fx.Node, list[Region | None]]:
    """The innermost region around each node, None outside of all; several where a body is called from several
    regions."""
    found: dict[fx.Node, list[Region | None]] = {}
    trace = TracingContext.try_get()
    nested: list[Region | None] = (_open.pop(trace, []) if trace else []) or [None]
    for node in in_order(root):
        if node.target is enter_region:
            nested.append(node.args[0])  # type: ignore[arg-type]
        elif node.target is exit_region and len(nested) > 1:
            nested.pop()
        regions = found.setdefault(node, [])
        if nested[-1] not in regions:
            regions.append(nested[-1])
    if trace and len(nested) > 1:
        _open[trace] = nested
    return found


def refusal(regions: Sequence[Region | None]) -> Refusal | None:
    """Why a site that is called from these regions cannot have the recipe of each."""
    if len(regions) > 1:
        return Refusal("one body is called under %d different autocasts", len(regions))
    return None


def erase(graph: fx.Graph) -> None:
    for node in [node for node in graph.nodes if node.target in _MARKERS]:
        graph.erase_node(node)
