"""Attention by masks that are proven, of lengths and offsets that a call tells, with biases, and of other forms."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_inductor.passes.pre_grad.attention import sites
from te_inductor.runtime.attention import predicate
from tests.offline.cases.common import Case

WINDOW = ["and", ["le", "k", "q"], ["ge", "k", ["add", "q", -200]], ["ne", ["at", 0, "b", "k"], 0]]
SIZES = (2, 1, 700, 500)  # batch, heads, queries, keys


def _heads(count: int, length: int, width: int = 64) -> Tensor:
    made = torch.randn(2, length, count, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
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


def attention_of_three_dimensions() -> Case:
    """ALiBi under a padding by `baddbmm` and `bmm`, as BLOOM has it."""
    sites.BIAS_QUERIES = 512

    def function(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        i, b = torch.arange(1024, device="cuda"), torch.arange(2, device="cuda")[:, None, None, None]
        hidden = ~((i[None, :] <= i[:, None]) & padding.bool()[b, i[None, :]])
        alibi = (i * torch.arange(8, device="cuda")[:, None]).to(q.dtype).expand(2, 8, 1024).reshape(16, 1, 1024)
        q, k, v = (one.reshape(16, 1024, 64) for one in (q, k, v))
        scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.125)
        scores = scores.view(2, 8, 1024, 1024).masked_fill(hidden, torch.finfo(q.dtype).min)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights.view(16, 1024, 1024), v).view(2, 8, 1024, 64)

    padding = torch.ones(2, 1024, device="cuda", dtype=torch.int64)
    return torch.compile(function, backend="te", fullgraph=True), (*(_heads(8, 1024) for _ in range(3)), padding)


def attention_with_a_learned_bias() -> Case:
    """Two layers with one table of relative positions, in the float mask of torch's function, as UMT5 has it."""
    sites.BIAS_QUERIES = 512

    def function(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, table: Tensor) -> Any:
        i = torch.arange(1024, device="cuda")
        bias = F.embedding((i[None, :] - i[:, None]).clamp(-16, 15) + 16, table).permute(2, 0, 1)[None]
        hidden = (padding == 0)[:, None, None, :]
        mask = bias + torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), k, v, mask)

    padding = torch.ones(2, 1024, device="cuda", dtype=torch.int64)
    table = torch.randn(32, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return torch.compile(function, backend="te", fullgraph=True), (*(_heads(8, 1024) for _ in range(3)), padding, table)


def attention_of_wide_queries() -> Case:
    """Queries and keys that are wider than values, as in DeepSeek-V3, under a padding."""

    def function(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        i, b = torch.arange(1024, device="cuda"), torch.arange(2, device="cuda")[:, None, None, None]
        return F.scaled_dot_product_attention(q, k, v, (i[None, :] <= i[:, None]) & padding.bool()[b, i[None, :]])

    q, k, v = (_heads(8, 1024, width) for width in (192, 192, 128))
    padding = torch.ones(2, 1024, device="cuda", dtype=torch.int64)
    return torch.compile(function, backend="te", fullgraph=True), (q, k, v, padding)


def attention_that_asks() -> Case:
    """Two layers under a padding, of which a call asks whether it hides anything."""

    def function(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        i, b = torch.arange(1024, device="cuda"), torch.arange(2, device="cuda")[:, None, None, None]
        mask = (i[None, :] <= i[:, None]) & padding.bool()[b, i[None, :]]
        return _attend(_attend(q, k, v, mask), k, v, mask)

    inputs = _heads(8, 1024), _heads(4, 1024), _heads(4, 1024), torch.ones(2, 1024, device="cuda", dtype=torch.int64)
    return torch.compile(function, backend="te", fullgraph=True), inputs
