"""Cases of output layers with their losses on ranks whose batches have lengths of their own, for
test_output_loss_ranks.py."""

import copy
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import te_inductor
from te_inductor.passes.pre_grad.loss import match
from te_inductor.runtime.eager import losses as eager
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
            parallelize_module(one, rank.mesh, _plan(kind))
        wrapped.append(one)
    options = {"recipe": recipe, "policy": {"body": "none"}, "logits": "omit", "fallback": "silent"}
    sharded = kind in ("tp", "sp")
    run = torch.compile(wrapped[0], backend="te", options=options, dynamic=False if sharded else None)
    off, left_out = 0.0, set()
    for step in range(4):
        draw = torch.Generator().manual_seed(step if sharded else 2 * step + rank.rank)
        ids = torch.randint(0, WORDS, (2, 16 if sharded else 16 + 8 * rank.rank), generator=draw)
        found = []
        for one, call in ((model, run), (exact, wrapped[1])):
            one.zero_grad()
            loss, logits = call(ids)
            loss.backward()
            left_out |= {type(logits).__name__}
            found.append([loss.detach(), *(_whole(each.grad) for each in one.parameters())])
        off = max(off, *(error(a, b) for a, b in zip(*found, strict=True)))
    return {"off": off, "logits": sorted(left_out)}


def _plan(kind: str) -> dict[str, Any]:
    """How layers are shared: the output layer's words, and for "sp" the tokens in front of it too."""
    if kind == "tp":
        return {"head": ColwiseParallel(output_layouts=Replicate())}
    return {
        "body": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def reasons(rank: Rank, kind: str) -> Any:
    """What a report says of the loss."""
    torch.manual_seed(0)
    model = parallelize_module(Model(tied=False), rank.mesh, _plan(kind))
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(0))
    report = te_inductor.explain(model, ids, options={"recipe": "current", "logits": "omit", "fallback": "silent"})
    return [site.reason for site in report.losses]


def outside(rank: Rank, recipe: str) -> Any:
    """A loss of sharded words behind a compiled model that returns them: how far off it and the gradients are."""
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False))
        parallelize_module(model, rank.mesh, {"1": ColwiseParallel(use_local_output=False)})
        options = {"recipe": recipe, "fallback": "silent"}
        run = torch.compile(model, backend="te", options=options) if compiles else model
        x, labels = torch.randn(32, WIDTH), torch.randint(0, WORDS, (32,))
        with loss_parallel():
            loss = F.cross_entropy(run(x), labels)
            loss.backward()
        found.append([_whole(loss.detach()), *(_whole(each.grad) for each in model.parameters())])
    return max(error(a, b) for a, b in zip(*found, strict=True))


def gathers(rank: Rank, recipe: str) -> Any:
    """How often parameters are gathered in a step, compiled and not, while the loss takes several chunks."""
    counts = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = Model(tied=False)
        fully_shard(model.body, mesh=rank.mesh)
        fully_shard(model, mesh=rank.mesh)
        options = {"recipe": recipe, "policy": {"body": "none"}, "logits": "omit", "fallback": "silent"}
        run = torch.compile(model, backend="te", options=options) if compiles else model
        ids = torch.randint(0, WORDS, (4, 128))
        sums = mock.patch.object(eager.Softmax, "losses", autospec=True, side_effect=eager.Softmax.losses)
        unshards = mock.patch.object(groups, "foreach_all_gather", side_effect=groups.foreach_all_gather)
        with unshards as gathered, sums as chunks:
            run(ids)[0].backward()
        counts.append((gathered.call_count, chunks.call_count))
    return counts


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
