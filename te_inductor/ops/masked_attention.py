"""Attention whose mask reads tensors, as one op that a graph cannot see into: Note [Attention that a mask leaves as it
is] in runtime/attention/masked.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_inductor.ops.definition import define, library
from te_inductor.runtime.attention import masked, predicate


def _hides_nothing(tensors: Sequence[Tensor], data: str, sizes: Sequence[int]) -> Tensor:
    return predicate.holds_everywhere(predicate.from_text(data), tensors, sizes).cpu()


# Whether a predicate on tensors holds for all scores of (batch, heads, queries, keys): a Boolean on the host, (). Waits
# for the device.
hides_nothing = define(
    "hides_nothing(Tensor[] tensors, str data, SymInt[] sizes) -> Tensor",
    _hides_nothing,
    lambda tensors, data, sizes: torch.empty((), dtype=torch.bool, device="cpu"),
)

attend = define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor hides_nothing, Tensor[] tensors, str text, float scale, bool causal)"
    " -> (Tensor, Tensor)",
    masked.attend,
    lambda q, k, v, *_: (masked.like_output(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)),
)
attend_backward = define(
    "attend_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor hides_nothing, Tensor[] tensors, Tensor out,"
    " Tensor lse, str text, float scale, bool causal) -> (Tensor, Tensor, Tensor)",
    masked.attend_backward,
    lambda dy, q, k, v, *_: tuple(masked.like_output(one, one) for one in (q, k, v)),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, flag, tensors, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, flag, *output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, flag, out, lse, *tensors = ctx.saved_tensors
    gradients = attend_backward(dy, q, k, v, flag, tensors, out, lse, *ctx.constants)
    return (*gradients, None, [None] * len(tensors), None, None, None)


torch.library.register_autograd("te_inductor::attend", _backward, setup_context=_save, lib=library)
