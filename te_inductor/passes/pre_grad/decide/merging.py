"""The sites that are one GEMM: linear layers of the same input, such as q, k and v, or gate and up.

One GEMM with N = N₁ + N₂ + … fills the device better than several, and its dgrad sums over all of N in its accumulator,
where several would write a partial dx each for another kernel to add. The price: they share scales as one layer does,
the tensor's, or those of rows that run across all of them, which gradients and the weights' column copies have
(TransformerEngine's fused q/k/v parameter is the same); blocks are whole in each. docs/ledger.md has what it
gains.

The outputs of merged sites are slices of one matrix: their rows are further apart than they are long. What would notice
stays as it is: a view that merges rows, an in-place change, an output of the graph, code that is not torch's. A site
behind a write of what it reads has another input than the one before it: Note [Nodes and values]. A reshape that was a
view may copy a slice, and then lays it out anew: whoever goes by the strides that Dynamo saw (`as_strided`, kernels of
others, which are given them as numbers) would read something else.

# Note [Slices that are saved]
A slice that autograd saves keeps the whole matrix until the backward. That costs nothing where all slices are saved, as
gate and up are. Where attention and an MLP read one input (GPT-J, Phi, Falcon), the MLP's slice would keep q, k and v,
of which attention has copies of its own. So the sites whose outputs are saved are a GEMM of their own, unless the others
are small: unless what they keep takes fewer bytes than the FP8 copy of the input saves."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor.passes.graph import operators
from te_inductor.passes.graph.aliases import is_opaque, memory
from te_inductor.passes.graph.operators import Kind, name
from te_inductor.passes.graph.values import is_gathered, is_tensor, requires_grad, value
from te_inductor.passes.graph.writes import Writes
from te_inductor.passes.pre_grad.sites.rule import Emit, Match, Rule, replace_layer
from te_inductor.recipes import Recipe, Slots

# Views in which dimensions have other places, or that are parts of it.
_REORDERS = Kind.PERMUTE | Kind.PART | Kind.EXPAND
_REORDER = frozenset("unsqueeze rearrange view_as_complex view_as_real".split())
_COPIES_IF_NEEDED = frozenset("reshape flatten reshape_as".split())
_BY_STRIDES = frozenset("as_strided as_strided_copy as_strided_scatter".split())


def groups(sites: Iterable[tuple[Rule, Match, Recipe, Slots]], writes: Writes) -> list[list[Match]]:
    """Finds which sites to merge: two or more each, in the graph's order; `writes` is what the graph writes."""
    found: dict[Any, list[Match]] = {}
    learning: dict[fx.Graph, set[fx.Node]] = {}
    for rule, match, recipe, slots in sites:
        if rule.joins and _can_join(match, slots, writes):
            node, weight = value(match.node), value(match.weight)
            bias = None if match.bias is None else value(match.bias)
            if match.node.graph not in learning:
                learning[match.node.graph] = _learning(match.node.graph)
            # One whose output is detached has no gradient; with another's it would have one of zeros, by which AdamW
            # decays.
            learns = match.node in learning[match.node.graph]
            key = (
                match.x,
                tuple(shared for part in match.parts if (shared := part.key()) is not None),
                match.transposed,
                match.turned,
                recipe,
                slots,
                node.dtype,
                is_gathered(match.weight),
                *_kind(weight),
                *_kind(bias),
            )
            found.setdefault((learns, *key), []).append(match)
    split = (
        part
        for (learns, *_), alike in found.items()
        for group in between_writes(alike, writes, _read)
        for part in (_parts(group) if learns else [group])
    )
    return [group for group in split if len(group) > 1]


def between_writes(
    group: Sequence[Match], writes: Writes, read: Callable[[Match], list[fx.Node]]
) -> Iterator[list[Match]]:
    """The group in pieces, in each of which all that `read` says of a site is what the first one has read: Note [Nodes
    and values]."""
    rest = sorted(group, key=lambda match: match.node)
    while rest:
        first = rest[0].node
        piece = [match for match in rest if not writes.between(read(match), first, match.node)]
        yield piece
        rest = [match for match in rest if match not in piece]


def _read(match: Match) -> list[fx.Node]:
    of_parts = (node for part in match.parts for node in part.reads())
    return [match.x, match.weight, *([] if match.bias is None else [match.bias]), *of_parts]


def _parts(group: list[Match]) -> list[list[Match]]:
    """The group, or, apart, what autograd saves of it and the rest: Note [Slices that are saved]."""
    saved = [match for match in group if _is_saved(match.end)]
    rest = [match for match in group if match not in saved]
    kept = sum(match.sizes[1] for match in rest) * value(group[0].end).dtype.itemsize
    spared = group[0].sizes[2] * (value(group[0].x).dtype.itemsize - 1)
    return [saved, rest] if saved and kept > spared else [group]


def _learning(graph: fx.Graph) -> set[fx.Node]:
    """What a gradient of the graph's outputs flows to."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if requires_grad(node) and any(user.op == "output" or is_opaque(user) or user in found for user in node.users):
            found.add(node)
    return found


def _kind(tensor: Any) -> tuple[Any, ...]:
    return () if tensor is None else (tensor.dtype, tensor.device, tensor.requires_grad)


def _can_join(match: Match, slots: Slots, writes: Writes) -> bool:
    quantizers = (one for own in slots.all() for one in (own.input, own.weight, own.grad_output))
    scopes = [quantizer.granularity for quantizer in quantizers]
    if is_gathered(match.weight) and (match.parallel is None or match.parallel.weight != 0):
        # Each was cast with its own scale, into memory of its own: its GEMMs are its own, and only x and dx are common.
        return False
    operands = [match.weight] if match.bias is None else [match.weight, match.bias]
    return (
        all(part.may_merge(match, slots) for part in match.parts)
        and not any(scope.microscaled for scope in scopes)
        and match.sizes[1] % max(scope.alignment for scope in scopes) == 0
        and all(operand.op in ("placeholder", "get_attr") for operand in operands)
        and not writes.anywhere(match.node)
        and _may_be_a_slice(match.end, value(match.end).shape[:-1])
    )


def _may_be_a_slice(node: fx.Node, rows: Sequence[Any] | None) -> bool:
    """Whether nobody can tell that the last dimension of `node`, behind `rows`, is a slice; None: its dimensions have
    been reordered, so no view may merge any."""
    for user in node.users:
        if user.op == "output" or (is_opaque(user) and not _is_attention(user)):
            return False
        if not memory(user) & memory(node):
            continue
        if _reshapes(user) and not _keeps(user, rows):
            if operators.read(user).name not in _COPIES_IF_NEEDED or _is_read_by_strides(user):
                return False
        elif _reshapes(user) or _passes(user):
            if not _may_be_a_slice(user, rows):
                return False
        elif not _reorders(user) or not _may_be_a_slice(user, None):
            return False
    return True


def _passes(node: fx.Node) -> bool:
    """Whether it may return its operand, or the same dimensions of it."""
    called, kind, _ = operators.read(node)
    return kind in Kind.CAST | Kind.COPY | Kind.SAME or called == "dropout"


def _reshapes(node: fx.Node) -> bool:
    """Whether it is a view in which dimensions are split or merged."""
    called, kind, _ = operators.read(node)
    return kind is Kind.RESHAPE and called not in _REORDER


def _reorders(node: fx.Node) -> bool:
    """Whether it is a view in which dimensions have other places. Any other view is taken to notice strides."""
    called, kind, _ = operators.read(node)
    return kind in _REORDERS or called in _REORDER


def _is_read_by_strides(node: fx.Node) -> bool:
    """Whether its strides, or those of a view of it, stand in the graph as numbers."""
    for user in node.users:
        if operators.read(user).name in _BY_STRIDES or (is_opaque(user) and not _is_attention(user)):
            return True
        if memory(user) & memory(node) and _is_read_by_strides(user):
            return True
    return False


def _keeps(node: fx.Node, rows: Sequence[Any] | None) -> bool:
    """Whether a view leaves the rows as they are."""
    if rows is None or not is_tensor(node) or value(node).dim() <= len(rows):
        return False
    return all(statically_known_true(a == b) for a, b in zip(value(node).shape, rows, strict=False))


def rewrite(group: Sequence[Match], emit: Emit) -> None:
    """Replace the sites by one call at the place of the first."""
    first = group[0]
    with first.node.graph.inserting_before(first.node):
        made = emit(group, first.operand(), [match.matrices() for match in group])
        # Attention keeps its operands for its backward, and a slice would keep the whole matrix.
        clone = torch.ops.aten.clone.default
        for place, match in enumerate(group):
            if _is_kept(match.end):
                made[place] = first.node.graph.call_function(
                    clone, (made[place],), {"memory_format": torch.contiguous_format}
                )
    for match, node in zip(group, made, strict=True):
        replace_layer(match, node)


def _is_saved(node: fx.Node) -> bool:
    """Whether autograd saves it, or a view of it, for the gradient of what reads it. Attention is given a copy."""
    return any(_saves(user, node) for user in node.users)


def _saves(user: fx.Node, node: fx.Node) -> bool:
    if _is_attention(user):
        return False
    if _passes(user) or memory(user) & memory(node):
        return _is_saved(user)  # a cast is computed again from what it casts
    if _reshapes(user) or _reorders(user):
        return False  # a copy
    called, kind, _ = operators.read(user)
    if called in operators.BILINEAR:
        return any(requires_grad(other) for other in user.all_input_nodes if other is not node)
    return called not in operators.LINEAR and kind not in Kind.SIZE | Kind.FILL


def _is_kept(node: fx.Node) -> bool:
    """Whether attention reads it without arithmetic in between."""
    return any(_is_attention(user) or (bool(memory(user) & memory(node)) and _is_kept(user)) for user in node.users)


def _is_attention(node: fx.Node) -> bool:
    called = name(node)
    return "attention" in called or "attn" in called
