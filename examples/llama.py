"""A Llama in plain PyTorch: nothing here knows about low precision. The demo, the tests and the benchmarks share it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes. The defaults are the demo's on CPU: about 0.9 million parameters over bytes."""

    vocab: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None  # None: as many as heads; fewer: grouped-query attention
    hidden: int = 352
    context: int = 128
    tied: bool = False
    bias: bool = False
    eps: float = 1e-5
    rope_base: float = 10000.0


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight``, in float32 as Llama's own code has it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def rope_table(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, each (context, head_dim / 2) float32."""
    half = config.dim // config.heads // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(config.context, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(
    x: Tensor,  # (B, H, T, D)
    cos: Tensor,  # (T, D/2)
    sin: Tensor,  # (T, D/2)
) -> Tensor:  # (B, H, T, D), in x's dtype
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.dim // config.heads
        self.q = nn.Linear(config.dim, self.heads * self.head_dim, bias=config.bias)
        self.k = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=config.bias)
        self.v = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=config.bias)
        self.o = nn.Linear(self.heads * self.head_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = self.q(x).view(batch, time, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, time, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, time, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.kv_heads != self.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(mixed.transpose(1, 2).reshape(batch, time, -1))


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=config.bias)
        self.up = nn.Linear(config.dim, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens (B, T) to logits (B, T, vocab)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(_initialize)
        if config.tied:
            self.embedding.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _initialize(module: nn.Module) -> None:
    """Scaled by width. Llama's own 0.02 is for widths of thousands: at 128, runs that differ in rounding end 3%
    apart."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)


def loss(model: Callable[..., Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
