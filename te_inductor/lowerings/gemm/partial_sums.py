"""Sums over parts of K that a kernel leaves, added up where the result is read."""

import functools
import operator

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V

from te_inductor.lowerings.casts.narrowing import narrowed
from te_inductor.lowerings.codegen.programmatic_launch import start_early

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type
_CUTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor)
_SAME = (
    operator.getitem,
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    convert.default,
)


def called(op, *args):  # type: ignore[no-untyped-def]
    """The op's own kernel, on contiguous tensors."""
    for arg in args:
        if isinstance(arg, ir.TensorBox):
            arg.realize()  # once, for all its readers
    given = [ir.ExternKernel.require_contiguous(arg) if isinstance(arg, ir.TensorBox) else arg for arg in args]
    return fallback_handler(op, add_to_fallback_set=False)(*given)


def added_up(  # type: ignore[no-untyped-def]
    op,
    *args,
    splits: int,
    out_dtype: torch.dtype,
    early: bool = True,  # the graph's kernels start early
) -> ir.TensorBox:
    """What an op's (splits, M, N) partial sums make, (M, N)."""
    if early:
        start_early()
    parts = called(op, *args)
    summands = [lowerings[aten.select](parts, 0, i) for i in range(splits)]
    if splits == 1:
        return summands[0]  # type: ignore[no-any-return]
    # Additions, and no reduction, as elementwise code becomes part of what reads the result, a norm's reduction too.
    y = narrowed(functools.reduce(lowerings[aten.add], summands), out_dtype)
    if _is_cut_twice(V.graph.current_node):
        y.realize()
    return y  # type: ignore[no-any-return]


def _is_cut_twice(node: torch.fx.Node, cuts: int = 0) -> bool:
    """Whether pieces are taken of pieces, as where q, k and v are one layer and their halves are turned: Inductor would
    add the sums up in a kernel for each of them."""
    users = [user for user in node.users if user.target in (*_CUTS, *_SAME)]
    return cuts > 1 or any(_is_cut_twice(user, cuts + (user.target in _CUTS)) for user in users)
