"""Cases of output layers with their losses on ranks whose batches have lengths of their own, for
test_output_loss_ranks.py."""

import copy
from collections.abc import Callable
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
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import te_inductor
from te_inductor.passes.pre_grad.loss import match
from te_inductor.runtime.eager import losses as eager
from tests import ranks
from tests.losses import error
from tests.ranks import how

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


class SharedHead(nn.Module):
    """An output layer of words that ranks share, and one of `LOSSES` behind it."""

    def __init__(self, words: int, loss: Callable[[Tensor, Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.norm, self.head, self.loss = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, words, bias), loss

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(x))
        return self.loss(logits, labels), logits


def _tokens(logits: Tensor) -> Tensor:
    return logits.float().flatten(0, -2)


def _weighed(losses: Any) -> Tensor:
    return (losses.to_local() * torch.linspace(0.5, 2, len(losses))).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda logits, labels: F.cross_entropy(_tokens(logits), labels.flatten()),
    "sum": lambda logits, labels: F.cross_entropy(_tokens(logits), labels.flatten(), reduction="sum"),
    "none": lambda logits, labels: _weighed(F.cross_entropy(_tokens(logits), labels.flatten(), reduction="none")),
    "a label that is a word": lambda logits, labels: F.cross_entropy(_tokens(logits), labels.flatten(), ignore_index=7),
    "capped": lambda logits, labels: F.cross_entropy(3 * torch.tanh(_tokens(logits * 0.5) / 3), labels.flatten()),
    "shifted": lambda logits, labels: F.cross_entropy(_tokens(logits[:, :-1]), labels[:, 1:].flatten()),
    "permuted": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "nll": lambda logits, labels: F.nll_loss(F.log_softmax(_tokens(logits), -1), labels.flatten()),
    "log sums": lambda logits, labels: (
        F.cross_entropy(_tokens(logits), labels.flatten()) + _tokens(logits).logsumexp(-1).square().mean()
    ),
}  # fmt: skip
# Losses, words, tokens of two sequences, whether tokens are sharded in front, which labels are ignored.
SHARED = (
    ("mean", 400, 320, False, slice(None, None, 3)),
    ("sum", 401, 64, True, slice(None, None, 3)),
    ("mean", 401, 1, False, slice(0, 0)),
    ("mean", 400, 32, False, slice(None)),
    ("none", 400, 32, False, slice(0, 3)),
    ("a label that is a word", 401, 32, False, slice(0, 0)),
    ("capped", 400, 32, True, slice(0, 3)),
    ("shifted", 401, 32, True, slice(0, 3)),
    ("permuted", 400, 32, False, slice(0, 3)),
    ("nll", 400, 32, False, slice(0, 3)),
    ("mean", 101, 32, False, slice(0, 3)),
)


QUICK = 4  # of these


def shared(rank: Rank, recipe: str, which: str = "") -> Any:
    """Losses of words that ranks share beside those of `loss_parallel` in float64 without a compiler: how far off they and
    their gradients are, how many chunks there were and gathers of their statistics, and what logits were."""
    found = []
    for program in SHARED if which == "all" else SHARED[:QUICK]:
        torch._dynamo.reset()
        found.append(_shared(rank, recipe, *program))
    return found


@how(traced=True)
def traced(rank: Rank, recipe: str) -> Any:
    """The same of the third step of one program, as AOTAutograd traces it."""
    return [_shared(rank, recipe, *SHARED[1], steps=3)]


def _shared(
    rank: Rank, recipe: str, name: str, words: int, length: int, scatters: bool, ignored: slice, steps: int = 1
) -> Any:
    torch.manual_seed(0)
    model, x = SharedHead(words, LOSSES[name], bias=scatters), torch.randn(2, length, WIDTH)
    labels = torch.randint(0, words, (2, length))
    labels[:, ignored] = -100
    exact = copy.deepcopy(model).double()
    plan = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    if scatters:
        plan = {
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        x = x.chunk(rank.world, 1)[rank.rank]
    options = {"recipe": recipe, "policy": {"head": recipe}, "logits": "omit", "fallback": "silent"}
    runs, results = [], []
    for one in (model, exact):
        parallelize_module(one, rank.mesh, plan)
        runs.append(torch.compile(one, backend="te", options=options) if one is model else one)
    chunks = mock.patch.object(eager.Softmax, "losses", autospec=True, side_effect=eager.Softmax.losses)
    gathers = mock.patch.object(eager, "gather", side_effect=eager.gather)
    small = mock.patch.object(eager, "CHUNK_BYTES", 2**14)
    with chunks as chunked, gathers as gathered, small:
        for one, run in zip((model, exact), runs, strict=True):
            for _ in range(steps):
                given = x.to(one.head.weight.dtype, copy=True).requires_grad_()
                one.zero_grad()
                with loss_parallel():
                    loss, logits = run(given, labels)
                    loss.backward()
            results.append([_whole(loss.detach()), given.grad, *(_whole(each.grad) for each in one.parameters())])
            results[-1].append(type(logits).__name__)
    (*found, left_out), (*wanted, _) = results
    same = [torch.equal(a.double().nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found, wanted, strict=True)]
    off = [0.0 if equal else error(a, b) for equal, a, b in zip(same, found, wanted, strict=True)]
    return {"off": off, "chunks": chunked.call_count, "gathers": gathered.call_count, "logits": left_out}


def unknown(rank: Rank, recipe: str) -> Any:
    """A label that is no word of any rank: the loss, and which of a row's gradients are finite."""
    torch.manual_seed(0)
    model = SharedHead(400, LOSSES["none"], bias=False)
    parallelize_module(model, rank.mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    options = {"recipe": recipe, "policy": {"head": recipe}, "logits": "omit", "fallback": "silent"}
    x, labels = torch.randn(2, 4, WIDTH).requires_grad_(), torch.randint(0, 400, (2, 4))
    labels[1, 2] = 400
    with loss_parallel():
        loss, _ = torch.compile(model, backend="te", options=options)(x, labels)
        loss.backward()
    return loss.isnan().item(), x.grad.isfinite().all(-1).flatten().tolist()


def left(rank: Rank, name: str) -> Any:
    """Why a loss of words that ranks share is left as it is written."""
    model = SharedHead(400, LOSSES[name.replace("-", " ")], bias=False)
    plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, rank.mesh, {"head": plan})
    options = {"recipe": "current", "logits": "omit", "fallback": "silent"}
    with loss_parallel():
        report = te_inductor.explain(model, torch.randn(2, 4, WIDTH), torch.randint(0, 3, (2, 4)), options=options)
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
