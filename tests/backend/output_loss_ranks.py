"""Cases of output layers with their losses on ranks whose batches have lengths of their own, for
test_output_loss_ranks.py."""

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from te_inductor.passes.pre_grad.loss import match
from tests import ranks
from tests.losses import error

WIDTH, WORDS = 64, 128


class Rank(ranks.Rank):
    def patches(self) -> list[Any]:
        return [_in_chunks()]


@contextmanager
def _in_chunks() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(match, "LEAST_WORDS", 0)
    patch.setattr(match, "_gains", lambda site: site.low)
    yield
    patch.undo()


class Model(nn.Module):
    """An embedding, a layer, and an output layer with its loss, whose logits the program gets."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.body(self.tokens(ids))))
        labels = F.pad(ids, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.view(-1, WORDS).float(), labels.reshape(-1)), logits


def program(rank: Rank, kind: str, recipe: str) -> Any:
    """Steps beside those in high precision without a compiler: how far off loss and gradients are, and what
    logits were."""
    torch.manual_seed(0)
    model = Model(tied=kind == "tied")
    exact = copy.deepcopy(model)
    wrapped = []
    for one in (model, exact):
        if kind in ("ddp", "tied"):
            one = DistributedDataParallel(one)
        elif kind == "fsdp":
            fully_shard(one.body, mesh=rank.mesh)
            fully_shard(one, mesh=rank.mesh)
        else:
            parallelize_module(one, rank.mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
        wrapped.append(one)
    options = {"recipe": recipe, "policy": {"body": "none"}, "logits": "omit", "fallback": "silent"}
    run = torch.compile(wrapped[0], backend="te", options=options, dynamic=False if kind == "tp" else None)
    off, left_out = 0.0, set()
    for step in range(4):
        draw = torch.Generator().manual_seed(step if kind == "tp" else 2 * step + rank.rank)
        ids = torch.randint(0, WORDS, (2, 16 if kind == "tp" else 16 + 8 * rank.rank), generator=draw)
        found = []
        for one, call in ((model, run), (exact, wrapped[1])):
            one.zero_grad()
            loss, logits = call(ids)
            loss.backward()
            left_out |= {type(logits).__name__}
            found.append([loss.detach(), *(_whole(each.grad) for each in one.parameters())])
        off = max(off, *(error(a, b) for a, b in zip(*found, strict=True)))
    return {"off": off, "logits": sorted(left_out)}


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
