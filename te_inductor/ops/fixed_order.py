"""Layers and attention that sum in one order: Note [One order of sums] in kernels/fixed_order.py."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_inductor.ops.differentiable import Gradients, Needs, Operation
from te_inductor.runtime.definition import op_of
from te_inductor.runtime.eager import fixed_order


def _fake_mm(a: Tensor, b: Tensor, *about: Any) -> Tensor:
    out_dtype, turned = about[3], about[4:] == (True,)
    return a.new_empty((*a.shape[:2], b.shape[2 if turned else 1]), dtype=out_dtype)


fixed_mm = op_of(fixed_order.fixed_mm, _fake_mm, name="fixed_mm")


@dataclass(frozen=True)
class FixedProduct(Operation):
    """Inputs: a (B, M, K) and b (B, N, K), or (B, K, N) where it is turned, of one dtype. The gradients are torch's own
    products."""

    out_dtype: torch.dtype
    turned: bool = False

    def compute(self, needs: Needs, a: Tensor, b: Tensor) -> tuple[Tensor, Any]:
        return fixed_mm(a, b, None, None, False, self.out_dtype, self.turned), needs

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        a, b = inputs
        ctx.needs, ctx.dtype = found, a.dtype
        ctx.save_for_backward(a if found[1] else None, b if found[0] else None)

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        a, b = ctx.saved_tensors
        dy = grads[0].to(ctx.dtype)
        da = torch.bmm(dy, b.mT if self.turned else b) if ctx.needs[0] else None
        if not ctx.needs[1]:
            return da, None
        return da, torch.bmm(a.mT, dy) if self.turned else torch.bmm(dy.mT, a)


def trace_fixed_linear(
    x: Tensor,  # (..., K)
    weight: Tensor,  # (N, K)
    bias: Tensor | None,  # (N,)
    out_dtype: torch.dtype,  # in which it computes
) -> Tensor:  # (..., N)
    """A layer in high precision."""
    rows = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1]).to(out_dtype)
    [y] = FixedProduct(out_dtype)(rows, weight[None].to(out_dtype))
    y = y if bias is None else y + bias.to(out_dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _fake_gradients(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v))
    return dq, dk, dv


attention_gradients = op_of(fixed_order.attention_gradients, _fake_gradients, name="attention_gradients")


@dataclass(frozen=True)
class FixedAttention(Operation):
    """Inputs: q, k and v of attention without a mask. The gradients are those of torch's attention, which computes the
    forward once more: no weight of a key is saved."""

    causal: bool
    scale: float

    def compute(self, needs: Needs, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        return _attention(q, k, v, None, self.causal, self.scale), needs

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], found: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.needs = found

    def backward(self, ctx: Any, *grads: Tensor) -> Gradients:
        found = attention_gradients(*grads, *ctx.saved_tensors, self.causal, self.scale)
        return tuple(one if needed else None for one, needed in zip(found, ctx.needs, strict=True))


def trace_fixed_attention(
    q: Tensor,  # (..., H, L, D)
    k: Tensor,  # (..., KV heads, S, D)
    v: Tensor,  # (..., KV heads, S, E)
    mask: Tensor | None,  # bool or a number, that broadcasts to (..., H, L, S)
    causal: bool,
    scale: float,
) -> Tensor:  # (..., H, L, E)
    """``F.scaled_dot_product_attention``: scores in fp32, exponentials rounded to q's dtype behind the softmax, as
    numbers of a mask are. Query heads of a KV head are rows of one product."""
    if mask is None:
        return FixedAttention(causal, scale)(q, k, v)  # type: ignore[no-any-return]
    return _attention(q, k, v, mask, causal, scale)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    sizes, kv_heads, (length, keys) = q.shape[:-1], k.shape[-3], (q.shape[-2], k.shape[-2])
    groups = math.prod(sizes[:-2]) * kv_heads  # said, as a tensor without elements has no size that is left over
    rows = q.reshape(groups, sizes[-2] // kv_heads * length, q.shape[-1])
    scores = FixedProduct(torch.float32)(rows, k.reshape(groups, keys, k.shape[-1]))
    scores = scores.reshape(*sizes, keys) * scale
    if causal:
        hidden = torch.arange(length, device=q.device)[:, None] < torch.arange(keys, device=q.device)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(q.dtype)
    weights = torch._safe_softmax(scores, -1).to(q.dtype).reshape(*rows.shape[:-1], keys)
    y = FixedProduct(q.dtype, turned=True)(weights, v.reshape(groups, keys, v.shape[-1]))
    return y.reshape(*sizes, v.shape[-1])


fixed_linear = op_of(trace_fixed_linear, name="fixed_linear")
fixed_attention = op_of(trace_fixed_attention, name="fixed_attention")
