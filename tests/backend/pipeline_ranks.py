"""A case of pipelines whose weight gradients wait, for test_pipelines.py."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

import te_inductor
from tests.ranks import Rank

STEPS, WIDTH, ROWS = 3, 32, 16


class Stage(nn.Module):  # of its own: torch leaves the forward of `nn.Sequential` alone where it compiles in place
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def trains(rank: Rank, name: str, recipe: str) -> Any:
    """Losses of each step as this rank sees them (the last stage's rank sees them all), the number of GEMMs that ran when
    the schedule asked, and the largest difference of a parameter from one rank's that trains the same stages without a
    schedule."""
    own, world = rank.rank, rank.world
    count, microbatches = 2 * world, 2 * world
    mine = {"Interleaved1F1B": (own, own + world), "ZBVZeroBubble": (own, count - 1 - own)}[name]
    schedule_of = {"Interleaved1F1B": ScheduleInterleaved1F1B, "ZBVZeroBubble": ScheduleZBVZeroBubble}[name]

    def stages() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Stage() for _ in range(count)]

    def compiled(stage: nn.Module, **options: object) -> nn.Module:
        """Compiles in place: zero-bubble schedules refuse what `torch.compile` returns, as they would divide its
        backward."""
        stage.compile(backend="te", options={"recipe": recipe, "fallback": "error", **options})
        return stage

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        x, target = torch.randn(2, microbatches * ROWS, WIDTH, generator=generator)
        return x, target

    ran = 0

    def weight_gradients(stage: nn.Module) -> None:
        nonlocal ran
        ran += te_inductor.backward_dw(stage, backwards=1)

    models = stages()
    options = {"wgrad": "deferred", "amax_group": "none"}
    made = [
        PipelineStage(
            compiled(models[place], **options), place, count, torch.device("cpu"),
            dw_builder=lambda stage=models[place]: partial(weight_gradients, stage),
        )
        for place in mine
    ]  # fmt: skip
    schedule = schedule_of(made, microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for place in mine for p in models[place].parameters()], lr=0.5)
    told = []
    for step in range(STEPS):
        x, target = batch(step)
        losses: list[Tensor] = []
        first, last = 0 in mine, count - 1 in mine
        schedule.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))
        told.append([loss.item() for loss in losses])
        optimizer.step()
        optimizer.zero_grad()

    alone = stages()
    runs = [compiled(stage, amax_group="none") for stage in alone]
    optimizer = torch.optim.SGD([p for stage in alone for p in stage.parameters()], lr=0.5)
    expected = []
    for step in range(STEPS):
        x, target = batch(step)
        expected.append([])
        for part, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
            for run in runs:
                part = run(part)
            loss = nn.functional.mse_loss(part, wanted)
            loss.backward()
            expected[-1].append(loss.item())
        for stage in alone:
            for parameter in stage.parameters():
                parameter.grad /= microbatches
        optimizer.step()
        optimizer.zero_grad()
    pairs = [pair for place in mine for pair in zip(models[place].parameters(), alone[place].parameters(), strict=True)]
    apart = max((one - other).abs().max().item() for one, other in pairs)
    return {"losses": told, "alone": expected, "ran": ran, "apart": apart}


def observes(rank: Rank) -> Any:
    """The amaxes of a stage's inputs and gradients behind a first step, and those of one rank that runs the stages of the
    pipeline without a schedule. torch runs a stage on memory that nothing was written to, before the first step."""

    def compiled(place: int) -> nn.Module:
        torch.manual_seed(place)
        stage = Stage()
        stage.compile(backend="te", options={"recipe": "delayed", "amax_group": "none"})
        return stage

    def amaxes(stage: nn.Module) -> list[list[float]]:
        state = te_inductor.state_dict(stage)
        return [
            [round(amax, 6) for amax in state[f"{layer}.amax_history"].tolist() if amax]
            for layer in ("up.input", "down.input", "down.grad_output")
        ]

    own, first, last = compiled(rank.rank), rank.rank == 0, rank.rank == rank.world - 1
    schedule = Schedule1F1B(
        PipelineStage(own, rank.rank, rank.world, torch.device("cpu")), 4, loss_fn=nn.functional.mse_loss
    )
    x, target = torch.randn(2, 4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    schedule.step(*([x] if first else []), **({"target": target} if last else {}))
    alone = [compiled(place) for place in range(rank.world)]
    for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
        for stage in alone:
            part = stage(part)
        nn.functional.mse_loss(part, wanted).backward()
    return amaxes(own), amaxes(alone[rank.rank])


def replicated(rank: Rank) -> Any:
    """The state of the rank's stage, of two, behind two steps, and the largest microbatch of each replica: each stage is in
    DistributedDataParallel on two ranks, whose data are of other magnitude."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "replicas"))
    groups = {name: mesh[name].get_group() for name in ("stages", "replicas")}
    place, replica = (mesh[name].get_local_rank() for name in groups)
    torch.manual_seed(place)
    stage = Stage()
    stage.compile(backend="te", options={"recipe": "delayed", "fallback": "error"})
    # A run for shapes would have DDP end with an error of its own.
    given, made = (torch.empty(ROWS, WIDTH, requires_grad=needed) for needed in (place > 0, True))
    piece = PipelineStage(
        DistributedDataParallel(stage, process_group=groups["replicas"]), place, 2, torch.device("cpu"),
        input_args=given, output_args=made, group=groups["stages"],
    )  # fmt: skip
    schedule = Schedule1F1B(piece, 4, loss_fn=nn.functional.mse_loss)
    x, target = torch.randn(2, 4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)) * (1 + replica)
    for _ in range(2):
        schedule.step(*([x] if place == 0 else []), **({"target": target} if place == 1 else {}))
    return {key: value.tolist() for key, value in te_inductor.state_dict(stage).items()}, x.abs().max().item()
