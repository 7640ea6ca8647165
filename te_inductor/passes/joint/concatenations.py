"""The pass that casts the pieces of a concatenation, and not the concatenation, on the joint graph.

A layer whose output is cut in two, as gate and up of one parameter, gets the gradients of both halves as one tensor::

    dy = cat([dgate, dup], 1);  dy = where(rows of a group, dy, 0), of experts;  cast(dy)

A kernel of that tensor computes for each element what its half needs, under a condition, and again for the other half:
SwiGLU's gradient reads three tensors, each by both halves. Here the cast is that of pieces, as merged layers have it,
so that one kernel computes both halves of a place and writes them to where they stand in the copy. The arithmetic is
the same. What comes in between, a condition on rows, a view that keeps columns or a conversion, is done to each piece.

It is done where one kernel has all pieces: they have the same shape, and read a tensor in common. Before
`fused.gated_dgrad`, which gives a cast of pieces to the GEMM that makes them."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_inductor import ops
from te_inductor.passes.graph.casts import records_amax
from te_inductor.passes.graph.gemm_nodes import VIEWS
from te_inductor.passes.graph.node_kinds import has_shape, is_cast, is_pointwise, tensor_of
from te_inductor.passes.graph.tracing import insert
from te_inductor.passes.graph.walks import reached
from te_inductor.recipes import Quantizer

aten = torch.ops.aten
_COLUMNS = 1  # the dimension of a cast's matrix along which pieces stand beside each other
_KNOWN_SCALE = (ops.quantize_delayed, ops.quantize_rowcol_delayed)
_GIVEN = "eager_input_vals"  # what torch notes of a node: what it was called with
_OWN_SCALES = (ops.quantize, ops.quantize_rowcol)


def cast_pieces(graph: fx.Graph) -> None:
    """Replace casts of a concatenation, and what looks for its amax, where nothing else reads it."""
    for cat in graph.find_nodes(op="call_function", target=aten.cat.default):
        pieces = _pieces(cat)
        if not pieces or not _share_reads(pieces):
            continue
        steps = list(_steps(cat))
        if any(_is_cast_of_pieces(user, pieces) for step in steps for user in step.users if user not in steps) and all(
            user in steps or _takes_pieces(user, pieces) for step in steps for user in step.users
        ):
            _replace(steps, pieces)


def _pieces(cat: fx.Node) -> Sequence[fx.Node]:
    """The pieces of one shape, side by side in the last dimension; none of any other `cat`."""
    pieces, *dim = cat.args
    last = cat.meta["val"].dim() - 1
    if last < 1 or not dim or dim[0] not in (last, -1) or len(pieces) < 2:  # type: ignore[arg-type]
        return ()
    first, *others = (piece.meta["val"] for piece in pieces)  # type: ignore[union-attr]
    alike = all(has_shape(other, first.shape) and other.dtype == first.dtype for other in others)
    return list(pieces) if alike else ()  # type: ignore[arg-type]


def _share_reads(pieces: Sequence[fx.Node]) -> bool:
    """Whether all are computed, element by element, from a tensor in common."""
    return bool(set.intersection(*(set(_reads(piece)) for piece in pieces)))


def _reads(piece: fx.Node) -> Iterator[fx.Node]:
    """The tensors as large as it that a kernel which computes it reads."""

    def is_computed(node: fx.Node) -> bool:
        return node.op == "call_function" and (is_pointwise(node) or node.target in VIEWS)

    for node in reached([piece], lambda node: node.all_input_nodes if is_computed(node) else ()):
        value = None if is_computed(node) else tensor_of(node)
        if value is not None and statically_known_true(value.numel() == piece.meta["val"].numel()):
            yield node


def _steps(whole: fx.Node) -> Iterator[fx.Node]:
    """The concatenation, and what is the concatenation of the same computed of each piece."""
    yield whole
    for user in whole.users:
        if is_cast(user) or _keeps_columns(user, whole) or _masks_rows(user, whole):
            yield from _steps(user)


def _keeps_columns(user: fx.Node, whole: fx.Node) -> bool:
    return user.target in VIEWS and statically_known_true(user.meta["val"].shape[-1] == whole.meta["val"].shape[-1])


def _masks_rows(user: fx.Node, whole: fx.Node) -> bool:
    """Whether it puts a number, or one a row, in the place of some rows."""
    if user.target is not aten.where.self or [*user.args[1:]].count(whole) != 1:
        return False
    others = [one.meta["val"] for one in user.args if one is not whole]  # type: ignore[union-attr]
    of_rows = all(other.dim() == 0 or statically_known_true(other.shape[-1] == 1) for other in others)
    return of_rows and has_shape(user.meta["val"], whole.meta["val"].shape)


def _takes_pieces(user: fx.Node, pieces: Sequence[fx.Node]) -> bool:
    return user.target is ops.current_scale or records_amax(user) or _is_cast_of_pieces(user, pieces)


def _is_cast_of_pieces(user: fx.Node, pieces: Sequence[fx.Node]) -> bool:
    """Whether it casts a matrix of which each piece has whole blocks, of those scales that a cast of pieces knows."""
    if user.target not in (*_KNOWN_SCALE, *_OWN_SCALES):
        return False
    source, *rest = (one for one in user.args if one is not None)
    [quantizer] = [one for one in rest if isinstance(one, Quantizer)]
    scope, width = quantizer.granularity, pieces[0].meta["val"].shape[-1]
    # An amax or a seed is given where scales have two levels, or casts are stochastic.
    given = len(rest) > 1 or bool(user.kwargs)
    if user.target in _OWN_SCALES and (scope.whole or scope.microscaled or given):
        return False
    return source.meta["val"].dim() == 2 and statically_known_true(width % scope.alignment == 0)  # type: ignore[union-attr]


def _replace(steps: Sequence[fx.Node], pieces: Sequence[fx.Node]) -> None:
    """Have the steps done to each piece, and their readers read the pieces."""
    made = {steps[0]: list(pieces)}
    for step in steps:
        if step is not steps[0]:
            source = next(one for one in step.all_input_nodes if one in made)
            made[step] = [_of_piece(step, source, piece) for piece in made[source]]
        for user in [user for user in step.users if user not in steps]:
            _give(user, step, made[step])
    for step in reversed(steps):
        step.graph.erase_node(step)


def _of_piece(step: fx.Node, whole: fx.Node, piece: fx.Node) -> fx.Node:
    args = fx.node.map_arg(step.args, lambda one: piece if one is whole else one)
    if step.target in VIEWS:  # rows as the view has them: a symbolic number is a node
        *rows, _ = step.args[1]  # type: ignore[misc, str-unpack]
        args = (piece, [*rows, piece.meta["val"].shape[-1]])
    return _call(step, step.target, *args)


def _give(user: fx.Node, whole: fx.Node, pieces: Sequence[fx.Node]) -> None:
    """Have `user` read the pieces."""
    if records_amax(user):
        told = [one for each in user.kwargs["pieces"] for one in (pieces if each is whole else [each])]  # type: ignore[union-attr]
        user.kwargs = {**user.kwargs, "pieces": told}
        user.meta.pop(_GIVEN, None)
    elif user.target is ops.current_scale:
        among = [one for each in user.args[0] for one in (pieces if each is whole else [each])]  # type: ignore[union-attr]
        user.args = (among, *user.args[1:])
    else:
        rest = [one for one in user.args[1:] if one is not None]
        op = ops.quantize_pieces_delayed if user.target in _KNOWN_SCALE else ops.quantize_pieces
        new = _call(user, op, list(pieces), _COLUMNS, *rest)
        if user.target is ops.quantize_delayed:  # a tensor, of the two that the other gives
            new = _call(user, operator.getitem, new, 0)
        user.replace_all_uses_with(new)
        user.graph.erase_node(user)


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A node in front of `like`, of its part of the graph."""
    with like.graph.inserting_before(like):
        return insert(like.graph, target, *args, like={name: one for name, one in like.meta.items() if name != _GIVEN})
