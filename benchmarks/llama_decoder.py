"""A Llama-3-shaped decoder that generates with a static KV cache: plain `nn.Module`, nothing of te_inductor."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes; the defaults are Llama-3-8B's."""

    layers: int = 32
    dim: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    context: int = 1024  # positions that the cache holds

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Attention(nn.Module):
    """Grouped queries with rotary positions; q, k and v as one layer, as inference engines store them."""

    def __init__(self, shape: Shape, batch: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.dim, width, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)
        cache = torch.zeros(batch, shape.kv_heads, shape.context, shape.head_dim, dtype=dtype)
        self.register_buffer("keys", cache, persistent=False)
        self.register_buffer("values", cache.clone(), persistent=False)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor, place: Tensor) -> Tensor:
        shape, batch = self.shape, x.shape[0]
        q, k, v = self.qkv(x).view(batch, 1, -1, shape.head_dim).split((shape.heads, shape.kv_heads, shape.kv_heads), 2)
        q, k = _rotated(q, turn), _rotated(k, turn)
        self.keys.index_copy_(2, place, k.transpose(1, 2))
        self.values.index_copy_(2, place, v.transpose(1, 2))
        # The queries of a group are rows of one product with the keys that they share. Two products and a softmax: for
        # one query F.scaled_dot_product_attention takes 18 us more (H200, torch 2.11), on as many SMs as there are KV
        # heads.
        q = q.view(batch, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        scores = (q @ self.keys.transpose(2, 3)).float() * shape.head_dim**-0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype)
        return self.o((weights @ self.values).reshape(batch, 1, -1))


def _rotated(x: Tensor, turn: Tensor) -> Tensor:  # (B, 1, H, D), (2, D/2)
    a, b = x.float().chunk(2, -1)
    cos, sin = turn
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape, batch: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(shape.dim, eps=1e-5), nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape, batch, dtype)
        self.gate_up = nn.Linear(shape.dim, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor, place: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn, mask, place)
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.lm_head = nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # the most likely token of each sequence
        return self.lm_head(self.norm(x)).argmax(-1)


class Decoder(nn.Module):
    """``tokens, place -> next tokens``: one position of each sequence."""

    def __init__(self, shape: Shape, batch: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, batch, dtype) for _ in range(shape.layers))
        self.head = Head(shape)
        steps = 500000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.context)[:, None] * steps
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin()), 1), persistent=False)
        self.register_buffer("positions", torch.arange(shape.context), persistent=False)

    def forward(self, tokens: Tensor, place: Tensor) -> Tensor:  # (B, 1) and (1,), int64
        x = self.embedding(tokens)
        turn = self.turns.index_select(0, place)[0]
        mask = (self.positions <= place)[None, None, None]
        for block in self.blocks:
            x = block(x, turn, mask, place)
        return self.head(x)


def make(shape: Shape, batch: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Makes a decoder with random weights, of the size that training starts from."""
    with torch.device("meta"):
        model = Decoder(shape, batch, dtype)
    fixed = {"turns", "positions"}
    model = model.to(dtype).to_empty(device=device)
    fresh = Decoder(replace(shape, layers=0, vocabulary=1), batch, dtype)
    for name in fixed:
        setattr(model, name, getattr(fresh, name).to(device))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
    for name, buffer in model.named_buffers():
        if name not in fixed:
            buffer.normal_()
    return model.requires_grad_(False).eval()
