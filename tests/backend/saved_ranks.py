"""The case of option `saved` under FSDP2, for test_low_precision_saves.py."""

import functools
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard

from te_inductor import compat
from tests import ranks, uncompiled

WIDTH, HIDDEN, TOKENS = 128, 256, 256


class Rank(ranks.Rank):
    def patches(self) -> list[Any]:
        """Graphs of the operators that Inductor gets, which run node by node."""
        made = functools.partial(uncompiled.compile_fx, decompositions=select_decomp_table())
        return [mock.patch.object(compat, "compile_fx", made)]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def fsdp(rank: Rank) -> Any:
    """Three steps with the option and without: the bytes that the last one saves, and how far apart its gradients are,
    relative to their norm."""
    found = [_trained(rank, saved) for saved in ("high_precision", "low_precision")]
    (high, exact), (low, gradients) = found
    off = sum((a - b).square().sum() for a, b in zip(gradients, exact, strict=True))
    return {"high": high, "low": low, "off": float((off / sum(one.square().sum() for one in exact)).sqrt())}


def _trained(rank: Rank, saved: str) -> tuple[int, list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Mlp())
    fully_shard(model[0], mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    run = torch.compile(model, backend="te", options={"recipe": "delayed", "policy": {"*": "delayed"}, "saved": saved})
    held: dict[int, torch.UntypedStorage] = {}  # by identity: FSDP empties what it gathered, and addresses come again

    def pack(one: Tensor) -> Tensor:
        storage = one.untyped_storage()
        held[storage._cdata] = storage
        return one

    draw = torch.Generator().manual_seed(rank.rank)
    for _ in range(3):
        held.clear()
        model.zero_grad()
        with saved_tensors_hooks(pack, lambda one: one):
            loss = run(torch.randn(TOKENS, WIDTH, generator=draw)).square().mean()
        saved_bytes = sum(one.nbytes() for one in held.values())
        loss.backward()
    return saved_bytes, [one.grad.full_tensor().double() for one in model.parameters()]  # type: ignore[union-attr]
