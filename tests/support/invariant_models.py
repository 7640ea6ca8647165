"""A decoder with a static cache, and its log-probabilities as training, prefill and decoding compute them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """A layer of Llama's, or of Qwen3's, whose queries and keys have norms."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int, qwen: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head) if qwen else nn.Identity() for _ in range(2))
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * self.head, bias=not qwen) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], places: Tensor, mask: Any, cache: Any) -> Tensor:
        h, (batch, length, _) = self.norm1(x), x.shape
        q = self.q_norm(self.q_proj(h).view(batch, length, self.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(h).view(batch, length, self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(h).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        q, k = (one * turn[0] + torch.cat([-one.chunk(2, -1)[1], one.chunk(2, -1)[0]], -1) * turn[1] for one in (q, k))
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            cache[0].index_copy_(2, places, k)
            cache[1].index_copy_(2, places, v)
            y = F.scaled_dot_product_attention(q, *cache, attn_mask=mask, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Decoder(nn.Module):
    def __init__(
        self, words: int, width: int, hidden: int, heads: int, kv_heads: int, layers: int = 1, qwen: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, hidden, heads, kv_heads, qwen) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor, places: Tensor, mask: Tensor | None = None, caches: Any = None) -> Tensor:
        x, head = self.embed(ids), self.layers[0].head
        angles = places[:, None].float() / 1e4 ** (torch.arange(0, head, 2, device=ids.device) / head)
        turn = torch.cat([angles, angles], -1)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = layer(x, (turn.cos().to(x.dtype), turn.sin().to(x.dtype)), places, mask, cache)
        return self.lm_head(self.norm(x)).float().log_softmax(-1)

    def caches(self, batch: int, keys: int) -> list[tuple[Tensor, Tensor]]:
        like, layer = self.embed.weight, self.layers[0]
        sizes = batch, layer.kv_heads, keys, layer.head
        return [(like.new_zeros(sizes), like.new_zeros(sizes)) for _ in self.layers]


@torch.no_grad()
def generated(run: Callable[..., Tensor], model: Decoder, ids: Tensor, prompt: int, keys: int) -> Tensor:
    """Log-probabilities of the prompt at once, and of what follows token by token, with a static cache of so many
    keys."""
    caches, every = model.caches(len(ids), keys), torch.arange(keys, device=ids.device)
    starts = [0, *range(prompt, ids.shape[1])]
    found = []
    for start, end in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
        places = every[start:end].clone()
        found.append(run(ids[:, start:end].contiguous(), places, every[None] <= places[:, None], caches).clone())
    return torch.cat(found, 1)
