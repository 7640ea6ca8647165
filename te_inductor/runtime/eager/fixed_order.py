"""Products whose sums are made in one order, whatever stands beside a row: Note [One order of sums] in
kernels/fixed_order.py."""

import torch
from torch import Tensor

BLOCK = 128  # columns that share a scale, where scales change along K


def fixed_mm(
    a: Tensor,  # (B, M, K)
    b: Tensor,  # (B, N, K), or (B, K, N) where it is turned
    a_scale: Tensor | None,  # (), (M, 1), or (K/128, M) of blocks, fp32
    b_scale: Tensor | None,  # (), (N, 1), or (K/128, N)
    blocked: bool,  # whether scales are those of blocks
    out_dtype: torch.dtype,
    turned: bool = False,
) -> Tensor:  # (B, M, N)
    """Adds products up column by column, in fp32, and rounds none of them but to that."""
    wide_a, wide_b = a.float(), (b.mT if turned else b).float()
    y = wide_a.new_zeros((*wide_a.shape[:2], wide_b.shape[1]))
    step = BLOCK if blocked else max(a.shape[2], 1)
    for place, start in enumerate(range(0, a.shape[2], step)):
        part = torch.zeros_like(y)
        for k in range(start, min(start + step, a.shape[2])):
            part = part + wide_a[:, :, k, None] * wide_b[:, None, :, k]
        if blocked and a_scale is not None and b_scale is not None:
            part = part * (a_scale[place][:, None] * b_scale[place][None, :])
        y = y + part
    if not blocked and a_scale is not None and b_scale is not None:
        y = y * (a_scale * b_scale.t())
    return y.to(out_dtype)


def attention_gradients(
    dy: Tensor,  # (..., H, L, E)
    q: Tensor,  # (..., H, L, D)
    k: Tensor,  # (..., KV heads, S, D)
    v: Tensor,  # (..., KV heads, S, E)
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in any order of sums: those of torch's attention, for which
    `F` may have another function, inside of `context_parallel`."""
    q, k, v = (one.detach().requires_grad_() for one in (q, k, v))
    if any(one.numel() == 0 for one in (dy, q, k, v)):
        dq, dk, dv = (one.new_zeros(one.shape) for one in (q, k, v))
        return dq, dk, dv
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        y = torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        dq, dk, dv = (one.contiguous() for one in torch.autograd.grad(y, (q, k, v), dy))
    return dq, dk, dv
