"""Inputs that the rewrite appends to a graph: Dynamo, which writes the call, does not know of them."""

import torch
from torch import fx
from torch._dynamo.source import ConstantSource


def append_input(graph: fx.Graph, name: str, example: torch.Tensor) -> fx.Node:
    """One more input, with what AOTAutograd asks of those that Dynamo found. CUDA graphs do not copy it."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta = {"example_value": example, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
    node._dynamo_source = ConstantSource(name)  # type: ignore[attr-defined]
    return node


def place_of(node: fx.Node) -> int:
    """Which of its graph's inputs a placeholder is."""
    return node.graph.find_nodes(op="placeholder").index(node)
