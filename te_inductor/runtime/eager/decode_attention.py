"""Attention of few queries, as a step of generation has it: fused/decode_attention.py finds it in a graph."""

import torch
from torch import Tensor

QUERIES = 8  # that share their keys, at most: one side of a tensor core
WIDTHS = (64, 128, 256)  # of a head
DTYPES = (torch.bfloat16, torch.float16)


def decode_attention(
    q: Tensor,  # (B, M, D)
    k: Tensor,  # (B, D, N)
    v: Tensor,  # (B, N, D)
    keep: Tensor | None,  # (N,) bool: keys that count
    scale: float,
) -> Tensor:  # (B, M, D)
    """Computes attention of any number of queries and any width, in fp32."""
    scores = (q.float() @ k.float()) * scale
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
