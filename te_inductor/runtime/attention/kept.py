"""Attention with dropout to the keys that a padding keeps.

# Note [Dropout under a padding]
FlexAttention has no dropout, and torch's attention takes a mask as a tensor in no flash kernel. FlashAttention has
dropout, and sequences whose ends it reads on the device. So the rows of k and v that a padding keeps are moved to the
front, in their order, of which a softmax without a mask on positions knows nothing: the keys of a sequence are those
between two ends. Queries stay where they are, all of them, so that nothing about them is computed or moved. A sequence
that keeps no key gives zeros, as torch's attention does for queries that attend to none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_inductor.runtime.attention import predicate

aten = torch.ops.aten


def rows_of_kept(
    node: predicate.Node, tensors: Sequence[Tensor], sizes: Sequence[Any], device: torch.device
) -> list[Tensor]:
    """Finds, for a predicate on batch and key, the order of the rows of k (B * S, ...) in which the kept ones are in
    front, where each stands in it, -1 of those that are not kept, and the ends of the sequences among queries and among
    kept keys, int32 (B + 1,)."""
    batch, _, queries, keys = sizes
    places = {"b": torch.arange(batch, device=device)[:, None], "k": torch.arange(keys, device=device)}
    kept = predicate.evaluate(node, places, tensors).expand(batch, keys)
    flat = kept.reshape(-1)
    order = torch.argsort((~flat).to(torch.int32), stable=True)
    place = torch.where(flat, flat.cumsum(0) - 1, -1)
    ends = torch.cat([torch.zeros_like(order[:1]), kept.sum(-1).cumsum(0)])
    of_queries = torch.arange(batch + 1, device=device) * queries
    return [order, place, of_queries.to(torch.int32), ends.to(torch.int32)]


def flash(
    q: Tensor,  # (total of L, H, D)
    k: Tensor,  # (total of S, KV heads, D)
    v: Tensor,
    ends_q: Tensor,  # (B + 1,), int32
    ends_k: Tensor,
    most_q: int,  # the length of the longest sequence
    most_k: int,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output as q, the logarithms of the sums of the exponentials, (H, total of L) in fp32, and what the backward
    draws the same random numbers from, (2,) in int64."""
    out, lse, random, *_ = aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, most_q, most_k, dropout, False, False, scale=scale
    )
    return out, lse, random.to(q.device).view(torch.int64)


def flash_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    most_q: int | torch.SymInt,
    most_k: int | torch.SymInt,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Rows of k and v behind the last end have any."""
    random = random.view(torch.uint64)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._flash_attention_backward(
        dy, q, k, v, out, lse, ends_q, ends_k, most_q, most_k, dropout, False, random, unused, scale=scale
    )
    return dq, dk, dv


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    most_q: int | torch.SymInt,
    most_k: int | torch.SymInt,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash` where there is no such kernel."""
    random = torch.randint(torch.iinfo(torch.int64).max, (2,), device=q.device)
    out, sums = _sequences(q, k, v, ends_q, ends_k, dropout, scale, random)
    return out, sums, random


def plain_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    most_q: int | torch.SymInt,
    most_k: int | torch.SymInt,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of its backward."""
    with torch.enable_grad():
        q, k, v = learns = tuple(one.detach().requires_grad_() for one in (q, k, v))
        again, _ = _sequences(q, k, v, ends_q, ends_k, dropout, scale, random)
        dq, dk, dv = torch.autograd.grad(again, learns, dy)
    return dq, dk, dv


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, dropout: float, scale: float, random: Tensor
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator(q.device).manual_seed(int(random[0]))
    outs, sums = list[Tensor](), list[Tensor]()
    groups, wide = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    for start_q, end_q, start_k, end_k in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
        of_q = q[start_q:end_q].transpose(0, 1).to(wide)  # (H, L, D)
        of_k, of_v = (one[start_k:end_k].transpose(0, 1).to(wide).repeat_interleave(groups, 0) for one in (k, v))
        scores = of_q @ of_k.mT * scale
        sums.append(scores.logsumexp(-1).float())
        kept = torch.rand(scores.shape, generator=draw, dtype=wide, device=q.device) >= dropout
        weights = scores.softmax(-1) * kept / (1 - dropout)
        outs.append((weights @ of_v).transpose(0, 1).to(q.dtype))
    return torch.cat(outs), torch.cat(sums, -1)
