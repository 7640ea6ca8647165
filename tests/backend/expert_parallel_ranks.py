"""Cases of expert parallelism, for test_expert_parallel.py. Each rank has some tokens and some experts. Most tell how far
training is from that of one rank with all tokens and all experts, and what is exchanged."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as collectives

import te_inductor
from te_inductor import targets
from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.decide import size_rule
from te_inductor.recipes import DelayedScaling
from te_inductor.targets import sm90
from tests import ranks
from tests.ranks import of_the_first_rank

EXPERTS, EACH, HIDDEN, INNER, TOKENS = 4, 2, 64, 96, 48


class MoE(nn.Module):
    """Tokens of one rank; `world` ranks have an equal part of the experts each, as torchtitan's dispatcher deals
    them."""

    def __init__(self, world: int = 1, rank: int = 0, split: bool = False) -> None:
        super().__init__()
        self.world, self.split = world, split
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)

        def own(n: int, k: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(EXPERTS, n, k) / k**0.5).bfloat16().chunk(world)[rank].clone())

        if split:
            self.w1, self.w3 = own(INNER, HIDDEN), own(INNER, HIDDEN)
        else:
            self.up = own(2 * INNER, HIDDEN)
        self.down = own(HIDDEN, INNER)

    def experts(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.split:
            gate, up = (F.grouped_mm(x, w.transpose(1, 2), offs=ends) for w in (self.w1, self.w3))
        else:
            gate, up = F.grouped_mm(x, self.up.transpose(1, 2), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.gate(x).softmax(-1).topk(EACH, dim=-1)
        order = torch.argsort(ids.view(-1), stable=True)
        rows = self.picked(x, order // EACH)
        counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS - 1).long()
        rows = self.alone(rows, counts) if self.world == 1 else self.exchanged(rows, counts)
        rows = rows.float() * scores.view(-1)[order].reshape(-1, 1)
        return torch.zeros_like(x).index_add(0, order // EACH, rows)

    def alone(self, rows: Tensor, counts: Tensor) -> Tensor:
        rows = self.ordered(rows, torch.arange(len(rows), device=rows.device))
        return self.result(self.experts(rows, counts.cumsum(0).int()))

    def exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        group = dist.group.WORLD
        with torch.no_grad():
            come = collectives.wait_tensor(collectives.all_to_all_single(counts, None, None, group))
            sent = counts.view(self.world, -1).sum(1).tolist()
            received = come.view(self.world, -1).sum(1).tolist()
            for size in (*sent, *received):
                torch._check(size >= 0)
        rows = self.exchange(rows, received, sent)
        table = come.view(self.world, -1)
        lengths, starts = table.t().reshape(-1), (come.cumsum(0) - come).view(self.world, -1).t().reshape(-1)
        places = torch.arange(lengths.shape[0], device=rows.device)
        segment = places.repeat_interleave(lengths, output_size=rows.shape[0])
        within = torch.arange(segment.shape[0], device=rows.device) - (lengths.cumsum(0) - lengths)[segment]
        order = starts[segment] + within
        y = self.experts(self.ordered(rows, order), table.sum(0).cumsum(0).int())
        made = y.new_empty(rows.shape)
        made[order, :] = y
        return self.exchange(self.result(made), sent, received)

    def exchange(self, rows: Tensor, received: list[Any], sent: list[Any]) -> Tensor:
        return collectives.all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)

    def picked(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows].bfloat16()

    def ordered(self, rows: Tensor, order: Tensor) -> Tensor:
        return rows[order, :]

    def result(self, y: Tensor) -> Tensor:
        return y


class Cast(MoE):
    """What is sent is what is gathered."""

    def picked(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.bfloat16()[rows]


class Read(MoE):
    """Something else reads the rows as they come."""

    def ordered(self, rows: Tensor, order: Tensor) -> Tensor:
        self.seen = rows.float().mean()
        return rows[order, :]


class Scaled(MoE):
    """Neither exchange is beside a layer."""

    def ordered(self, rows: Tensor, order: Tensor) -> Tensor:
        return rows[order, :] * 2

    def result(self, y: Tensor) -> Tensor:
        return y * 0.5


class Waits(torch.autograd.Function):
    """Waits for the exchange as torch does before 2.12."""

    @staticmethod
    def forward(ctx: Any, made: Tensor) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(made)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Negated(Waits):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Waiting(MoE):
    wait: Any = Waits

    def exchange(self, rows: Tensor, received: list[Any], sent: list[Any]) -> Tensor:
        exchange = torch.ops._c10d_functional_autograd.all_to_all_single
        return self.wait.apply(exchange(rows, received, sent, dist.group.WORLD.group_name))  # type: ignore[union-attr, no-any-return]


class Negating(Waiting):
    wait = Negated


class Rank(ranks.Rank):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sent: list[list[str]] = []  # of each graph: dtypes of all-to-alls of rows

    def patches(self) -> list[Any]:
        return [torch._dynamo.config.patch(capture_scalar_outputs=True)]

    def see(self, graph: fx.Graph) -> None:
        found = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_to_all_single.default)
        self.sent.append([str(one.meta["val"].dtype)[6:] for one in found if one.meta["val"].dim() == 2])

    def compared(self, recipe: Any, *, make: Any = MoE, steps: int = 1, split: bool = False, skew: bool = False) -> Any:
        """Compares outputs and gradients: how far they are from one rank's, and both from high precision."""
        self.sent = []
        own = slice(self.rank * TOKENS // self.world, (self.rank + 1) * TOKENS // self.world)

        def trained(world: int, options: Any) -> list[Tensor]:
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = make(world, self.rank if world > 1 else 0, split)
            if skew:  # one rank's experts get nothing
                model.gate.weight.data[:2] += 4.0
            whole, dy = torch.randn(TOKENS, HIDDEN).abs(), torch.randn(TOKENS, HIDDEN)
            x = (whole[own] if world > 1 else whole).clone().requires_grad_()
            run: Any = model
            if options is not None:
                asked = {"recipe": recipe, "fallback": "silent", **options}
                run = torch.compile(model, backend="te", fullgraph=True, dynamic=False, options=asked)
            for _ in range(steps):
                model.zero_grad()
                x.grad = None
                y = run(x)
                y.backward(dy[own] if world > 1 else dy)
            if world > 1:
                dist.all_reduce(model.gate.weight.grad)
            experts = [each.grad for name, each in model.named_parameters() if name != "gate.weight"]
            return [tensor.double() for tensor in (y.detach(), x.grad, model.gate.weight.grad, *experts)]

        many = trained(self.world, {"amax_group": dist.group.WORLD})
        sent = self.sent.copy()
        of_one = of_the_first_rank(lambda: [trained(1, {"amax_group": "none"}), trained(1, None)])
        alone, right = (
            [y[own], dx[own], router, *(each.chunk(self.world)[self.rank] for each in experts)]
            for y, dx, router, *experts in of_one
        )
        off = [
            [_off(*pair) for pair in zip(*pairs, strict=True)]
            for pairs in ((many, alone), (many, right), (alone, right))
        ]
        return {"one rank": off[0], "error": off[1], "error of one rank": off[2], "sent": [one for one in sent if one]}


def _off(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item() if a.isfinite().all() else float("inf")


def trains(rank: Rank, recipe: str) -> Any:
    if recipe == "delayed":
        return rank.compared(DelayedScaling(amax_history_len=4), steps=3)
    return rank.compared(recipe)


def waits(rank: Rank, recipe: str) -> Any:
    return rank.compared(recipe, make=Waiting)


def split(rank: Rank, recipe: str) -> Any:
    """w1 and w3 are two layers of one input."""
    return rank.compared(recipe, split=True)


def spread(rank: Rank, recipe: str) -> Any:
    """Two layers of one input, whose rows are gathered where they are sent."""
    return rank.compared(recipe, make=Cast, split=True)


def skewed(rank: Rank, recipe: str) -> Any:
    return rank.compared(recipe, skew=True)


def read(rank: Rank, recipe: str) -> Any:
    return {one.__name__: rank.compared(recipe, make=one) for one in (Read, Scaled)}


def unequal(rank: Rank) -> Any:
    """One rank finds, by its own sizes, that experts pay, and the other does not."""
    refusal = None if rank.rank else Refusal("few rows")
    judged = mock.patch.object(size_rule, "_judged", lambda sites, *_: (refusal, None))
    rated = mock.patch.object(targets, "rates_of", lambda device: sm90.H200)
    torch._dynamo.reset()
    rank.sent = []
    with judged, rated:
        model = MoE(rank.world, rank.rank)
        run = torch.compile(model, backend="te", fullgraph=True, dynamic=False, options={"recipe": "current"})
        run(torch.randn(8 + 16 * rank.rank, HIDDEN, requires_grad=True)).sum().backward()
    return rank.sent


def reasons(rank: Rank) -> Any:
    told = {}
    for name, make, options in (
        ("exchanged", MoE, {"recipe": "current"}),
        ("rowwise", MoE, {"recipe": "rowwise"}),
        ("read", Read, {"recipe": "current"}),
        ("waits", Waiting, {"recipe": "current"}),
        ("negates", Negating, {"recipe": "current"}),
        ("no group", MoE, {"recipe": "delayed"}),
        ("own scales", MoE, {"recipe": DelayedScaling(reduce_amax=False)}),
    ):
        torch._dynamo.reset()
        x = torch.randn(24, HIDDEN, requires_grad=True)
        sites = te_inductor.explain(make(rank.world, rank.rank), x, options=options).sites
        told[name] = [site.wire for site in sites if site.pattern == "grouped_linear" and site.gemm == "fprop"]
    return told
