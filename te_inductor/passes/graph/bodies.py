"""Graphs inside graphs: the bodies of higher-order ops, such as checkpoint's, and how a node of the outer graph gets
in."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

# Higher-order ops called as op(body, *operands), whose body runs as a part of the graph around it.
_CHECKPOINT = "tag_activation_checkpoint"
_PLAIN = (_CHECKPOINT, "wrap")
_FUNCTION = "autograd_function_apply"  # called as op(forward body, backward body, *operands)
# Operators with bodies that run more than once, or perhaps: which argument lists the operands that each run has the
# same of. A body takes them last, behind what a run hands to the next one and slices.
_SHARED = {
    "cond": 3,
    "while_loop": 3,
    "while_loop_stack_output": 3,
    "map_impl": 2,
    "scan": 3,
    "associative_scan": 2,
}


def in_order(root: fx.GraphModule) -> Iterator[fx.Node]:
    """All nodes as they run, those of a body before each call of it; a body that is called twice comes twice."""
    for node in root.graph.nodes:
        for argument in node.all_input_nodes:
            body = getattr(root, str(argument.target), None) if argument.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                yield from in_order(body)
        yield node


def _called(call: fx.Node) -> str:
    return getattr(call.target, "__name__", "")


def _shared(call: fx.Node, body: fx.Graph) -> Sequence[Any]:
    """What a higher-order op hands to its body last, the same of each run: operands, or, to a backward, what its forward
    has saved."""
    called = _called(call)
    if called == _FUNCTION:
        forward: Any = getattr(call.graph.owning_module, str(call.args[0].target))  # type: ignore[union-attr]
        return call.args[2:] if body is forward.graph else forward.graph.output_node().args[0][-1]
    if called in _PLAIN:
        return call.args[1:]
    if called == "invoke_subgraph":
        return call.args[2:]
    place = _SHARED.get(called)
    shared: Any = () if place is None or place >= len(call.args) else call.args[place]
    return shared if isinstance(shared, list | tuple) else ()


@dataclass
class Bodies:
    """The graph modules of one Dynamo graph, and which node calls each."""

    root: fx.GraphModule
    callers: dict[fx.Graph, fx.Node] = field(default_factory=dict)  # of bodies that operands can be handed to
    calls: dict[fx.Graph, list[fx.Node]] = field(default_factory=dict)  # of every body
    backwards: dict[fx.Graph, fx.Node] = field(default_factory=dict)  # calls of autograd.Functions, by that body
    by_hand: list[fx.Graph] = field(default_factory=list)  # such backwards, and the bodies inside them
    _handed: dict[tuple[fx.Graph, fx.Node], fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.root.modules():
            if not isinstance(module, fx.GraphModule):
                continue
            for node in module.graph.find_nodes(op="get_attr"):
                body = getattr(module, str(node.target), None)
                if not isinstance(body, fx.GraphModule):
                    continue
                self.calls.setdefault(body.graph, []).extend(node.users)
                if len(node.users) == 1:
                    [call] = node.users
                    if _called(call) in _PLAIN and call.args[0] is node:
                        self.callers[body.graph] = call
                    elif _called(call) == _FUNCTION and call.args[1] is node:
                        self.backwards[body.graph] = call
                        self.by_hand += [one.graph for one in body.modules() if isinstance(one, fx.GraphModule)]

    def reaches(self, graph: fx.Graph) -> bool:
        """Whether nodes of the root's graph can be handed to this one."""
        return graph is self.root.graph or (graph in self.callers and self.reaches(self.callers[graph].graph))

    def is_computed_again(self, graph: fx.Graph) -> bool:
        """Whether a checkpoint runs it once more in the backward."""
        caller = self.callers.get(graph)
        if caller is None:
            return False
        return _called(caller) == _CHECKPOINT or self.is_computed_again(caller.graph)

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
        """The root's node that a body's operand stands for; any other node as it is, and an operand that stands for
        another tensor at each run or call."""
        if node.op != "placeholder" or node.graph not in self.calls:
            return node
        placeholders = list(node.graph.find_nodes(op="placeholder"))
        from_end = placeholders.index(node) - len(placeholders)
        shared = [_shared(call, node.graph) for call in self.calls[node.graph]]
        given = [each[from_end] if len(each) >= -from_end else None for each in shared]
        argument = given[0] if given and all(one is given[0] for one in given) else None
        return self.outer(argument) if isinstance(argument, fx.Node) else node

    def place_of(self, node: fx.Node) -> int:
        """Returns which of the root's inputs a placeholder of the root's graph is.

        Raises:
            ValueError: it is a body's.
        """
        return list(self.root.graph.find_nodes(op="placeholder")).index(node)

    def held(self, node: fx.Node, inputs: Sequence[Any]) -> Any:
        """Returns what stands for a node of a parameter, of the inputs that the root is called with, or of what a
        module holds; None of anything else, as of a body's operand."""
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(node.graph.owning_module)
        is_input = node.op == "placeholder" and node.graph is self.root.graph
        return inputs[self.place_of(node)] if is_input and inputs else None

    def readers(self) -> dict[fx.Node, set[fx.Node]]:
        """The nodes that read each node, in its own graph and in the bodies that it is handed to."""
        readers: dict[fx.Node, set[fx.Node]] = {}
        # The call of an autograd.Function has the gradient, and no node of its forward.
        handed = ((call, body) for body, calls in self.calls.items() for call in calls if _called(call) != _FUNCTION)
        calls = {call for call, body in handed if _shared(call, body)}
        for module in self.root.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                for source in node.all_input_nodes if node not in calls else ():
                    readers.setdefault(self.outer(source), set()).add(node)
        return readers

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
