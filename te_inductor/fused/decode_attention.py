"""The pass that makes one op of attention of few queries, where a graph has it as two products and a softmax.

In a step of generation these are three kernels of which two are cuBLAS's, before and after which the card drains.
Figures: docs/performance.md. Only graphs with stored NVFP4 weights, or FP8 GEMMs of few rows, are changed. Where the
program calls F.scaled_dot_product_attention, passes/pre_grad/attention finds it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.lowering import fallback_handler

from te_inductor import ops, targets
from te_inductor.fused.record import POST_GRAD, FusedKernel
from te_inductor.kernels import fp8_small_m
from te_inductor.kernels.select import select
from te_inductor.ops import stored
from te_inductor.passes.graph.gemm_nodes import problem_of
from te_inductor.passes.graph.tracing import insert
from te_inductor.runtime.eager import decode_attention as eager

aten = torch.ops.aten
# What may stand between the products and the softmax: it changes the dtype, or how the batch is written.
_SAME = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.expand.default,
        aten.clone.default,
        torch.ops.prims.convert_element_type.default,
    }
)


@dataclass(frozen=True)
class DecodeAttention:
    """``bmm(softmax(mask(scale * bmm(q, k))), v)``"""

    q: fx.Node  # (B, M, D)
    k: fx.Node  # (B, D, N)
    v: fx.Node  # (B, N, D)
    mask: fx.Node | None  # of N elements, bool
    drops: bool  # whether the mask says which keys do not count; else which do
    scale: float


def fold(graph: fx.Graph) -> None:
    """Replace each attention that the kernels take."""
    if not any(node.target is stored.nvfp4_linear or _has_few_rows(node) for node in graph.nodes):
        return
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        found = match(node)
        if found is not None and _runs(found):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_emit(graph, found))
    graph.eliminate_dead_code()


def _has_few_rows(node: fx.Node) -> bool:
    """Whether it is an FP8 GEMM of a step of generation."""
    return node.target is ops.scaled_mm and select(problem_of(node)).family is fp8_small_m.FAMILY


def _emit(graph: fx.Graph, found: DecodeAttention) -> fx.Node:
    keep = found.mask
    if keep is not None:
        keep = insert(graph, aten.reshape.default, keep, [-1])
        keep = insert(graph, aten.bitwise_not.default, keep) if found.drops else keep
        keep = insert(graph, aten.unsqueeze.default, keep, 0)
    k = insert(graph, aten.permute.default, found.k, [0, 2, 1])
    q, k, v = (insert(graph, aten.unsqueeze.default, one, 1) for one in (found.q, k, found.v))
    return insert(graph, aten.squeeze.dim, insert(graph, ops.decode_attention, q, k, v, keep, found.scale), 1)


def match(node: fx.Node) -> DecodeAttention | None:
    """The attention whose second product this is."""
    weights, v = _arguments(node, aten.bmm.default)
    scores = _softmaxed(_plain(weights))
    if scores is None:
        return None
    mask, drops, scores = _masked(_plain(scores))
    scale, scores = _scaled(_plain(scores))
    product = _plain(scores)
    if product.target is not aten.bmm.default or _value(product).shape != _value(weights).shape:
        return None
    q, k = product.args
    found = DecodeAttention(q, k, v, mask, drops, scale)
    return found if _value(q).shape == _value(node).shape else None


def _runs(found: DecodeAttention) -> bool:
    """Whether the kernels take it."""
    q, k, v = (_value(node) for node in (found.q, found.k, found.v))
    sizes = q.shape[1:]
    return (
        all(isinstance(size, int) for size in sizes)
        and sizes[0] <= eager.QUERIES
        and sizes[1] in eager.WIDTHS
        and q.dtype in eager.DTYPES
        and q.dtype == k.dtype == v.dtype
        and targets.Ability.DECODE_ATTENTION in targets.of(q.device).can
    )


def _softmaxed(node: Any) -> Any:
    """What a softmax over the last dimension, as torch decomposes it, is of; None of anything else."""
    exponentials, total = _arguments(node, aten.div.Tensor)
    (less,) = _arguments(exponentials, aten.exp.default, 1)
    scores, top = _arguments(less, aten.sub.Tensor)
    over = _arguments(total, aten.sum.dim_IntList, 3), _arguments(top, aten.amax.default, 3)
    return scores if over == ((exponentials, [-1], True), (scores, [-1], True)) else None


def _arguments(node: Any, target: Any, count: int = 2) -> tuple[Any, ...]:
    """Returns so many arguments, None each where the node is of another kind."""
    is_such = getattr(node, "target", None) is target and len(node.args) == count
    return tuple(node.args) if is_such else (None,) * count


def _masked(node: Any) -> tuple[Any, bool, Any]:
    """The mask of keys, if it is the same for all queries, whether it says which ones do not count, and what it
    masks."""
    mask, first, second = _arguments(node, aten.where.self, 3)
    if mask is not None and _value(mask).numel() == _value(mask).shape[-1] == _value(node).shape[-1]:
        if _is_minus_infinity(second):
            return mask, False, first
        if _is_minus_infinity(first):
            negated = mask.target in (aten.bitwise_not.default, aten.logical_not.default)
            return (mask.args[0], False, second) if negated else (mask, True, second)
    return None, False, node


def _is_minus_infinity(node: fx.Node) -> bool:
    return node.target in (aten.scalar_tensor.default, aten.full.default) and -math.inf in node.args


def _scaled(node: Any) -> tuple[float, Any]:
    for target in (aten.mul.Tensor, aten.div.Tensor):
        scores, factor = _arguments(node, target)
        if isinstance(factor, int | float):
            return (factor if target is aten.mul.Tensor else 1 / factor), scores
    return 1.0, node


def _plain(node: Any) -> Any:
    """Returns a node without views of the batch and conversions."""
    while node.target in _SAME:
        inner, outer = _value(node.args[0]), _value(node)
        if inner.shape[-2:] != outer.shape[-2:] or inner.numel() != outer.numel():
            break
        node = node.args[0]
    return node


def _value(node: Any) -> Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


def _lower(q, k, v, keep, scale, zeros=False):  # type: ignore[no-untyped-def]
    """The kernels, which read keys and values where they lie, with their strides."""
    for given in (q, k, v, keep):
        if given is not None:
            given.realize()
    return fallback_handler(ops.decode_attention, add_to_fallback_set=False)(q, k, v, keep, scale, zeros)


KERNEL = FusedKernel((POST_GRAD,), fold, ops.decode_attention, _lower)
