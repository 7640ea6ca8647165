"""Graphs inside graphs: the bodies of higher-order ops, such as checkpoint's, and how a node of the outer graph gets
in."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

# Higher-order ops called as op(body, *operands), whose body runs as a part of the graph around it.
_CHECKPOINT = "tag_activation_checkpoint"
_PLAIN = (_CHECKPOINT, "wrap")


def in_order(root: fx.GraphModule) -> Iterator[fx.Node]:
    """All nodes as they run, those of a body before each call of it; a body that is called twice comes twice."""
    for node in root.graph.nodes:
        for argument in node.all_input_nodes:
            body = getattr(root, str(argument.target), None) if argument.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                yield from in_order(body)
        yield node


@dataclass
class Bodies:
    """The graph modules of one Dynamo graph, and which node calls each."""

    root: fx.GraphModule
    callers: dict[fx.Graph, fx.Node] = field(default_factory=dict)  # of bodies that operands can be handed to
    _handed: dict[tuple[fx.Graph, fx.Node], fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.root.modules():
            if not isinstance(module, fx.GraphModule):
                continue
            for node in module.graph.find_nodes(op="get_attr"):
                body = getattr(module, str(node.target), None)
                if isinstance(body, fx.GraphModule) and len(node.users) == 1:
                    [call] = node.users
                    if getattr(call.target, "__name__", "") in _PLAIN and call.args[0] is node:
                        self.callers[body.graph] = call

    def reaches(self, graph: fx.Graph) -> bool:
        """Whether nodes of the root's graph can be handed to this one."""
        return graph is self.root.graph or (graph in self.callers and self.reaches(self.callers[graph].graph))

    def is_computed_again(self, graph: fx.Graph) -> bool:
        """Whether a checkpoint runs it once more in the backward."""
        caller = self.callers.get(graph)
        if caller is None:
            return False
        return getattr(caller.target, "__name__", "") == _CHECKPOINT or self.is_computed_again(caller.graph)

    def in_grad_mode(self) -> set[fx.Node]:
        """The nodes that run with gradients enabled, in bodies as in the graph that calls them."""
        found: set[fx.Node] = set()
        called = {call: graph for graph, call in self.callers.items()}

        def visit(graph: fx.Graph, enabled: bool) -> None:
            for node in graph.nodes:
                if node.target is torch._C._set_grad_enabled:
                    enabled = bool(node.args[0])
                if enabled:
                    found.add(node)
                if node in called:
                    visit(called[node], enabled)

        visit(self.root.graph, torch.is_grad_enabled())
        return found

    def outer(self, node: fx.Node) -> fx.Node:
        """The root's node that a body's operand stands for; any other node as it is."""
        if node.op != "placeholder" or node.graph not in self.callers:
            return node
        position = node.graph.find_nodes(op="placeholder").index(node)
        argument = self.callers[node.graph].args[1 + position]
        return self.outer(argument) if isinstance(argument, fx.Node) else node

    def readers(self) -> dict[fx.Node, set[fx.Node]]:
        """The nodes that read each node, in its own graph and in the bodies that it is handed to."""
        found: dict[fx.Node, set[fx.Node]] = {}
        calls = set(self.callers.values())
        for module in self.root.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                for source in node.all_input_nodes if node not in calls else ():
                    found.setdefault(self.outer(source), set()).add(node)
        return found

    def hand(self, node: fx.Node, graph: fx.Graph) -> fx.Node:
        """`node` of the root's graph, as `graph` sees it: an operand more of each body on the way."""
        if graph is self.root.graph:
            return node
        key = (graph, node)
        if key not in self._handed:
            call = self.callers[graph]
            operand = self.hand(node, call.graph)
            last = graph.find_nodes(op="placeholder")[-1]
            with graph.inserting_after(last):
                inner = graph.placeholder(f"te_{node.name}")
            inner.meta = dict(node.meta)
            call.args = (*call.args, operand)
            self._handed[key] = inner
        return self._handed[key]
