"""Attention by a predicate of which a part reads tensors, in one of two ways, as those tensors are in this call.

# Note [Attention that a mask leaves as it is]
Most batches have no padding: their mask hides nothing that causal attention does not hide. cuDNN computes causal
attention 1.4 to 1.7 times as fast as FlexAttention (H200, 32 heads of 128, 32768 and 4096 tokens), and a mask as a
tensor at a third of its rate. Which of the two a batch wants is known on the device alone, so a call waits for it once,
in front of the first layer, and all layers and their backwards read what came. The wait costs a device that has work of
the step before nothing but the launches of the first kernels. FlexAttention's block mask is an operand likewise, which
is computed once for all of them, and only where the mask hides something."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from te_inductor.runtime.attention import predicate

aten = torch.ops.aten


def attend(
    q: Tensor,  # (B, H, L, D)
    k: Tensor,  # (B, KV heads, S, D)
    v: Tensor,  # (B, KV heads, S, D)
    hides_nothing: Tensor,  # (), Boolean, on the host: whether the tensors hide nothing
    tensors: Sequence[Tensor],
    blocks: Sequence[Tensor],  # `predicate.block_mask`'s, which are read where the tensors hide something
    text: str,  # of the predicate
    scale: float,
    causal: bool,  # what the predicate is without the tensors: causal, or true
) -> tuple[Tensor, Tensor]:  # (B, H, L, D) and (B, H, L) in fp32
    """The output, and the logarithms of the sums of the exponentials where the backward reads them."""
    out, lse = like_output(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)
    if hides_nothing.item():
        found, sums, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        lse.copy_(sums.view(lse.shape))
    else:
        found = _flex(q, k, v, tensors, blocks, text, scale)
    return _as(out, found), lse


def attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hides_nothing: Tensor,
    tensors: Sequence[Tensor],
    blocks: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    text: str,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Where the mask hides something the forward is computed once more, as FlexAttention
    keeps its own record of it."""
    if hides_nothing.item():
        none = torch.empty((), dtype=torch.int64, device=q.device)
        found = aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, out, lse.unsqueeze(-1), none, none, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip
    else:
        with torch.enable_grad():
            q, k, v = learns = tuple(one.detach().requires_grad_() for one in (q, k, v))
            found = torch.autograd.grad(_flex(q, k, v, tensors, blocks, text, scale), learns, dy)
    dq, dk, dv = (_as(like_output(one, one), gradient) for one, gradient in zip((q, k, v), found, strict=True))
    return dq, dk, dv


def like_output(q: Tensor, v: Tensor) -> Tensor:
    """A tensor (B, H, L, D of v) that lies in memory as (B, L, H, D)."""
    batch, heads, length, _ = q.shape
    return q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)


def _as(expected: Tensor, found: Tensor) -> Tensor:
    """What was found, with the strides that the graph was compiled for."""
    return found if found.stride() == expected.stride() else expected.copy_(found)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], blocks: Sequence[Tensor], text: str, scale: float
) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask

    node = predicate.from_text(text)

    def attends(b: Tensor, h: Tensor, qi: Tensor, ki: Tensor) -> Any:
        return predicate.evaluate(node, {"b": b, "h": h, "q": qi, "k": ki}, tensors)

    shape: Any = (predicate.BLOCK, predicate.BLOCK)
    mask = BlockMask((q.shape[2], k.shape[2]), *blocks, shape, attends)  # type: ignore[call-arg, arg-type]
    heads = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    return _compiled(text, scale, q.dtype, heads, torch.is_grad_enabled())(q, k, v, mask)  # type: ignore[no-any-return]


@cache
def _compiled(text: str, scale: float, *_: Any) -> Any:
    """FlexAttention for one predicate, and for one of each thing else that no compiled program has two of. Dynamo counts
    the programs of a function's code, and raises at the ninth: each of these has code of its own."""
    from torch.nn.attention.flex_attention import flex_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)

    attention.__code__ = attention.__code__.replace()
    return torch.compile(attention, fullgraph=True)
