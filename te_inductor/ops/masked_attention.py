"""Attention whose mask reads tensors, as ops that a graph cannot see into: Note [Attention that a mask leaves as it is]
in runtime/attention/masked.py, and Note [Dropout under a padding] in runtime/attention/kept.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.runtime.attention import kept, masked, predicate
from te_inductor.runtime.definition import define, implement_on_cuda, library, op_of
from te_inductor.runtime.eager import decode_attention as few_queries

Sizes = Sequence[int | torch.SymInt]  # batch, heads, queries, keys


def _hides_nothing(tensors: Sequence[Tensor], data: str, sizes: Sizes) -> Tensor:
    return predicate.holds_everywhere(predicate.from_text(data), tensors, sizes).cpu()


def _block_mask(
    tensors: Sequence[Tensor], like: Tensor, text: str, sizes: Sizes, hides_nothing: Tensor | None = None
) -> list[Tensor]:
    if hides_nothing is not None and hides_nothing.item():
        return predicate.empty_block_mask(predicate.from_text(text), sizes, like.device)
    return _computed_block_mask(tensors, like, text, sizes)


def _computed_block_mask(
    tensors: Sequence[Tensor], like: Tensor, text: str, sizes: Sizes, _: Tensor | None = None
) -> list[Tensor]:
    found = predicate.block_mask(predicate.from_text(text), tensors, sizes, like.device)
    return [one.contiguous() for one in found]


# Whether a predicate on tensors holds for all scores: a Boolean on the host, (). Waits for the device.
hides_nothing = op_of(_hides_nothing, lambda *_: torch.empty((), dtype=torch.bool, device="cpu"), name="hides_nothing")
# FlexAttention's block mask of a predicate, on the device of `like`, where it is not computed in the graph: sizes are
# symbolic, and Inductor cannot divide a kernel over a number of blocks that is not a symbol itself ("CantSplit"); or it is
# read only where `hides_nothing`, a Boolean on the host, is false.
block_mask = op_of(_block_mask, _computed_block_mask, name="block_mask")
# Attention of the few queries of a step of generation, without a backward.
decode_attention = op_of(few_queries.decode_attention, lambda q, *_: q.new_empty(q.shape))
attend = op_of(
    masked.attend,
    lambda q, k, v, *_: (masked.like_output(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)),
)
attend_backward = op_of(
    masked.attend_backward, lambda dy, q, k, v, *_: tuple(masked.like_output(one, one) for one in (q, k, v))
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, flag, tensors, blocks, *ctx.constants = inputs
    ctx.blocks = len(blocks)
    ctx.save_for_backward(q, k, v, flag, *output, *blocks, *tensors)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, flag, out, lse, *others = ctx.saved_tensors
    blocks, tensors = others[: ctx.blocks], others[ctx.blocks :]
    gradients = attend_backward(dy, q, k, v, flag, tensors, blocks, out, lse, *ctx.constants)
    return (*gradients, None, [None] * len(tensors), [None] * len(blocks), None, None, None)


torch.library.register_autograd("te_inductor::attend", _backward, setup_context=_save, lib=library)


def _flash_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    sums = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return q.new_empty(q.shape), sums, q.new_empty((2,), dtype=torch.int64)


flash_by_ends = op_of(kept.plain, _flash_fake, name="flash_by_ends", tags=(torch.Tag.nondeterministic_seeded,))
flash_by_ends_backward = op_of(
    kept.plain_backward,
    lambda dy, q, k, v, *_: tuple(one.new_empty(one.shape) for one in (q, k, v)),
    name="flash_by_ends_backward",
)
implement_on_cuda(flash_by_ends=kept.flash, flash_by_ends_backward=kept.flash_backward)


class _AttendToKept(Operation):
    """Attention with dropout to the keys that a padding keeps. Inputs: q (B, H, L, D), k and v (B, KV heads, S, D), what
    `kept.rows_of_kept` has, the dropout and the scale."""

    def compute(self, needs: Needs, *inputs: Any) -> tuple[Tensor, Any]:
        q, k, v, order, _, ends_q, ends_k, dropout, scale = inputs
        rows = _rows(q), _rows(k)[order], _rows(v)[order]
        lengths = q.shape[2], k.shape[2]
        out, *found = flash_by_ends(*rows, ends_q, ends_k, *lengths, dropout, scale)
        return _heads(out, lengths[0]), (*rows, out, *found)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        q, k, _, _, place, ends_q, ends_k, *ctx.constants = inputs
        ctx.lengths = q.shape[2], k.shape[2]
        ctx.save_for_backward(*found, place, ends_q, ends_k)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        *found, place, ends_q, ends_k = ctx.saved_tensors
        gradients = flash_by_ends_backward(_rows(grads[0]), *found, ends_q, ends_k, *ctx.lengths, *ctx.constants)
        dropped, place = (place < 0)[:, None, None], place.clamp(min=0)
        dq = _heads(gradients[0], ctx.lengths[0])
        dk, dv = (_heads(one[place].masked_fill(dropped, 0.0), ctx.lengths[1]) for one in gradients[1:])
        return dq, dk, dv, None, None, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """(B, H, L, D) as (B * L, H, D)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _heads(x: Tensor, length: int) -> Tensor:
    """(B * L, H, D) as (B, H, L, D)."""
    return x.view(-1, length, *x.shape[1:]).transpose(1, 2)


# The output (B, H, L, D) of `_AttendToKept`'s inputs.
attend_to_kept = define(
    "attend_to_kept(Tensor q, Tensor k, Tensor v, Tensor order, Tensor place, Tensor ends_q, Tensor ends_k,"
    " float dropout, float scale) -> Tensor",
    _AttendToKept(),
)
