"""Graphs of operators as bytes, for a compile cache.

A graph is written as its nodes, in their order: what each calls, by name, and its arguments. Metadata, with the tensors of
the trace, is left out, and no code is written that Python would have to compile. What cannot be named is refused: tensors
that the graph holds, and functions of the program's, whose name may be another function's in another process."""

import io
import pickle
import types
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload


def write(graph: fx.Graph) -> bytes:
    """Raises one of the errors of pickle (`PicklingError`, `AttributeError`, `TypeError`) for a graph that cannot be
    written."""
    stream = io.BytesIO()
    writer = _Writer(stream, graph)
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise pickle.PicklingError(f"{node.op} of {node.target!r}, expected operators")
        writer.dump((node.op, node.target, node.args, node.kwargs, node.name))
    return stream.getvalue()


def read(text: bytes) -> fx.Graph:
    stream, graph = io.BytesIO(text), fx.Graph()
    reader = _Reader(stream)
    while stream.tell() < len(text):
        reader.nodes.append(graph.create_node(*reader.load()))
    return graph


class _Writer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, graph: fx.Graph) -> None:
        super().__init__(stream)
        self.places = {node: place for place, node in enumerate(graph.nodes)}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, fx.Node):
            return (self.places[value],)
        if isinstance(value, OpOverload):
            return value.namespace, value._opname, value._overloadname
        if isinstance(value, HigherOrderOperator):
            return "higher_order", value.name()
        if isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] != "torch":
            raise pickle.PicklingError(f"the function {value.__qualname__} of {value.__module__}")
        return None


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.nodes: list[fx.Node] = []

    def persistent_load(self, name: Any) -> Any:
        if len(name) == 1:
            return self.nodes[name[0]]
        found: Any = torch.ops
        for part in name:
            found = getattr(found, part)
        return found
