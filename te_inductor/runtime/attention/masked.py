"""Attention by a predicate of which a part reads tensors, in one of two ways, as those tensors are in this call.

# Note [Attention that a mask leaves as it is]
Most batches have no padding: their mask hides nothing that causal attention does not hide. cuDNN computes causal
attention 1.4 to 1.7 times as fast as FlexAttention (H200, 32 heads of 128, 32768 and 4096 tokens), and a mask as a
tensor at a third of its rate. Which of the two a batch wants is known on the device alone, so a call waits for it once,
in front of the first layer, and all layers and their backwards read what came. The wait costs a device that has work of
the step before nothing but the launches of the first kernels."""

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
        found = _flex(q, k, v, tensors, text, scale)
    return _as(out, found), lse


def attend_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hides_nothing: Tensor,
    tensors: Sequence[Tensor],
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
            found = torch.autograd.grad(_flex(q, k, v, tensors, text, scale), learns, dy)
    dq, dk, dv = (_as(like_output(one, one), gradient) for one, gradient in zip((q, k, v), found, strict=True))
    return dq, dk, dv


def like_output(q: Tensor, v: Tensor) -> Tensor:
    """A tensor (B, H, L, D of v) that lies in memory as (B, L, H, D)."""
    batch, heads, length, _ = q.shape
    return q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)


def _as(expected: Tensor, found: Tensor) -> Tensor:
    """What was found, with the strides that the graph was compiled for."""
    return found if found.stride() == expected.stride() else expected.copy_(found)


def _flex(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], text: str, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask

    sizes = (*q.shape[:3], k.shape[2])
    node = predicate.from_text(text)
    found = predicate.block_mask(node, tensors, sizes, q.device)

    def attends(b: Tensor, h: Tensor, qi: Tensor, ki: Tensor) -> Any:
        return predicate.evaluate(node, {"b": b, "h": h, "q": qi, "k": ki}, tensors)

    shape: Any = (predicate.BLOCK, predicate.BLOCK)
    blocks = BlockMask((q.shape[2], k.shape[2]), *found, shape, attends)  # type: ignore[call-arg, arg-type]
    return _compiled(text)(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)  # type: ignore[no-any-return]


@cache
def _compiled(text: str) -> Any:
    """FlexAttention for one predicate."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)
