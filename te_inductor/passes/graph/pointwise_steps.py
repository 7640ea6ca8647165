"""What pointwise nodes of a graph compute of each number, as the steps of numerics/activation.py."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from te_inductor.kernels.cutlass_tiles import ROUNDED
from te_inductor.numerics.activation import OPS, PointwiseStep
from te_inductor.passes.graph.gemm_nodes import VIEWS
from te_inductor.passes.graph.node_kinds import has_shape, tensor_of

aten = torch.ops.aten
# What generated code computes in fp32 registers as if it were not there, and what autograd saves by.
_NOTHING = (*VIEWS, torch.ops.prims.convert_element_type.default, aten.detach.default, aten.alias.default)
_SQUARE = (aten.pow.Tensor_Scalar, (2,))
_NAMES = {op: name for name, op in OPS.items()} | {getattr(aten, name).Scalar: name for name in ("add", "sub", "mul")}


def is_step(node: fx.Node) -> bool:
    """Whether `translated` may know it."""
    return node.target in _NAMES or node.target in _NOTHING or node.target is aten.full.default or _is_square(node)


def _is_square(node: fx.Node) -> bool:
    return (node.target, node.args[1:]) == _SQUARE


def translated(
    nodes: Iterable[fx.Node],  # in order
    given: Sequence[fx.Node],  # what they begin with
) -> tuple[tuple[PointwiseStep, ...], dict[fx.Node, int | float]] | None:
    """The steps, each once, and where each node's value is found: a value's place, or a number. None where one is no
    function of numbers in its own place, or is not computed in fp32."""
    places: dict[fx.Node, int | float] = {node: place for place, node in enumerate(given)}
    made: dict[PointwiseStep, int] = {}
    for node in nodes:
        value = tensor_of(node)
        if value is None or value.dtype not in (ROUNDED, torch.float32):
            return None
        if node.target is aten.full.default:
            if isinstance(node.args[1], fx.Node):  # a symbolic number
                return None
            found: int | float = float(node.args[1])  # type: ignore[arg-type]
        elif node.kwargs or len(node.args) > 2:
            return None
        elif node.target in _NOTHING:
            found = places[node.args[0]]  # type: ignore[index]
        else:
            if not all(has_shape(tensor_of(x), value.shape) for x in node.all_input_nodes):
                return None
            operands = [node.args[0]] * 2 if _is_square(node) else node.args
            numbers = [places[x] if isinstance(x, fx.Node) else float(x) for x in operands]  # type: ignore[arg-type]
            step: PointwiseStep = ("mul" if _is_square(node) else _NAMES[node.target], *numbers)  # type: ignore[index]
            found = made.setdefault(step, len(given) + len(made))
        if isinstance(found, float) and not math.isfinite(found):
            return None
        places[node] = found
    steps = tuple(made)
    finite = all(math.isfinite(operand) for _, *operands in steps for operand in operands)  # type: ignore[arg-type]
    return (steps, places) if finite else None
