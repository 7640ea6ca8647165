"""Attention of few queries, as a step of generation has it: passes/pre_grad/attention finds it where the program calls
torch's function, fused/decode_attention.py where it is two products and a softmax."""

import torch
from torch import Tensor

QUERIES = 8  # that share their keys, at most: one side of a tensor core
WIDTHS = (64, 128, 256)  # of a head
DTYPES = (torch.bfloat16, torch.float16)


def decode_attention(
    q: Tensor,  # (B, H, M, D)
    k: Tensor,  # (B, KV heads, N, D)
    v: Tensor,  # (B, KV heads, N, D)
    keep: Tensor | None,  # (B or 1, N) bool: keys that count
    scale: float,
    zeros: bool = False,  # whether a query without any key gets zeros, as from torch's function; else NaN
) -> Tensor:  # (B, H, M, D)
    """Computes attention of any number of queries and any width, in fp32."""
    with torch.autocast(q.device.type, enabled=False):  # the op may run inside the user's autocast region
        return _attention(q, k, v, keep, scale, zeros)


def _attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float, zeros: bool) -> Tensor:
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # type: ignore[no-untyped-call]
    scores = (rows.float() @ k.float().mT) * scale
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None], float("-inf"))
    weights = torch._safe_softmax(scores, -1) if zeros else scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype).view(q.shape)
