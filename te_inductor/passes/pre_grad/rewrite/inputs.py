"""Inputs that the rewrite appends to a graph: Dynamo, which writes the call, does not know of them."""

from collections.abc import Sequence

import torch
from torch import fx
from torch._dynamo.source import ConstantSource

from te_inductor.runtime.extra_inputs import ExtraInputs


def append_input(graph: fx.Graph, kind: ExtraInputs, example: torch.Tensor) -> fx.Node:
    """One more input of a kind, with what AOTAutograd asks of those that Dynamo found. CUDA graphs do not copy it."""
    name = f"{kind.prefix}{len(kind.examples)}"
    kind.examples.append(example)
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta = {"example_value": example, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
    node._dynamo_source = ConstantSource(name)  # type: ignore[attr-defined]
    return node


def check_order(graph: fx.Graph, kinds: Sequence[ExtraInputs]) -> None:
    """Checks that the inputs were appended in the order of their kinds, in which a call brings them."""
    wanted = [f"{kind.prefix}{place}" for kind in kinds for place in range(len(kind.examples))]
    found = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    if wanted and found[-len(wanted) :] != wanted:
        raise RuntimeError(f"inputs of the rewritten graph end in {found[-len(wanted) :]}, expected {wanted}")
