"""Attention by masks that are proven, of lengths and offsets that a call tells."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.runtime.attention import predicate
from tests.offline.cases.common import Case

WINDOW = ["and", ["le", "k", "q"], ["ge", "k", ["add", "q", -200]], ["ne", ["at", 0, "b", "k"], 0]]
SIZES = (2, 1, 700, 500)  # batch, heads, queries, keys


def _heads(count: int, length: int) -> Tensor:
    made = torch.randn(2, length, count, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return made.requires_grad_()


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (one[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_of_lengths() -> Case:
    """Two layers of a window under a padding, whose length is symbolic."""

    def function(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        i, b = torch.arange(q.shape[2], device="cuda"), torch.arange(2, device="cuda")[:, None, None, None]
        near = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 256)
        mask = near & padding.bool()[b, i[None, :]]
        return _attend(_attend(q, k, v, mask), k, v, mask)

    inputs = _heads(8, 1024), _heads(4, 1024), _heads(4, 1024), torch.ones(2, 1024, device="cuda", dtype=torch.int64)
    for one, dim in zip(inputs, (2, 2, 2, 1), strict=True):
        torch._dynamo.mark_dynamic(one, dim)
    return torch.compile(function, backend="te", fullgraph=True), inputs


def attention_in_a_cache() -> Case:
    """A prompt behind as many tokens as a static cache holds, which a tensor says and the graph counts on."""

    def function(q: Tensor, keys: Tensor, values: Tensor, held: Tensor) -> Any:
        position = torch.arange(q.shape[2], device="cuda") + held
        mask = torch.arange(keys.shape[2], device="cuda")[None, :] <= position[:, None]
        held.add_(q.shape[2])
        return _attend(q, keys, values, mask)

    inputs = _heads(8, 1024).detach(), _heads(4, 4096).detach(), _heads(4, 4096).detach()
    torch._dynamo.mark_dynamic(inputs[0], 2)
    held = torch.zeros((), device="cuda", dtype=torch.int64)
    return torch.compile(function, backend="te", fullgraph=True), (*inputs, held)


def block_masks() -> Case:
    """What FlexAttention reads of a window under a padding."""

    def function(padding: Tensor) -> Any:
        return predicate.block_mask(WINDOW, [padding], SIZES, padding.device)

    padding = torch.ones(SIZES[0], SIZES[3], device="cuda", dtype=torch.int64)
    return torch.compile(function, backend="te", fullgraph=True), (padding,)
