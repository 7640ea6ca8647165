"""The pass that decides which copies the backward makes, on the joint graph, before it is split into forward and
backward.

A column copy serves one GEMM of the backward alone.

- That of a weight is a byte an element, of every layer at once, from the forward to the backward. The weight itself
  stays in memory anyway, so the backward casts it, for one more read of the weight; of square blocks for two, so there
  it is kept where the graph saves no more for it than layers' inputs take less room as FP8 copies: where there are many
  tokens.
- That of a layer's input likewise, where it has a known scale and is computed, one element at a time, from what the
  backward reads anyway: gate and up of SwiGLU, for its own gradient, from the same read; a norm's input and statistics;
  attention's output. A norm's costs no more bytes than it does in the forward: there a column copy is a second read of
  the norm's input, as none can be written from a reduction over rows, and without it the reduction writes the row copy
  itself.
- Copies of experts' rows likewise, transposed and padded by group: of the values or, with one scale, of the bytes of
  the row copy, which the backward's read of gate and up writes again.
- What a copy of fprop stands for, which a backward in high precision multiplies, is made there of the copy.
- That of a weight which FSDP gathered in low precision is its transpose: one more read of bytes that are there again.
- Where blocks of a column have scales, which one read of them finds, that of a norm's output alone, where the reduction can
  hold its rows: any other tensor would be read once more than in the forward, where one read makes both copies.

ReLU's mask is found again likewise.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from te_inductor import compat, ops
from te_inductor.lowerings.codegen.block_tiles import may_be_held
from te_inductor.ops.casts import CASTS, TWO_WAY, TWO_WAY_KNOWN, TWO_WAY_OWN
from te_inductor.passes.graph.node_kinds import is_as_large, is_pointwise, is_view, is_view_or_cast, tensor_of
from te_inductor.passes.graph.values import bytes_of
from te_inductor.passes.graph.walks import back_past, reached
from te_inductor.recipes import Gemm, Quantizer
from te_inductor.recipes.formats import Scope

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default)  # of a backward in high precision
_TURNS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.transpose.int)
_CONSTANTS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)


def mark(graph: fx.Graph) -> None:
    tangents = [node for node in graph.find_nodes(op="placeholder") if "tangent" in str(node.target)]
    backward = set(reached(tangents, lambda node: node.users))
    if not backward:
        return
    backward |= _values_of_copies(graph, backward)
    _save_what_changes(graph, backward)
    _save_statistics(graph, backward)
    _release_masks(graph, backward)
    available = _available(graph, backward)
    for node in graph.nodes:
        if (
            node.target in (*TWO_WAY, ops.quantize_delayed, ops.quantize_groups)
            and node not in backward
            and "recompute" not in node.meta
        ):
            sources = _sources(node)
            weight = node.target in TWO_WAY and _is_of_weight(node, sources)
            if weight or (_is_as_cheap(node, sources, available) and available.issuperset(sources)):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                if node.target is ops.quantize_groups:
                    _compute_again(sources, available)
    _release_weights(graph, backward, available)
    _release_transposes(graph, backward)


def _save_what_changes(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """What a backward would find different if it computed it again, as torch has it do with anything under an
    activation memory budget: delayed scaling's scales, which the step updates; random numbers; what is read of an input
    that the graph writes. Of these torch saves the last two by chance or not at all (pytorch/pytorch#190758,
    #197039)."""
    scales = graph.find_nodes(op="call_function", target=ops.read_scales)
    others = [*filter(_is_random, graph.nodes), *_reads_of_written(graph, backward)]
    changing = [*scales, *(node for node in others if "recompute" not in node.meta)]  # a checkpoint has its own way
    for view in reached(scales, lambda node: filter(is_view, node.users)):  # one tensor is saved, not each number
        view.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node in changing:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if changing:
        compat.let_marks_be_saved(graph)


def _release_masks(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Have the backward find ReLU's mask again where a cast with a known scale reads ReLU's output. torch would keep the
    mask, a byte an element, for which the forward has a kernel of its own, and beside it the cast's column copy, another
    byte. The GEMM's output, from which the backward makes both, takes as much room, and is written anyway."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar):
        relu: Any = back_past(node.args[0], is_view)  # of an alias
        if relu.target is not torch.ops.aten.relu.default:
            continue
        if back_past(relu.args[0], is_view).target is not ops.scaled_mm:
            continue
        marked = node in backward or "recompute" in node.meta or "recompute" in relu.meta
        if not marked and any(user.target in TWO_WAY_KNOWN for user in _readers(relu)):
            for again in (relu, node):
                again.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a node, or of a view of it."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_random(node: fx.Node) -> bool:
    """Attention too, where it drops anything."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return bool(node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0))
    return True


def _reads_of_written(graph: fx.Graph, backward: set[fx.Node]) -> Iterator[fx.Node]:
    """What the forward computes of inputs, or views of them, into which the graph copies at its end."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [write.args[0] for write in writes if write.args[0].op == "placeholder"]
    for node in reached(written, lambda node: filter(is_view, node.users)):
        for user in node.users:
            if not is_view(user) and user.op == "call_function" and user not in writes and user not in backward:
                yield user


def _save_statistics(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """A norm's number a row, for instance. A memory budget reckons by FLOPs of matmuls: it finds reductions free,
    and would have the backward read the whole tensor again for one."""
    for node in graph.nodes:
        statistic = node.op == "call_function" and node not in backward and _is_little(node)
        if statistic and "recompute" not in node.meta and not all(map(_is_little, node.users)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _release_weights(graph: fx.Graph, backward: set[fx.Node], available: set[fx.Node]) -> None:
    """Have the backward make the column copies of weights that are still saved, where they are more bytes than copies
    of layers' inputs spare: then what is saved is not above that of high precision."""
    weights, spent, spared = [], 0, 0
    for node in graph.nodes:
        if node.target not in CASTS or node in backward or "recompute" in node.meta:
            continue
        copies = [user for user in node.users if user.target is operator.getitem] or [node]
        size = sum(bytes_of(copy.meta["val"]) for copy in copies if not backward.isdisjoint(copy.users))
        sources = _sources(node)
        if size and _is_dgrads(node, sources):
            weights.append(node)
            spent += size
        elif size:
            spared -= size
            if not _are_of_norms(sources, available):
                spared += sum(_spared(source, backward, available) for source in sources)
    if spent > spared:
        for cast in weights:
            cast.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _spared(copied: fx.Node, backward: set[fx.Node], available: set[fx.Node]) -> int:
    """The bytes of a layer's input that high precision saves and a copy of it spares. None of what the backward reads
    anyway, as attention's output, or computes in high precision too, as a norm's. Less the masks of it, which high
    precision finds in the input itself."""
    made = back_past(copied, lambda node: is_view(node) or node.target is torch.ops.aten.clone.default)
    if made in available and not is_pointwise(made):
        return 0
    views = reached([made], lambda node: [user for user in node.users if user not in backward and is_view(user)])
    readers = (user for node in views for user in node.users if user not in backward and user not in views)
    masks = (user for user in readers if "recompute" not in user.meta and _is_mask(user, backward))
    return bytes_of(made.meta["val"]) - sum(bytes_of(mask.meta["val"]) for mask in masks)


def _is_mask(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether it compares a tensor with a number, for the backward."""
    value = tensor_of(node)
    compares = is_pointwise(node) and value is not None and value.dtype == torch.bool
    return compares and len(node.all_input_nodes) == 1 and not backward.isdisjoint(node.users)


def _is_as_cheap(cast: fx.Node, sources: Sequence[fx.Node], available: set[fx.Node]) -> bool:
    """Whether the backward makes what it needs of a cast at the cost at which the forward does."""
    if cast.target is ops.quantize_delayed:  # of experts' rows, whose bytes the backward transposes
        return any(user.target is ops.transpose_groups for user in cast.users)
    return cast.target in (*TWO_WAY_KNOWN, ops.quantize_groups) or (
        _holds_blocks(cast, sources) and _are_of_norms(sources, available)
    )


def _compute_again(sources: Sequence[fx.Node], available: set[fx.Node]) -> None:
    """Marks the sources of an op that Inductor does not fuse with them, so that torch would save them."""
    pending = list(sources)
    while pending:
        node = pending.pop()
        pointwise = is_pointwise(node) or node.target in _CONSTANTS
        if pointwise and "recompute" not in node.meta and available.issuperset(node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            pending += node.all_input_nodes


def _values_of_copies(graph: fx.Graph, backward: set[fx.Node]) -> set[fx.Node]:
    """What copies stand for, which the backward alone multiplies, marked to be computed there: torch would save it."""
    found = set()
    for node in graph.find_nodes(op="call_function", target=ops.dequantize):
        if node not in backward and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            found.add(node)
    return found


def _release_transposes(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Have the backward transpose weights that came in low precision, which FSDP gathers again for it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = node.args[0]
        value = source.meta["val"]
        transposed = is_view(source) and _is_of_input(source) and value.is_floating_point() and value.itemsize == 1
        if transposed and node not in backward and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _sources(cast: fx.Node) -> list[fx.Node]:
    source: Any = cast.args[0]
    return list(source) if isinstance(source, list | tuple) else [source]


def _is_of_weight(cast: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Whether a cast makes a dgrad's operand of inputs of the graph, and its column copy takes no second look for
    scales that the row copy has found."""
    found_again = cast.target in TWO_WAY_OWN and _scope_of(cast).transposes
    return not found_again and _is_dgrads(cast, sources)


def _is_dgrads(cast: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Whether it makes an operand of a dgrad of inputs of the graph."""
    readers = [*cast.users, *(user for copy in cast.users for user in copy.users)]
    arguments: list[Any] = [argument for user in readers for argument in user.args]
    dgrads = any(isinstance(argument, Gemm) and argument.name == "dgrad" for argument in arguments)
    dgrads = dgrads or any(user.target is ops.dequantize and _is_weights(user) for user in readers)
    return dgrads and all(map(_is_of_input, sources))


def _is_weights(values: fx.Node) -> bool:
    """Whether what a copy stands for is multiplied as a weight is, and not as x is, by dy's transpose."""
    read = reached([values], lambda node: () if node.target in _PRODUCTS else node.users)
    lefts = [node.args[0] for node in read if node.target in _PRODUCTS]
    return not any(isinstance(left, fx.Node) and left.target in _TURNS for left in lefts)


def _scope_of(cast: fx.Node) -> Scope:
    quantizers: list[Any] = [argument for argument in cast.args if isinstance(argument, Quantizer)]
    return quantizers[0].granularity  # type: ignore[no-any-return]


def _holds_blocks(cast: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Whether scales are those of blocks of one row, and a program of a norm's kernel holds the row: Note [Rows that
    hold blocks]."""
    scope, rows = _scope_of(cast), [source.meta["val"].shape[-1] for source in sources]
    return scope.one_row and not scope.microscaled and all(isinstance(row, int) and may_be_held(row) for row in rows)


def _are_of_norms(sources: Sequence[fx.Node], available: set[fx.Node]) -> bool:
    """Whether the backward would compute each from one tensor and from numbers that the forward computes for its
    rows."""

    def is_computed(node: fx.Node) -> bool:
        made = not _is_little(node) and (is_pointwise(node) or is_view(node))
        return made and available.issuperset(node.all_input_nodes)

    for source in sources:
        nodes = reached([source], lambda node: node.all_input_nodes if is_computed(node) else ())
        read = [node for node in nodes if not is_computed(node)]
        tensors = [node for node in read if not _is_little(node) and is_as_large(node, source)]
        if len(tensors) != 1 or not any(_is_little(node) and node.op == "call_function" for node in read):
            return False
    return True


def _is_of_input(x: fx.Node) -> bool:
    """Whether `x` is an input of the graph, or a view or cast of one."""
    return back_past(x, is_view_or_cast).op == "placeholder"


def _available(graph: fx.Graph, backward: set[fx.Node]) -> set[fx.Node]:
    """What the backward reads, all of it, and the pointwise functions and views of that alone.

    It reads a tensor itself, an alias that autograd saves, or what it computes of it before its gradient comes, as a
    norm's does (x in fp32, times the row's statistic) and SwiGLU's (the derivative of silu)."""
    read: set[fx.Node] = set()
    origins = _origins(graph)
    for node in graph.nodes:
        if any(user in backward for user in node.users if user.op != "output"):
            read.update((node, origins[node]))
    for node in reversed(graph.nodes):  # a view of all of it
        if any(user in read and is_view(user) and is_as_large(user, node) for user in node.users):
            read.add(node)
    available: set[fx.Node] = set()
    for node in graph.nodes:
        made = is_pointwise(node) or is_view(node) or node.target in _CONSTANTS
        if (
            node in read
            or _is_little(node)
            or _is_vector(node)
            or (made and available.issuperset(node.all_input_nodes))
        ):
            available.add(node)
    return available


def _origins(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The one tensor of a node's own size of which, and of smaller ones, it is a pointwise function; else itself. A
    function of several, as a residual stream is, is such a tensor.

    Not through one that takes fewer bytes than what it is computed from: that would be kept instead, as a mask is. Nor
    to a function of several from one that takes as few bytes, as tanh of it: of the two either may be kept."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        found[node] = node
        value = tensor_of(node)
        if value is None or not (
            is_pointwise(node) or is_view(node) or node.target is torch.ops.aten.clone.default  # LayerNorm's begins so
        ):
            continue
        sources = [source for source in node.all_input_nodes if source.target not in _CONSTANTS]
        large = [source for source in sources if is_as_large(source, node)]
        again = node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
        if large and (again or all(value.itemsize >= source.meta["val"].itemsize for source in large)):
            [origin, *others] = {found[source] for source in large}
            is_wider = value.itemsize > origin.meta["val"].itemsize
            if not others and (is_wider or not (is_pointwise(node) and is_pointwise(origin))):
                found[node] = origin
    return found


def _is_vector(node: fx.Node) -> bool:
    """Whether a node is a vector of the graph's inputs, as a norm's bias is, which are in memory anyway."""
    value = tensor_of(node)
    return node.op == "placeholder" and value is not None and value.dim() == 1


def _is_little(node: fx.Node) -> bool:
    """A size, or a number a row as a norm's statistics are: nothing to keep."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and isinstance(value.shape[-1], int) and value.shape[-1] == 1
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat)
