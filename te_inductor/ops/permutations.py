"""Rows that a sort brings into the experts' order, and back: gathers both ways.

# Note [Where rows are computed]
Each token's row goes to several experts. A kernel that goes through rows in the experts' order reads a token's row once
for each of its experts, at times so far apart that it comes from memory again. Going through them in the tokens' order
it reads a row once for all, and stores each result where its expert has it: all rows are written, each once. Of one
permutation, `take_rows` and `place_rows` have the same values. `take_rows` is read by what computes with it; the first
dimension of what `place_rows` is given is that of the loops of its kernel. passes/joint/token_order.py makes the second
of the first behind a cast."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.runtime.definition import define, op_of


def take_bytes(data: Tensor, rows: Tensor) -> Tensor:
    """``data[rows]``, of FP8, too, which has no index on every device."""
    if data.itemsize > 1 or not data.is_floating_point():
        return data[rows]
    return data.view(torch.uint8)[rows].view(data.dtype)


def cat_bytes(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates bytes, as FP8 tensors have no `cat` on every device."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([piece.view(torch.uint8) for piece in pieces], dim).view(pieces[0].dtype)


def _take_rows(
    x: Tensor,  # (T, ...)
    order: Tensor,  # (T * each,), a permutation: row i is x's row order[i] // each
    places: Tensor,  # (T, each), where each stands, or (T,)
) -> Tensor:  # (T * each, ...)
    return x[order // places.shape[1]] if places.dim() > 1 else x[order]


def _place_rows(
    x: Tensor,  # (T, ...)
    rows: Tensor,  # (T * each,): row i is x's row rows[i]
    places: Tensor,  # (T, each), where each row stands, or (T,)
) -> Tensor:  # (T * each, ...)
    return take_bytes(x, rows)


def _rows_like(x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


take_rows = op_of(_take_rows, lambda x, order, places: _rows_like(x, order, places), name="take_rows")
place_rows = op_of(_place_rows, _rows_like, name="place_rows")


def _places_of(order: Tensor, each: int) -> Tensor:
    """Written as Inductor has one kernel for it, where a scatter of int64 is three launches on CUDA."""
    places = torch.arange(order.shape[0], device=order.device, dtype=order.dtype)
    return torch.empty_like(order).index_put((order,), places).view(-1, each)


class _PermuteRows(Operation):
    """``x[back]``, of a permutation that ``order`` undoes: the gradient's rows are those of ``order``. Nothing is added
    up. Inputs: x (M, ...), back and order (M,)."""

    def compute(self, needs: Needs, x: Tensor, back: Tensor, order: Tensor) -> tuple[Tensor, None]:
        return x[back], None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(*inputs[1:])

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        back, order = ctx.saved_tensors
        return take_rows(grads[0], order, back), None, None


class _SpreadRows(Operation):
    """``x[order // each]``, where `order` sorts `each` choices of every row: the gradients of a row are added up in
    fp32. Inputs: x (T, ...), order (T * each,), each. Returns (T * each, ...)."""

    def compute(self, needs: Needs, x: Tensor, order: Tensor, each: int) -> tuple[Tensor, None]:
        return x[order // each], None

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: None) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.each = inputs[2]

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        [order] = ctx.saved_tensors
        return sum_rows(grads[0], order, ctx.each), None, None


class _SumRows(Operation):
    """What `_SpreadRows` undoes: the rows of each token added up, in fp32. Inputs: rows (T * each, ...), order
    (T * each,), each. Returns (T, ...)."""

    def compute(self, needs: Needs, rows: Tensor, order: Tensor, each: int) -> tuple[Tensor, Tensor]:
        places = _places_of(order, each)
        return rows[places].sum(1, dtype=torch.float32).to(rows.dtype), places

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Tensor) -> None:
        ctx.save_for_backward(inputs[1], found)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        order, places = ctx.saved_tensors
        return take_rows(grads[0], order, places), None, None


permute_rows = define("permute_rows(Tensor x, Tensor back, Tensor order) -> Tensor", _PermuteRows())
spread_rows = define("spread_rows(Tensor x, Tensor order, int each) -> Tensor", _SpreadRows())
sum_rows = define("sum_rows(Tensor rows, Tensor order, int each) -> Tensor", _SumRows())
# The places, (T, each), of rows that a permutation (T * each,) orders, of which row i is of x's row i // each.
places_of = op_of(_places_of, name="places_of")
