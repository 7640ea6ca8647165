"""Cases of a model that gathers its own weights in its graph, as torchtitan's SimpleFSDP does, for test_graph_fsdp.py.
Most train a model twice on data of their own, with weights gathered in high precision and in low, and tell whether losses
and parameters are equal bit for bit, and what each graph gathers."""

import os
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import te_inductor
from te_inductor.diagnostics import Refusal
from te_inductor.passes.pre_grad.decide import between_ranks
from te_inductor.recipes import DelayedScaling
from tests import ranks
from tests.simple_fsdp import simple_fsdp

RECIPES: dict[str, Any] = {"current": "current", "delayed": DelayedScaling(amax_history_len=4), "block": "block"}
WIDTH = 128 * int(os.environ.get("WORLD_SIZE", "2"))  # rows of one block a rank
MIXED = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float32}
aten, collectives = torch.ops.aten, torch.ops._c10d_functional


class Block(nn.Module):
    def __init__(self, n: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, n), nn.Linear(n, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Rank(ranks.Rank):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.gathers: list[dict[str, int]] = []  # of each graph: bytes that a rank gets of others, by dtype
        self.reductions: list[list[int]] = []  # elements of each reduction to a maximum

    def see(self, graph: fx.Graph) -> None:
        found: dict[str, int] = {}
        for node in graph.find_nodes(op="call_function", target=collectives.all_gather_into_tensor.default):
            made = node.meta["val"]
            dtype = str(made.dtype).removeprefix("torch.")
            found[dtype] = found.get(dtype, 0) + made.numel() * made.itemsize
        self.gathers.append(found)
        reductions = graph.find_nodes(op="call_function", target=collectives.all_reduce.default)
        self.reductions.append([node.meta["val"].numel() for node in reductions if node.args[1] == "max"])

    def train(
        self, model: nn.Module, recipe: Any, *, by_block: bool = False, dtype: torch.dtype, **options: Any
    ) -> tuple[list[float], list[Tensor]]:
        """Losses of four steps, and the parameters behind them."""
        torch._dynamo.reset()
        self.gathers, self.reductions = [], []
        how: Any = {"backend": "te", "fullgraph": True, "options": {"recipe": recipe, "fallback": "error", **options}}
        run = model if by_block else torch.compile(model, **how)
        for block in model.children() if by_block else ():
            block.compile(**how)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
        losses = []
        for step in range(4):
            torch.manual_seed(100 * step + self.rank)
            loss = run(torch.randn(32, WIDTH, dtype=dtype)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, [_whole(parameter) for parameter in model.parameters()]

    def equal(
        self, recipe: str, make: Any = None, *, mesh: Any = None, placements: Any = None, dtypes: Any = None, **how: Any
    ) -> Any:
        dtypes = MIXED if dtypes is None else dtypes
        found, gathers, reductions = [], [], []
        for low in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Block()) if make is None else make()
            simple_fsdp(model, mesh or self.mesh, placements or [Shard(0)], **dtypes)
            dtype = dtypes.get("forward_dtype", torch.float32)
            refused = mock.patch.object(between_ranks, "_why_not_gathered", lambda *_: Refusal("of the test"))
            with mock.patch.dict({}) if low else refused:
                found.append(self.train(model, RECIPES[recipe], dtype=dtype, **how))
            gathers.append([graph for graph in self.gathers if graph])
            reductions.append([graph for graph in self.reductions if graph])
        (losses, parameters), (others, own) = found
        same = losses == others and all(map(torch.equal, parameters, own))
        return {"same": same, "losses": [losses, others], "gathers": gathers, "reductions": reductions[1]}


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def mixed(rank: Rank, recipe: str) -> Any:
    return rank.equal(recipe)


def plain(rank: Rank, recipe: str) -> Any:
    """All in fp32."""
    return rank.equal(recipe, dtypes={})


def blocks(rank: Rank, recipe: str) -> Any:
    return rank.equal(recipe, lambda: nn.Sequential(Block(), Block()), by_block=True)


def checkpointed(rank: Rank, recipe: str) -> Any:
    return rank.equal(recipe, lambda: nn.Sequential(Checkpointed(), Checkpointed()))


def reshards(rank: Rank, recipe: str) -> Any:
    """The backward gathers weights again, as a pass of the user says; a graph of a forward keeps none."""
    with torch._inductor.config.patch(joint_custom_post_pass=_reshard):
        return rank.equal(recipe)


def frozen(rank: Rank, recipe: str) -> Any:
    def make() -> nn.Module:
        model = nn.Sequential(Block(), Block())
        model[0].up.weight.requires_grad_(False)
        return model

    return rank.equal(recipe, make)


def hsdp(rank: Rank, recipe: str) -> Any:
    mesh = init_device_mesh("cpu", (2, rank.world // 2), mesh_dim_names=("replicate", "shard"))
    return rank.equal(recipe, mesh=mesh, placements=[Replicate(), Shard(0)])


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu())


def twice(rank: Rank, recipe: str) -> Any:
    return rank.equal(recipe, Twice)


class Tied(nn.Module):
    """A weight that something else than a layer reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer.weight[0]


def reasons(rank: Rank) -> Any:
    """Why a weight is gathered in high precision."""
    uneven = nn.Linear(WIDTH, 160 * rank.world + 1)
    few = nn.Linear(WIDTH, 59 * rank.world)
    cases: dict[str, Any] = {
        "rowwise": (nn.Linear(WIDTH, WIDTH), "rowwise", [Shard(0)], {}),
        "mxfp8": (nn.Linear(WIDTH, WIDTH), "mxfp8", [Shard(0)], {}),
        "columns": (nn.Linear(WIDTH, WIDTH, bias=False), "current", [Shard(1)], {}),
        "uneven": (uneven, "current", [Shard(0)], {}),
        "few": (few, "current", [Shard(0)], {}),
        "blocks": (nn.Linear(WIDTH, 64 * rank.world), "block", [Shard(0)], {}),
        "small": (nn.Linear(120, 64), "current", [Shard(0)], {}),
        "tied": (Tied(), "current", [Shard(0)], {}),
        "own scales": (nn.Linear(WIDTH, WIDTH), DelayedScaling(reduce_amax=False), [Shard(0)], {}),
        "group": (nn.Linear(WIDTH, WIDTH), "delayed", [Shard(0)], {"amax_group": "none"}),
        "gathered": (nn.Linear(WIDTH, WIDTH), "current", [Shard(0)], {}),
    }
    told = {}
    for name, (model, recipe, placements, options) in cases.items():
        torch._dynamo.reset()
        simple_fsdp(model, rank.mesh, placements)
        report = te_inductor.explain(
            model, torch.randn(32, getattr(model, "in_features", WIDTH)), options={"recipe": recipe, **options}
        )
        told[name] = report.sites[0].wire
    return told


class OwnAndGathered(nn.Module):
    """A layer that each rank has for itself, in front of layers whose weights are gathered."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.own, self.block = nn.Linear(WIDTH, WIDTH), simple_fsdp(Block(), mesh, [Shard(0)])

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.own(x))


def masked(rank: Rank) -> Any:
    """All tokens of the last rank are left out of the loss in the first steps. How far the gradient of its own layer is
    from high precision in the others, and the reductions to a maximum of each graph."""
    torch.manual_seed(0)
    model, off = OwnAndGathered(rank.mesh), []
    run = torch.compile(model, backend="te", options={"recipe": RECIPES["delayed"], "fallback": "silent"})
    for step in range(5):
        x, grads = torch.randn(32, WIDTH), []
        for which in (run, model):
            model.zero_grad()
            which(x).backward(torch.full_like(x, 1e-7 * (step > 1 or rank.rank < rank.world - 1)))
            grads.append(model.own.weight.grad.double())
        off.append(((grads[0] - grads[1]).norm() / grads[1].norm().clamp(min=1e-30)).item())
    return {"off": off, "reductions": rank.reductions}


def not_finite(rank: Rank, recipe: str) -> Any:
    """A NaN in one rank's rows, an infinity in another's."""
    found = []
    for low in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = simple_fsdp(nn.Linear(WIDTH, WIDTH), rank.mesh, [Shard(0)])
        local = model._parameters["weight"].to_local().data
        local[0, 0] = torch.nan if rank.rank else torch.inf
        refused = mock.patch.object(between_ranks, "_why_not_gathered", lambda *_: Refusal("of the test"))
        torch.manual_seed(rank.rank)
        x = torch.randn(32, WIDTH, requires_grad=True)
        with mock.patch.dict({}) if low else refused:
            y = torch.compile(model, backend="te", options={"recipe": RECIPES[recipe]})(x)
            y.square().sum().backward()
        found.append((y.detach(), x.grad, _whole(model._parameters["weight"].grad)))
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(*found, strict=True))


def _reshard(graph: fx.Graph) -> None:
    """Marks a graph as torchtitan does: the backward gathers again what is gathered of the graph's inputs alone."""
    for wait in graph.find_nodes(op="call_function", target=collectives.wait_tensor.default):
        chain, node = [wait], wait
        while len(node.all_input_nodes) == 1 and node.op != "placeholder":
            node = node.all_input_nodes[0]
            chain.append(node)
        gathers = wait.args[0].target is collectives.all_gather_into_tensor.default
        if gathers and node.op == "placeholder":
            views = [user for user in wait.users if user.target is aten.slice.Tensor]
            for each in (*chain[:-1], *views):
                each.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                each.meta["ac_graph_id"] = 100000
