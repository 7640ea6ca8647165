"""Graphs of operators as steps that run one after another, and as bytes for a compile cache.

A step has what a node calls, its arguments, and which values no later step reads. Metadata, with the tensors of the
trace, is left out, and no code is written that Python would have to compile. What cannot be named is refused: tensors
that the graph holds, and functions of the program's, whose name may be another function's in another process."""

import io
import operator
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload


class NodePlace(int):
    """Stands in arguments for the value of the node at this place of the graph."""


# Where its value goes, what it calls, with which arguments, and which values end with it.
Step = tuple[NodePlace, Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[NodePlace, ...]]


class Steps(NamedTuple):
    """A graph."""

    steps: list[Step]
    outputs: Any
    held: dict[int, Any]  # what the graph's module holds

    def run(self, inputs: list[Any]) -> Any:
        """Returns what the graph does. Its inputs are let go of as soon as no step reads them: the list is emptied."""
        values: dict[int, Any] = dict(enumerate(inputs)) | self.held
        inputs.clear()
        for place, target, args, kwargs, ends in self.steps:
            values[place] = target(*_filled(args, values), **_filled(kwargs, values))
            for end in ends:
                del values[end]
        return _filled(self.outputs, values)


def of(gm: fx.GraphModule) -> Steps:
    """The steps of a graph of operators."""
    places = {node: NodePlace(place) for place, node in enumerate(gm.graph.nodes)}
    last: dict[fx.Node, fx.Node] = {}  # each node's last reader
    for node in gm.graph.nodes:
        last |= dict.fromkeys(node.all_input_nodes, node)
    attributes = gm.graph.find_nodes(op="get_attr")
    held: dict[int, Any] = {places[node]: operator.attrgetter(str(node.target))(gm) for node in attributes}
    steps: list[Step] = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            read = [one for one in (*node.all_input_nodes, node) if last.get(one, node) is node]
            args, kwargs = _placed(node.args, places), _placed(node.kwargs, places)
            steps.append((places[node], node.target, args, kwargs, tuple([places[one] for one in read])))
    return Steps(steps, _placed(gm.graph.output_node().args[0], places), held)


def _placed(value: Any, places: Mapping[fx.Node, NodePlace]) -> Any:
    if isinstance(value, fx.Node):
        return places[value]
    if isinstance(value, slice):
        return slice(*(_placed(one, places) for one in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {name: _placed(one, places) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)([_placed(one, places) for one in value])
    return value


def _filled(value: Any, values: Mapping[int, Any]) -> Any:
    kind = type(value)
    if kind is NodePlace:
        return values[value]
    if kind is tuple or kind is list:
        return kind([_filled(one, values) for one in value])
    if kind is dict:
        return {name: _filled(one, values) for name, one in value.items()}
    if kind is slice:
        return slice(*[_filled(one, values) for one in (value.start, value.stop, value.step)])
    return value


def write(steps: Steps) -> bytes:
    """Raises one of the errors of pickle (`PicklingError`, `AttributeError`, `TypeError`) for steps that cannot be
    written."""
    if steps.held:
        raise pickle.PicklingError(f"the graph holds {len(steps.held)} tensors or modules, expected operators")
    stream = io.BytesIO()
    _Writer(stream).dump(tuple(steps))
    return stream.getvalue()


def read(text: bytes) -> Steps:
    return Steps(*_Reader(io.BytesIO(text)).load())


class _Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        if isinstance(value, OpOverload):
            return value.namespace, value._opname, value._overloadname
        if isinstance(value, HigherOrderOperator):
            return "higher_order", value.name()
        if isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] != "torch":
            raise pickle.PicklingError(f"the function {value.__qualname__} of {value.__module__}")
        return None


class _Reader(pickle.Unpickler):
    def persistent_load(self, name: Any) -> Any:
        found: Any = torch.ops
        for part in name:
            found = getattr(found, part)
        return found
