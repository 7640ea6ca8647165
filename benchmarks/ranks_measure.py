"""One rank of `benchmarks.ranks`: times of a step, bytes on the wire, losses of training, and whether ranks' scaling state
is one."""

import json
import statistics
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness, wire
from benchmarks.ranks_job import Job, Progress
from benchmarks.ranks_works import WORKS, Spread, place

BATCHES = 4  # that training goes through, again and again
RATE = 3e-4  # of AdamW


def measure(rank: int, job: Job, store: str, folder: str) -> None:
    """Leaves the rank's figures in a file. `store` is where ranks find each other, as `init_process_group` has it."""
    progress = Progress(job, rank)
    progress.say("has imported torch")
    with progress.phase("process group"):
        device = None
        if job.device == "cuda":
            torch.cuda.set_device(rank)
            device = torch.device("cuda", rank)  # communicators are made here, and not in the midst of a step
        backend = {"cuda": "nccl", "cpu": "gloo"}[job.device]
        limit = timedelta(seconds=max(5 * job.patience, 60))
        dist.init_process_group(
            backend, init_method=store, rank=rank, world_size=job.world, timeout=limit, device_id=device
        )
        dist.barrier()
    told = figures(rank, job, progress)
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    with progress.phase("end"):
        dist.barrier()
        dist.destroy_process_group()


def figures(rank: int, job: Job, progress: Progress) -> dict[str, Any]:
    """What a rank of a process group tells of one arm."""
    where = place(job, rank)
    with progress.phase("model"):
        spread = WORKS[job.work].spread(job, rank)
        x, grad = data(job, spread, where, 0)
    for name, group in spread.groups.items():
        with progress.phase(f"first collective of group {name!r}"):
            dist.all_reduce(torch.ones(1, device=where), group=group)
            harness.synchronize(job.device)
    step = stepper(spread, x, grad)
    _compile(job, spread, progress, x, grad, step)
    with progress.phase("warm up"):
        harness.times_ms(step, job.device, 1, job.warmup)
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with progress.phase("measurement"):
        dist.barrier()
        times = harness.times_ms(step, job.device, job.iters, 0)
    peak = torch.cuda.max_memory_allocated() / 2**30 if job.device == "cuda" else None
    with progress.phase("count of bytes"):
        counted = None if job.async_tp else wire.received(step, job.world)  # torch's fused ops send by themselves
    losses = []
    if job.steps:
        with progress.phase(f"{job.steps} steps of training"):
            losses = train(job, spread, where)
    with progress.phase("scaling state"):
        state = state_of(spread)
    return {
        "ms": statistics.median(times),
        "peak_gib": peak,
        "received": None if counted is None else sum(counted.values()),
        "wire": counted,
        "losses": losses,
        **state,
        "seconds": progress.seconds,
        "environment": harness.environment(where),
    }


def _compile(job: Job, spread: Spread, progress: Progress, x: Tensor, grad: Tensor, step: Callable[[], None]) -> None:
    """The first steps, in which all graphs are compiled."""
    with progress.phase("first forward: traced, its graphs compiled"):
        spread.before()
        y = spread.model(x)
        harness.synchronize(job.device)
    with progress.phase("first backward: its graphs compiled"):
        y.backward(grad)
        spread.behind()
        harness.synchronize(job.device)
    del y
    with progress.phase("second step: under delayed scaling another backward compiled"):
        step()
        harness.synchronize(job.device)
    spent = torch._dynamo.utils.compilation_time_metrics
    names = ("_compile.compile_inner", "create_aot_dispatcher_function", "compile_fx_inner")
    progress.say("of it, " + ", ".join(f"{name}: {sum(spent[name]):.1f} s" for name in names if spent.get(name)))


def data(job: Job, spread: Spread, where: str, number: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch: x, and the same sequence one position later, or of batch 0 any gradient."""
    generator = torch.Generator(where).manual_seed(1 + number * job.replicas + spread.replica)
    shape = (job.shape.batch, job.shape.seq, job.shape.dim)
    x = torch.randn(shape, generator=generator, device=where, dtype=torch.bfloat16)
    at, parts = spread.part
    mine, later = (one.chunk(parts, 1)[at].contiguous() for one in (x, x.roll(1, 1)))
    return mine.requires_grad_(), later


def stepper(spread: Spread, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """A forward and a backward."""
    parameters = list(spread.blocks.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        x.grad = None
        spread.before()
        spread.model(x).backward(grad)
        spread.behind()

    return step


def train(job: Job, spread: Spread, where: str) -> list[float]:
    """Mean squared errors of `job.steps` steps, over all ranks. Weights have not changed before. The gradient of an
    output is its error, as large as what was measured with, so that scales of the past fit."""
    parameters = list(spread.blocks.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    batches = [data(job, spread, where, 1 + number) for number in range(BATCHES)]
    losses = []
    for number in range(job.steps):
        x, wanted = batches[number % BATCHES]
        optimizer.zero_grad()
        spread.before()
        y = spread.model(x)
        error = y.detach() - wanted
        y.backward(error)
        spread.behind()
        optimizer.step()
        losses.append(error.float().square().mean())
    found = torch.stack(losses)
    dist.all_reduce(found)
    return [float(loss) for loss in found / job.world]


def state_of(spread: Spread) -> dict[str, Any]:
    """How many tensors of scaling state there are, and on how many ranks each is that of the first, bit for bit."""
    from te_inductor import state_dict

    mine = {name: value.cpu() for name, value in state_dict(spread.blocks).items() if isinstance(value, Tensor)}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    names = every[0].keys()
    same = all(one.keys() == names and all(torch.equal(one[name], every[0][name]) for name in names) for one in every)
    return {"states": len(mine), "states_equal": same}
