"""The pass that has a GEMM make both copies of a gated activation's gradients: down's dgrad, SwiGLU's backward and its
casts in one kernel.

Left alone, the GEMM writes dh, and two kernels read it, gate and up, for dgate and dup: 16 bytes an element of h with
both copies of either, where one kernel takes 8. It is done with scales of blocks, where CUTLASS's epilogue was measured
to pay, and where nobody else wants dh or the gradients, as biases do. What is rounded then: docs/numerics.md.

It is done on the joint graph, since a kernel takes seconds to build, which pass while the rest is compiled.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config, ir
from torch._inductor.lowering import fallback_handler

from te_inductor import ops
from te_inductor.fused.record import JOINT, FusedKernel
from te_inductor.kernels.cutlass_tiles import ALIGNED, ROUNDED, Tile
from te_inductor.kernels.family import Choice
from te_inductor.kernels.select import select
from te_inductor.numerics.activation import Gating
from te_inductor.ops.casts import copies_like
from te_inductor.passes.graph import activations
from te_inductor.passes.graph.gemm_nodes import is_plain, is_step, problem_of, translated
from te_inductor.passes.graph.node_kinds import tensor_of
from te_inductor.passes.graph.tracing import insert
from te_inductor.recipes import Quantizer
from te_inductor.recipes.formats import BLOCK_1X128
from te_inductor.runtime.definition import op_of
from te_inductor.templates.cutlass import build, launch

aten = torch.ops.aten


gated_gradient = op_of(
    launch.gated_gradient,
    lambda a, a_scale, b, b_scale, gate, up, gemm, gating, quantizer, *_: copies_like(
        gate.new_empty((a.shape[0], 2 * b.shape[0])), quantizer
    ),
    name="cutlass_gated_gradient",
)
_call = fallback_handler(gated_gradient, add_to_fallback_set=False)


@dataclass(frozen=True)
class _FoundGate:
    """A cast of two pieces that one GEMM and two tensors make."""

    cast: fx.Node
    gemm: fx.Node
    gates: list[fx.Node]  # the tensors
    between: list[fx.Node]  # what is computed of them, in order
    gating: Gating


def fold(graph: fx.Graph) -> None:
    """Replace the cast, and what only it wants, by `cutlass_gated_gradient`."""
    casts = [cast for cast in graph.find_nodes(op="call_function", target=ops.quantize_pieces) if _is_wanted(cast)]
    if not casts or config.emulate_precision_casts:  # a rounding behind every op, which no epilogue does
        return
    activations.share_sigmoids(graph)
    for cast in casts:
        found = _found(cast)
        choice = None if found is None else _choice(found)
        if choice is not None and choice.kernel is not None:
            build.start([choice.kernel])  # beside what is left of the compile
            _replace(found, choice.config, choice.kernel.arch)  # type: ignore[arg-type]


def _is_wanted(cast: fx.Node) -> bool:
    """Two matrices side by side, whose both copies are read, with the scales that the kernel computes."""
    given: Any = cast.args
    pieces, dim, quantizer = given
    read = {user.args[1] for user in cast.users if user.target is operator.getitem}
    scales = quantizer.scope, quantizer.power_2_scale, quantizer.amax_epsilon
    return len(pieces) == 2 and dim == 1 and {0, 2} <= read and scales == (BLOCK_1X128.name, True, 0.0)


def _found(cast: fx.Node) -> _FoundGate | None:
    """What the pieces are made of: one GEMM and two tensors in memory. None where it is more, or what hangs on the GEMM
    has other readers."""
    pieces: Any = cast.args[0]
    inside, waiting, leaves = {cast}, list(pieces), dict[fx.Node, None]()
    while waiting:
        node = waiting.pop(0)
        if not is_step(node):
            leaves[node] = None
        elif node not in inside:
            inside.add(node)
            waiting += node.all_input_nodes
    gemms, gates = ([leaf for leaf in leaves if is_plain(leaf) == plain] for plain in (True, False))
    if len(gemms) != 1 or len(gates) != 2:
        return None
    [gemm] = gemms
    dependent = {gemm}
    between = [node for node in cast.graph.nodes if node in inside and node is not cast]
    for node in between:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    if any(user not in dependent and user is not cast for node in dependent for user in node.users):
        return None
    made = translated(between, [gemm, *gates])
    if made is None:
        return None
    steps, places = made
    results = tuple(places[piece] for piece in pieces)
    if not all(isinstance(result, int) for result in results):
        return None
    return _FoundGate(cast, gemm, gates, between, Gating(steps, results))  # type: ignore[arg-type]


def _choice(found: _FoundGate) -> Choice | None:
    """What would run it; None where a tensor does not lie as a kernel reads it."""
    shape = found.gemm.meta["val"].shape
    if not all(isinstance(size, int) for size in shape) or found.gemm.meta["val"].dtype != ROUNDED:
        return None
    if not all(_lies_in_rows(tensor_of(gate), shape) for gate in found.gates):
        return None
    quantizer: Quantizer = found.cast.args[2]  # type: ignore[assignment]
    return select(problem_of(found.gemm, quantizer.format.dtype, gating=found.gating))


def _lies_in_rows(value: Tensor | None, shape: torch.Size) -> bool:
    """Whether it is a matrix of that shape, or a view of one, that the copy engine can read."""
    if value is None or value.dtype != ROUNDED or value.numel() != shape.numel():
        return False
    try:
        row, column = value.view(shape).stride()
    except RuntimeError:
        return False
    return (
        column == 1 and row * value.itemsize % ALIGNED == 0 and value.storage_offset() * value.itemsize % ALIGNED == 0
    )


def _replace(found: _FoundGate, tile: Tile, arch: str) -> None:
    graph, shape = found.cast.graph, found.gemm.meta["val"].shape
    a, a_scale, b, b_scale, _, gemm = found.gemm.args[:6]
    with graph.inserting_before(found.cast):
        gates = [insert(graph, aten.view.default, gate, list(shape), like=found.cast.meta) for gate in found.gates]
        given: Any = (a, a_scale, b, b_scale, *gates, gemm, found.gating, found.cast.args[2], tile, arch)
        whole = graph.call_function(gated_gradient, given)
        whole.meta = dict(found.cast.meta)
    found.cast.replace_all_uses_with(whole)
    for node in reversed([*found.between, found.cast]):
        if not node.users:
            graph.erase_node(node)
    graph.erase_node(found.gemm)


def _lower(
    a: ir.TensorBox,  # (M, K)
    a_scale: ir.TensorBox,
    b: ir.TensorBox,  # (N, K)
    b_scale: ir.TensorBox,
    gate: ir.TensorBox,  # (M, N), rows contiguous
    up: ir.TensorBox,
    *constants: Any,
) -> Any:
    operands = [ir.ExternKernel.require_contiguous(x) for x in (a, a_scale, b, b_scale)]
    gates = [ir.ExternKernel.require_stride1(ir.ExternKernel.realize_input(x)) for x in (gate, up)]
    return _call(*operands, *gates, *constants)


KERNEL = FusedKernel((JOINT,), fold, gated_gradient, _lower)
