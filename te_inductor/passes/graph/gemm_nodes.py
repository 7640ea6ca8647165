"""GEMMs of a graph behind autograd, for the passes that give one more to do, and what pointwise nodes compute of each
number, as the steps of numerics/activation.py."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops, targets
from te_inductor.kernels import fp8_small_m
from te_inductor.kernels.cutlass_tiles import ROUNDED, Kernel
from te_inductor.kernels.problem import Epilogue, Problem, Program, Sizes
from te_inductor.kernels.select import select
from te_inductor.numerics.activation import OPS, PointwiseStep
from te_inductor.passes.graph.node_kinds import has_shape, tensor_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# What generated code computes in fp32 registers as if it were not there, and what autograd saves by.
_NOTHING = (*VIEWS, torch.ops.prims.convert_element_type.default, aten.detach.default, aten.alias.default)
_SQUARE = (aten.pow.Tensor_Scalar, (2,))
_NAMES = {op: name for name, op in OPS.items()} | {getattr(aten, name).Scalar: name for name in ("add", "sub", "mul")}


def is_plain(node: fx.Node) -> bool:
    """Whether it is a GEMM without a factor and with nothing added."""
    return node.target is ops.scaled_mm and all(more is None for more in node.args[7:])


def problem_of(gemm: fx.Node, out: torch.dtype | None = None, **more: Any) -> Problem:
    """What a GEMM computes; with `more` of an `Epilogue` to do, and that output (None: its own)."""
    a, _, b, _, bias, wanted, dtype = gemm.args[:7]
    x, w = a.meta["val"], b.meta["val"]  # type: ignore[union-attr]
    rows, packed = x.shape[0], wanted.packed  # type: ignore[union-attr]
    m, n, k = (size if isinstance(size, int) else None for size in (rows, w.shape[0], x.shape[1] * packed))
    at_most = fp8_small_m.at_most(lambda most: statically_known_true(rows <= most) and statically_known_true(rows > 0))
    program = Program(bool(config.max_autotune or config.max_autotune_gemm), bool(config.cpp_wrapper))
    sizes, epilogue = Sizes(m, n, k, at_most=at_most), Epilogue(bias is not None, **more)
    return Problem(targets.of(x.device), sizes, wanted, out or dtype, epilogue, program)  # type: ignore[arg-type]


def kernel_of(gemm: fx.Node, out: torch.dtype | None = None, **more: Any) -> Kernel | None:
    """CUTLASS's kernel that is chosen for it, if one is, with `more` to do."""
    return select(problem_of(gemm, out, **more)).kernel


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
