"""Which sites are one GEMM: linear layers of the same input, such as q, k and v, or gate and up.

One GEMM with N = N₁ + N₂ + … fills the device better than several, and its dgrad sums over all of N in its accumulator,
where several would write a partial dx each for another kernel to add. The price: they share scales as one layer does, the
tensor's, or those of rows that run across all of them, which gradients and the weights' column copies have
(TransformerEngine's fused q/k/v parameter is the same); blocks are whole in each. docs/performance.md has what it gains.

The outputs of merged sites are slices of one matrix: their rows are further apart than they are long. What would notice
stays as it is: a view that merges rows, an in-place change, an output of the graph.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.patterns.rule import Emit, Match, Rule, replace
from te_inductor.patterns.support import is_tensor, value
from te_inductor.recipes import Recipe, Slots

# What gives a view in which dimensions have other places, and what gives one in which they are split or merged.
_REORDERS = frozenset("transpose permute unsqueeze getitem chunk split t mT movedim swapaxes select narrow".split())
_RESHAPES = frozenset("view unflatten reshape flatten view_as reshape_as squeeze".split())
_COPIES_IF_NEEDED = frozenset("reshape flatten reshape_as".split())
_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor setitem".split())


def groups(sites: Iterable[tuple[Rule, Match, Recipe, Slots]]) -> list[list[Match]]:
    """Which sites to merge: two or more each, in the graph's order."""
    found: dict[Any, list[Match]] = {}
    for rule, match, recipe, slots in sites:
        if rule.joins and _can_join(match, slots):
            node, weight = value(match.node), value(match.weight)
            bias = None if match.bias is None else value(match.bias)
            key = (match.x, recipe, slots, node.dtype, node.requires_grad, *_kind(weight), *_kind(bias))
            found.setdefault(key, []).append(match)
    return [group for group in found.values() if len(group) > 1]


def _kind(tensor: Any) -> tuple[Any, ...]:
    return () if tensor is None else (tensor.dtype, tensor.device, tensor.requires_grad)


def _can_join(match: Match, slots: Slots) -> bool:
    scopes = [quantizer.granularity for quantizer in (slots.input, slots.weight, slots.grad_output)]
    operands = [match.weight] if match.bias is None else [match.weight, match.bias]
    return (
        not any(scope.microscaled for scope in scopes)
        and match.sizes[1] % max(scope.alignment for scope in scopes) == 0
        and all(operand.op in ("placeholder", "get_attr") for operand in operands)
        and _may_be_a_slice(match.node, value(match.node).shape[:-1])
    )


def _may_be_a_slice(node: fx.Node, rows: Sequence[Any] | None) -> bool:
    """Whether nobody can tell that the last dimension of `node`, behind `rows`, is a slice; None: its dimensions have been
    reordered, so no view may merge any."""
    for user in node.users:
        name = _name(user)
        if user.op == "output" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            return False
        if name in _RESHAPES:
            if not _keeps(user, rows):
                if name not in _COPIES_IF_NEEDED:
                    return False
            elif not _may_be_a_slice(user, rows):
                return False
        elif name in _REORDERS and not _may_be_a_slice(user, None):
            return False
    return True


def _keeps(node: fx.Node, rows: Sequence[Any] | None) -> bool:
    """Whether a view leaves the rows as they are."""
    if rows is None or not is_tensor(node) or value(node).dim() <= len(rows):
        return False
    return all(statically_known_true(a == b) for a, b in zip(value(node).shape, rows, strict=False))


def rewrite(group: Sequence[Match], emit: Emit) -> None:
    """Replace the sites by one call at the place of the first."""
    first = group[0]
    with first.node.graph.inserting_before(first.node):
        made = emit(group, first.x, [match.weight for match in group])
        # Attention keeps its operands for its backward, and a slice would keep the whole matrix.
        clone = torch.ops.aten.clone.default
        for place, match in enumerate(group):
            if _is_kept(match.node):
                made[place] = first.node.graph.call_function(
                    clone, (made[place],), {"memory_format": torch.contiguous_format}
                )
    for match, node in zip(group, made, strict=True):
        replace(match.node, node)


def _is_kept(node: fx.Node) -> bool:
    """Whether attention reads it without arithmetic in between."""
    for user in node.users:
        name = _name(user)
        if "attention" in name or (name in _REORDERS | _RESHAPES and _is_kept(user)):
            return True
    return False


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
