"""Llama-3-shaped transformer blocks as anyone would write them: plain `nn.Module`, nothing of te_inductor."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the work; the defaults are two Llama-3-8B blocks over 4 x 4096 tokens."""

    layers: int = 2
    batch: int = 4
    seq: int = 4096
    dim: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linear_params(self) -> int:
        """Weights of one layer's seven linear layers: q, o; k, v; gate, up, down."""
        return 2 * self.dim * self.dim + 2 * self.dim * self.kv_dim + 3 * self.dim * self.ffn

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, args: argparse.Namespace, **sizes: int) -> "Shape":
        """The shape that a command's arguments say, but for some sizes."""
        return cls(**{one.name: sizes.get(one.name, getattr(args, one.name, one.default)) for one in fields(cls)})


WIDTHS = {name: getattr(Shape, name) for name in ("dim", "ffn", "heads", "kv_heads")}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Blocks(nn.Module):
    def __init__(self, shape: Any, block: Callable[[Any], nn.Module] = Block, base: float = 500000.0) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.layers))
        frequencies = base ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.seq).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def build(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Blocks:
    """The same weights in every process: each arm has one of its own."""
    with torch.device(device):
        model = Blocks(shape)
    model = model.to(device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.02, generator=generator)
    return model


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int = 1) -> tuple[Tensor, Tensor]:
    """x, which wants a gradient so that every linear has a dgrad, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.seq, shape.dim)
    x, grad = (torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(2))
    return x.requires_grad_(), grad
