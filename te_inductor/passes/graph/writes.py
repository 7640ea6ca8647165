"""What memory a graph writes, and where: whether a tensor is still what its node made.

# Note [Nodes and values]
A node of a graph that is not functional stands for a tensor, whose values an in-place operation changes behind the back
of all who read it: by itself, through a view, through ``.data``, as the ``out=`` of another operation, in a list, in
the body of a checkpoint. So whoever takes a value for what its node made (an index for a permutation, a cast for its
source), or moves a read from one place to another, asks `Writes` whether anything wrote the memory in between. A write
behind the last read, or in front of the first, changes nothing. Where a backward reads what the program's own would not,
the last read is behind the graph: see `last_read`.

Where a write stands is known of operations that are known to write. Others are seen by what they leave in the version
counter of a tensor. So where all tensors of a storage share one counter, and it has counted the operations that are
known and no more, the places of all writes are known. Any other storage that is written is taken to be written at all
places."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from te_inductor import compat
from te_inductor.passes.graph import operators
from te_inductor.passes.graph.aliases import Place, memory, origins, stored
from te_inductor.passes.graph.operators import Kind, name
from te_inductor.passes.graph.values import requires_grad

# What changes no values, whatever its name says.
_KEEPS_VALUES = operators.RESERVED | {
    *("requires_grad_", "detach_", "retain_grad", "share_memory_", "rename_", "is_shared")
}
# What gives a tensor other memory, after which its node no longer says what it had before.
_MOVES = frozenset(("set_", "resize_", "resize_as_", "swap_tensors"))
# Views that do not count the versions of what they are of.
_APART = frozenset(("data", "_unsafe_view"))


class Writes:
    """The memory that a graph and the bodies in it write. Asked in one graph, a body counts as the call of it."""

    def __init__(self, root: fx.Graph, places: Callable[[fx.Node], AbstractSet[Place]]) -> None:
        self._places = places
        self._unplaced: set[Place] = set()  # memory that is written at places that are not known
        self._of_graph: dict[fx.Graph, list[tuple[fx.Node, frozenset[Place]]]] = {}
        self._placed = self._find(root)

    def anywhere(self, *nodes: fx.Node) -> bool:
        """Whether the memory of any of these, of what was there before or of results, is written at any place."""
        asked = set[Place]().union(*map(self._places, nodes))
        return not asked.isdisjoint(self._placed) or not asked.isdisjoint(self._unplaced)

    def between(
        self,
        nodes: Iterable[fx.Node],
        since: fx.Node,
        until: fx.Node | None,
        besides: AbstractSet[fx.Node] = frozenset(),
    ) -> bool:
        """Whether the memory of any of `nodes` may be written behind `since` and in front of `until` (None: the graph's
        end), by anything but `besides`. The two may be the same node, and are of one graph."""
        until = until or since.graph.output_node()
        asked = set[Place]().union(*map(self._places, nodes))
        if not since < until or asked & self._unplaced:
            return since < until
        return any(
            since < node < until and node not in besides and places & asked
            for node, places in self._of_graph.get(since.graph, [])
        )

    def since(self, node: fx.Node, until: fx.Node) -> list[fx.Node] | None:
        """What writes a node's memory behind it and in front of `until`, in order; None where that is not known."""
        asked = self._places(node)
        if asked & self._unplaced:
            return None
        events = self._of_graph.get(node.graph, [])
        return [write for write, places in events if node < write < until and places & asked]

    def behind(
        self, nodes: Sequence[fx.Node], until: fx.Node | None, besides: AbstractSet[fx.Node] = frozenset()
    ) -> bool:
        """Whether any of `nodes` may hold something else than it was made with, when `until` runs."""
        return any(self.between([node], node, until, besides) for node in nodes)

    def within(
        self, nodes: Sequence[fx.Node], until: fx.Node | None, besides: AbstractSet[fx.Node] = frozenset()
    ) -> bool:
        """Whether any of `nodes` may hold something else than it was made with when the last other one of them has read
        it; one that none of them reads, when `until` runs."""
        return any(
            self.between([node], node, max((one for one in node.users if one in nodes), default=until), besides)
            for node in nodes
        )

    def _find(self, graph: fx.Graph) -> set[Place]:
        """Note what a graph writes and where, those of its bodies first, and return all of it."""
        events: list[tuple[fx.Node, frozenset[Place]]] = []
        for node in graph.nodes:
            places = set[Place]().union(*map(self._places, written_by(node)))
            for argument in node.all_input_nodes:
                body = getattr(graph.owning_module, str(argument.target), None) if argument.op == "get_attr" else None
                if isinstance(body, fx.GraphModule):
                    places |= self._written_in(body.graph, node)
            if places:
                events.append((node, frozenset(places)))
            if name(node) in _MOVES:
                self._unplaced |= places
        self._of_graph[graph] = events
        return set[Place]().union(*(places for _, places in events))

    def _written_in(self, body: fx.Graph, call: fx.Node) -> AbstractSet[Place]:
        """What a body writes, as the graph that calls it sees it."""
        return self._find(body)


class DynamoWrites(Writes):
    """The writes of a graph that Dynamo traced for some inputs, whose fake tensors share storages and count versions."""

    def __init__(self, root: fx.Graph, inputs: Sequence[object] = ()) -> None:
        super().__init__(root, memory)
        counters: dict[Place, set[int]] = defaultdict(set)
        counted: dict[Place, set[int]] = defaultdict(set)
        first = _first_versions(root, inputs)
        for graph in self._of_graph:
            for node in graph.nodes:
                for tensor, place in stored(node):
                    owner = id(_owner(tensor))
                    counted[place].add(tensor._version - first.get(owner, 0))
                    if not (counters[place] and _shares_counter(node)):
                        counters[place].add(owner)
        known = Counter(
            place for events in self._of_graph.values() for node, places in events if _counts(node) for place in places
        )
        several = {place for place, owners in counters.items() if len(owners) > 1}
        self._unplaced |= several & self._placed
        self._unplaced |= {place for place, versions in counted.items() if versions != {known[place]}}


class AtenWrites(Writes):
    """The writes of a graph of ATen's operators, whose schemas say what shares memory and what writes."""

    def __init__(self, root: fx.Graph) -> None:
        super().__init__(root, origins)

    def _written_in(self, body: fx.Graph, call: fx.Node) -> AbstractSet[Place]:
        """All operands, of a body that writes any."""
        return set[Place]().union(*map(origins, call.all_input_nodes)) if self._find(body) else frozenset()


def last_read(node: fx.Node) -> fx.Node | None:
    """Says until when what an operation in the place of a node reads has to stay as it is: None where a backward may
    read it again, which autograd holds to the same values."""
    return None if requires_grad(node) else node


def chain(node: fx.Node, *sources: fx.Node) -> list[fx.Node]:
    """The nodes by which a value is computed from `sources`, with it and without them. What equals a source, as another
    cast of the same tensor, counts as one, and both are among the nodes."""
    found: dict[fx.Node, None] = {}
    if sources:
        _follow(node, sources, min(sources), found, set())
    return list(found)


def _follow(
    node: fx.Node, sources: Sequence[fx.Node], first: fx.Node, found: dict[fx.Node, None], left: set[fx.Node]
) -> bool:
    if node in sources:
        return True
    alike = [one for one in sources if node.op.startswith("call_") and _call_of(one) == _call_of(node)]
    if node in found or alike:
        found |= dict.fromkeys([node, *alike])
        return True
    if node < first or node in left:
        return False
    reached = [_follow(one, sources, first, found, left) for one in node.all_input_nodes]
    if any(reached):
        found[node] = None
        return True
    left.add(node)
    return False


def _call_of(node: fx.Node) -> Any:
    return node.op, node.target, node.args, node.kwargs


def written_by(node: fx.Node) -> list[fx.Node]:
    """The operands that an operation may write, by its schema or its name."""
    target, called = node.target, name(node)
    if called in _KEEPS_VALUES or node.op not in ("call_function", "call_method"):
        return []
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target._schema)
    if isinstance(target, torch._ops.OpOverloadPacket):  # the overload is chosen later
        return [one for each in target.overloads() for one in _written_by_schema(node, getattr(target, each)._schema)]
    written: list[fx.Node] = []
    if "out" in node.kwargs:
        fx.map_arg(node.kwargs["out"], written.append)
    elif _counts(node) or (called.startswith("_foreach_") and called.endswith("_")):
        fx.map_arg(node.args[0], written.append)
    elif called == "triton_kernel_wrapper_mutation" or (called.endswith("_") and not called.endswith("__")):
        written += node.all_input_nodes  # of private functions any of them
    return written


def _counts(node: fx.Node) -> bool:
    """Whether an operation is known to count what it writes, once or more, in the version of its first operand or of
    its `out`."""
    target, called = node.target, name(node)
    if called in _MOVES | _KEEPS_VALUES or not any(isinstance(one, fx.Node) for one in node.args[:1]):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" and called.endswith("_")
    if node.kwargs.get("inplace") is True or isinstance(node.kwargs.get("out"), fx.Node):
        return True
    module = getattr(target, "__module__", None) or "torch"
    if module == "_operator" or called.startswith("__"):
        return operators.read(node).in_place
    public = node.op == "call_method" or module.partition(".")[0] == "torch"
    return public and called.endswith("_") and not called.startswith("_") and hasattr(torch.Tensor, called)


def _written_by_schema(node: fx.Node, schema: torch.FunctionSchema) -> list[fx.Node]:
    found: list[fx.Node] = []
    for place, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(operand, found.append)
    return found


def _shares_counter(node: fx.Node) -> bool:
    """Whether a tensor that a node returns of memory that was there before counts with the tensor that it is of."""
    called, kind, _ = operators.read(node)
    return _counts(node) or (kind in Kind.VIEW | Kind.BITS and called not in _APART)


def _first_versions(root: fx.Graph, inputs: Sequence[object]) -> dict[int, int]:
    """The first versions of inputs, by their fake tensors: one that lies in a larger buffer, as frameworks lay out
    parameters, is made by `set_`, which counts. Found by making all of them once more, in the same order."""
    nodes = [node for node in root.nodes if node.op == "placeholder"]
    if not any(tensor._version for node in nodes for tensor, _ in stored(node)):
        return {}
    mode, first = FakeTensorMode(), dict[int, int]()
    made = []  # alive, as the next one is made by what lies in the same buffer
    for node, given in zip(nodes, inputs, strict=False):
        held = compat.shard_of(given) if isinstance(given, torch.Tensor) else given
        if isinstance(held, torch.Tensor) and type(held) in (torch.Tensor, torch.nn.Parameter):
            made.append(mode.from_tensor(held))
            first |= {id(_owner(tensor)): made[-1]._version for tensor, _ in stored(node)}
    return first


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose versions it counts."""
    return tensor if tensor._base is None else tensor._base
