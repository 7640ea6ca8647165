"""Attention with a bias, as models write it: ALiBi and T5's relative bias, by hand and as torch's float mask."""

import math

import torch
import torch.nn.functional as F

from tests.attention import positions

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def alibi(q, k, learned):
    """Returns slopes times the distance from the last key, as MPT does."""
    return SLOPES.to(q)[:, None, None] * torch.arange(1 - k.shape[2], 1, device=q.device)


def alibi_of_distance(q, k, learned):
    i, j, _ = positions(q.shape[2], k.shape[2], q.device)
    return -(i - j).abs() * SLOPES.to(q)[:, None, None]


def alibi_of_a_batch(q, k, learned):
    """Returns a bias for each sequence, as Falcon does."""
    return (SLOPES.to(q)[:, None] * torch.arange(k.shape[2], device=q.device)).expand(2, 4, -1)[:, :, None]


def relative(q, k, learned):
    """Reads a table of a number for each bucket and head, as T5 does."""
    i, j, _ = positions(q.shape[2], k.shape[2], q.device)
    return F.embedding((i - j).clamp(-5, 5) + 5, learned).permute(2, 0, 1).unsqueeze(0)


BIASES = (alibi, alibi_of_distance, alibi_of_a_batch, relative)
MASKS = {
    "none": lambda i, j, b, padding: None,
    "causal": lambda i, j, b, padding: j <= i,
    "padded": lambda i, j, b, padding: padding.bool()[b, j].expand(2, 1, i.shape[0], -1),
    "causal, padded": lambda i, j, b, padding: (j <= i) & padding.bool()[b, j],
}


def program(bias, mask, how):
    """Attention with a bias and a mask, in the ways in which models write it."""

    def run(q, k, v, padding, documents, learned):
        keep = MASKS[mask](*positions(q.shape[2], k.shape[2], q.device), padding)
        lowest = -math.inf if "infinite" in how else torch.finfo(q.dtype).min
        added = bias(q, k, learned)
        if how.startswith("sdpa"):
            if how == "sdpa, filled":  # as Falcon
                added = added if keep is None else added.masked_fill(~keep, lowest)
            elif keep is not None:
                added = added + torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, lowest)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        scores = q @ k.transpose(-1, -2)
        # The first as Falcon, by hand.
        scores = (scores + added) * 0.3 if how == "before the scale" else scores * 0.3 + added
        if keep is not None and how == "filled":
            scores = scores.masked_fill(~keep, lowest)
        elif keep is not None:
            scores = scores + torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, lowest)
        return F.softmax(scores, dim=-1).to(v.dtype) @ v

    return run
