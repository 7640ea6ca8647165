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
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, wire
from benchmarks.ranks_job import Job, Progress
from benchmarks.ranks_works import WORKS, Spread, place

RATE = 0.3  # of AdamW, over the width: a step then changes what a layer computes as much at any width
RAMP = 10  # steps in which the rate grows from nothing


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
    kernels: list[dict[str, Any]] = []
    if job.profile:
        with progress.phase("profile"):
            kernels = harness.kernels(step, job.device, 2)
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
        "kernels": kernels[: job.profile],
        "kernels_ms": sum(kernel["total_us"] for kernel in kernels) / 1e3,
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
    """This rank's part of a batch: x, and what training wants of it, each token's features moved by one. Batch 0 is
    timed, with the latter as the gradient of the output."""
    generator = torch.Generator(where).manual_seed(1 + number * job.replicas + spread.replica)
    shape = (job.shape.batch, job.shape.seq, job.shape.dim)
    x = torch.randn(shape, generator=generator, device=where, dtype=torch.bfloat16)
    at, parts = spread.part
    mine = x.chunk(parts, 1)[at].contiguous()
    wanted = mine.roll(1, -1)
    return mine.requires_grad_(), wanted


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
    """Mean squared errors of `job.steps` steps, over all ranks: 2 where nothing has been learned, as what is wanted is
    independent of x feature by feature. Weights have not changed before. Each step has a batch of its own, so a loss is
    of data that were not trained on. A norm behind the last block, as models have one, keeps the error independent of
    how much 32 blocks have added up. The sum of errors, not their mean, is derived, so that gradients are about as large
    as in what was timed, and scales of the past fit."""
    rate = RATE / job.shape.dim
    optimizer = torch.optim.AdamW(spread.blocks.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for number in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (number + 1) / RAMP)
        x, wanted = data(job, spread, where, 1 + number)
        optimizer.zero_grad()
        spread.before()
        y = F.rms_norm(spread.model(x).float(), (job.shape.dim,))
        error = F.mse_loss(y, wanted.float(), reduction="sum")
        (error / 2).backward()
        spread.behind()
        optimizer.step()
        losses.append(error.detach() / y.numel())
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
