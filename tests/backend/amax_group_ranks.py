"""Cases of four ranks in groups of two, for test_amax_groups.py. The mesh is ((0, 1), (2, 3)), its dimensions "pp" and
"dp". Rank r sees data of magnitude 1 + r. Cases tell the newest amax of each layer's input, if not said otherwise."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import te_inductor
from te_inductor.distributed import agreement
from te_inductor.distributed.amax_groups import AmaxGroup
from te_inductor.recipes import DelayedScaling
from tests import ranks


class Layers(nn.Module):  # under DDP Dynamo compiles the frames of user code alone
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(number))
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Rank(ranks.Rank):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("pp", "dp"))
        self.dp, self.pp = self.mesh["dp"], self.mesh["pp"]

    def te(self, model: nn.Module, **options: Any) -> Any:
        return torch.compile(model, backend="te", options={"recipe": DelayedScaling(amax_history_len=4), **options})

    def steps(self, run: Any, number: int = 2) -> None:
        for _ in range(number):
            run(torch.full((16, 32), 1.0 + self.rank)).sum().backward()

    def trained(self, model: nn.Module, **options: Any) -> list[float]:
        self.steps(self.te(model, **options))
        return amaxes(model)


def amaxes(model: nn.Module, slot: str = "input") -> list[float]:
    state = te_inductor.state_dict(model)
    return [round(value[-1].item(), 3) for key, value in state.items() if key.endswith(f"{slot}.amax_history")]


def mesh(rank: Rank) -> Any:
    return rank.trained(Layers(1), amax_group=rank.dp)


def group(rank: Rank) -> Any:
    return rank.trained(Layers(1), amax_group=rank.pp.get_group())


def name(rank: Rank) -> Any:
    return rank.trained(Layers(1), amax_group=rank.dp.get_group().group_name)


def environment(rank: Rank) -> Any:
    with mock.patch.dict("os.environ", TE_INDUCTOR_AMAX_GROUP=rank.pp.get_group().group_name):
        return rank.trained(Layers(1))


def whole_mesh(rank: Rank) -> Any:
    return rank.trained(Layers(1), amax_group=rank.mesh)


def none(rank: Rank) -> Any:
    return rank.trained(Layers(1), amax_group="none")


def fsdp(rank: Rank) -> Any:
    """Compiled around FSDP2."""
    model = nn.Sequential(Layers(1), Layers(1))
    for block in model:
        fully_shard(block, mesh=rank.dp)
    return rank.trained(fully_shard(model, mesh=rank.dp), fallback="error")


def fsdp_of_blocks(rank: Rank) -> Any:
    model = nn.Sequential(Layers(1), Layers(1))
    for block in model:
        block.compile(backend="te", options={"recipe": DelayedScaling(amax_history_len=4), "fallback": "error"})
        fully_shard(block, mesh=rank.dp)
    rank.steps(fully_shard(model, mesh=rank.dp))
    return amaxes(model)


def hsdp(rank: Rank) -> Any:
    """One dimension of the mesh replicates, the other one shards: all of its ranks share the parameter."""
    return rank.trained(fully_shard(Layers(1), mesh=rank.mesh), fallback="error")


class OfDTensor(nn.Module):
    """Its weight is a DTensor, of which it takes the local part."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.eye(32), mesh, [Replicate()]))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to_local())


def dtensor(rank: Rank) -> Any:
    return rank.trained(OfDTensor(rank.dp), fallback="error")


def ddp(rank: Rank) -> Any:
    model = Layers(1)
    rank.steps(rank.te(DistributedDataParallel(model, process_group=rank.dp.get_group()), fallback="error"))
    return amaxes(model)


def ddp_ignores(rank: Rank) -> Any:
    """What DDP does not keep equal has no group there."""
    model = Layers(2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.1.weight"])
    with torch._dynamo.config.patch(optimize_ddp=False):
        rank.steps(rank.te(DistributedDataParallel(model, process_group=rank.dp.get_group())))
    return amaxes(model)


def two_groups_of_one_graph(rank: Rank) -> Any:
    """Its layers are sharded over different meshes, whose groups overlap."""
    model = Layers(2)
    for layer, mesh in zip(model.layers, (rank.pp, rank.dp), strict=True):
        fully_shard(layer, mesh=mesh)
    for layer in model.layers:
        layer.unshard()  # no hooks inside of the graph
    model.forward = rank.te(_function_of(model), fallback="error")
    rank.steps(model)
    return amaxes(model)


def _function_of(model: Layers) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = nn.functional.linear(x, layer.weight)
        return x

    return function


def wrapped_later(rank: Rank) -> Any:
    """Puts a model in DDP after a first call, then in another one of other ranks: the graph is compiled anew each
    time."""
    model, graphs = Layers(1), []
    model.compile(backend="te", options={"recipe": DelayedScaling(amax_history_len=4)})
    for wrapper in (
        lambda one: one,
        lambda one: DistributedDataParallel(one, process_group=rank.dp.get_group()),
        lambda one: DistributedDataParallel(one, process_group=rank.pp.get_group()),
    ):
        rank.steps(wrapper(model), 1)
        graphs.append(amaxes(model)[0])
    return graphs, counters["stats"]["unique_graphs"]


def sharded_later(rank: Rank) -> Any:
    """Models of one class share their code: plain ones, and some that are sharded over other ranks."""
    found: list[float] = []
    for mesh in (None, rank.dp, rank.pp, None):
        whole = nn.Sequential(Layers(1))
        whole[0].compile(backend="te", options={"recipe": DelayedScaling(amax_history_len=4), "fallback": "error"})
        if mesh is not None:
            fully_shard(whole, mesh=mesh)
        rank.steps(whole, 1)
        found += amaxes(whole)
    return found, counters["stats"]["unique_graphs"]


def stages(rank: Rank) -> Any:
    """A pipeline side by side with another one. Stages have other numbers of layers, and each is in DDP."""
    stage = rank.rank // 2
    model = Layers(2 + stage)
    run = rank.te(DistributedDataParallel(model, process_group=rank.dp.get_group()), fallback="error")
    for _ in range(2):
        x = torch.full((16, 32), 1.0 + rank.rank, requires_grad=True)
        if stage:
            received = torch.empty(16, 32)
            dist.recv(received, rank.rank - 2)
            x = received.requires_grad_()
        y = run(x)
        if stage:
            y.sum().backward()
            dist.send(x.grad, rank.rank - 2)
        else:
            dist.send(y.detach(), rank.rank + 2)
            gradient = torch.empty(16, 32)
            dist.recv(gradient, rank.rank + 2)
            y.backward(gradient)
    return amaxes(model) + amaxes(model, "grad_output"), counters["stats"]["unique_graphs"]


def unequal(rank: Rank) -> Any:
    """Ranks 0 and 1 have other numbers of quantizers; 2 and 3 are equal."""
    return rank.trained(Layers(1 if rank.rank else 2), amax_group=rank.dp)


def ring(rank: Rank) -> Any:
    """Each rank waits for the next one, which waits for the one behind it."""
    groups = [dist.new_group([place, (place + 1) % 4]) for place in range(4)]
    ranks = tuple(sorted((rank.rank, (rank.rank + 1) % 4)))
    one = agreement.agreement_of(AmaxGroup(ranks, (groups[rank.rank].group_name,)), "quantizers")
    agreement.settle([one], "warn")
    return agreement.reached(one.name)


def destroyed(rank: Rank) -> Any:
    """A group that a graph reduces over is gone."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[rank.rank // 2]
    run = rank.te(Layers(1), amax_group=own)
    rank.steps(run, 1)
    dist.destroy_process_group(own)
    try:
        rank.steps(run, 1)
    except te_inductor.errors.StateError as error:
        return str(error)


def refused(rank: Rank) -> Any:
    """What is no group of this rank."""
    texts = []
    for found in (dist.new_group([2, 3]), init_device_mesh("cpu", (2,)), "nobody", 7):
        try:
            rank.te(Layers(1), amax_group=found)(torch.ones(16, 32))
            texts.append("")
        except torch._dynamo.exc.BackendCompilerFailed as error:
            texts.append(str(error.inner_exception))
    return texts
