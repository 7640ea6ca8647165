"""Graphs whose rows depend on no other row: options={"batch_invariant": True}."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.offline.cases.common import Case, Mlp


class _Model(nn.Module):
    """An MLP and a head in high precision, of which the program reads log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(1024, 2048)
        self.head = nn.Linear(1024, 4096, bias=False, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(x)).float().log_softmax(-1)


def _invariant(recipe: str, rows: int, learns: bool) -> Case:
    options = {"recipe": recipe, "policy": {"head": "none"}, "batch_invariant": True}
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=learns)
    model = _Model() if learns else _Model().requires_grad_(False)
    return torch.compile(model, backend="te", fullgraph=True, dynamic=False, options=options), (x,)


def invariant_rowwise_train() -> Case:
    return _invariant("rowwise", 4096, True)


def invariant_rowwise_decode() -> Case:
    return _invariant("rowwise", 3, False)


def invariant_block_train() -> Case:
    return _invariant("block", 4096, True)


def invariant_block_decode() -> Case:
    return _invariant("block", 3, False)


def _softmax(learns: bool, queries: int, keys: int) -> Case:
    """Has no mask where it learns; else one of the keys, whose rows are no multiple of 16 bytes."""
    q, k, v = (
        torch.randn(256, heads, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=learns)
        for heads, length in ((16, queries), (8, keys), (8, keys))
    )
    mask = None if learns else torch.ones(1, 1, queries, keys, device="cuda", dtype=torch.bool)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=learns, enable_gqa=True)

    options = {"recipe": "rowwise", "batch_invariant": True}
    return torch.compile(attend, backend="te", fullgraph=True, dynamic=False, options=options), (q, k, v)


def invariant_softmax_train() -> Case:
    return _softmax(True, 19, 19)


def invariant_softmax_prefill() -> Case:
    return _softmax(False, 19, 19)


def invariant_softmax_decode() -> Case:
    return _softmax(False, 1, 19)


def invariant_block_of_one() -> Case:
    return _invariant("block", 1, False)


def invariant_attention_train() -> Case:
    q, k, v = (
        torch.randn(2, heads, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (16, 8, 8)
    )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    options = {"recipe": "none", "batch_invariant": True}
    return torch.compile(attention, backend="te", fullgraph=True, dynamic=False, options=options), (q, k, v)
