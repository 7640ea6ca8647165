"""Training on the GPUs of one host, by several ranks: time of a step, peak memory, bytes gathered.

    python -m benchmarks.ranks                                     # FSDP2 of four Llama-8B blocks, all GPUs that there are
    python -m benchmarks.ranks --work fsdp --arms bf16 te:delayed gather:delayed --tokens 8192 2048
    python -m benchmarks.ranks --tiny                              # two gloo ranks on the CPU: that it runs

A *work* says how a model is spread over ranks, and which arms it has: one record in `WORKS`. An arm is ``NAME`` or
``NAME:RECIPE``: bf16 is Inductor, te the backend, gather the same with `low_precision_all_gather`. Each arm has ranks of
its own, one process each. A step is a forward and a backward; weights and what is gathered of them are bf16 where
nothing else is said. Times are the slowest rank's median."""

import argparse
import json
import os
import socket
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks import harness, llama_blocks, table
from benchmarks.llama_blocks import Shape

LAYERS = 4
TINY = Shape(layers=2, batch=1, seq=64, dim=256, ffn=512, heads=4, kv_heads=2)


@dataclass(frozen=True)
class Job:
    """What the ranks of one arm do."""

    work: str
    arm: str
    shape: Shape
    device: str  # "cuda" or "cpu"
    world: int
    iters: int
    warmup: int

    @property
    def name(self) -> str:
        return self.arm.partition(":")[0]

    @property
    def recipe(self) -> str:
        return self.arm.partition(":")[2]


@dataclass(frozen=True)
class Spread:
    """A model that runs on this rank, and how many bytes it has received so far of what it counts."""

    model: nn.Module
    received: Callable[[], int] | None = None


@dataclass(frozen=True)
class Work:
    """`spread(blocks, job)` turns plain blocks into one rank's part of the model, as the arm wants them."""

    title: str
    arms: tuple[str, ...]
    spread: Callable[[nn.Module, Job], Spread]
    received: str = "bytes received"  # what is counted


def compiled(block: nn.Module, job: Job) -> None:
    """One block, in place: bf16 by Inductor, others by the backend with the arm's recipe."""
    if job.name == "bf16":
        block.compile(fullgraph=True)
    else:
        block.compile(backend=harness.te_backend(), fullgraph=True, options={"recipe": job.recipe})


def _fsdp(blocks: nn.Module, job: Job) -> Spread:
    """Each block is gathered for its forward and again for its backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(job.device, (job.world,))
    counted = counting()
    for block in blocks.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
        block.set_custom_all_gather(counted)  # type: ignore[operator]
    fully_shard(blocks, mesh=mesh)
    if job.name == "gather":
        from te_inductor.distributed import low_precision_all_gather

        low_precision_all_gather(blocks, job.recipe)
    for block in blocks.blocks:  # type: ignore[union-attr]
        compiled(block, job)
    return Spread(blocks, lambda: counted.bytes)


def counting() -> Any:
    """FSDP2's all-gather, which counts the bytes that come from other ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class Counting(DefaultAllGather):
        def __init__(self) -> None:
            self.bytes = 0

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes += (output_tensor.numel() - input_tensor.numel()) * input_tensor.element_size()
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    return Counting()


WORKS = {
    "fsdp": Work(
        "FSDP2, blocks compiled one by one",
        ("bf16", "te:current", "gather:current", "te:delayed", "gather:delayed"),
        _fsdp,
        "MB gathered",
    ),
}


def measure(rank: int, job: Job, port: int, folder: str) -> None:
    """One rank of an arm; leaves its figures in a file."""
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    backend = {"cuda": "nccl", "cpu": "gloo"}[job.device]
    dist.init_process_group(backend, rank=rank, world_size=job.world)
    place = f"cuda:{rank}" if job.device == "cuda" else "cpu"
    spread = WORKS[job.work].spread(llama_blocks.build(job.shape, torch.bfloat16, place), job)
    x, grad = llama_blocks.inputs(job.shape, torch.bfloat16, place, seed=1 + rank)
    parameters = list(spread.model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        x.grad = None
        spread.model(x).backward(grad)

    times = harness.times_ms(step, job.device, 1, job.warmup)
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = spread.received() if spread.received else 0
    dist.barrier()
    times = harness.times_ms(step, job.device, job.iters, 0)
    told = {
        "ms": statistics.median(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if job.device == "cuda" else None,
        "received": (spread.received() - before) / job.iters if spread.received else None,
        "environment": harness.environment(place),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def run(job: Job) -> dict[str, Any]:
    """The slowest rank's figures."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(measure, (job, port, folder), nprocs=job.world)  # type: ignore[no-untyped-call]
        told = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(job.world)]
    slowest = max(told, key=lambda one: one["ms"])
    peaks = [one["peak_gib"] for one in told if one["peak_gib"] is not None]
    return {**slowest, "peak_gib": max(peaks, default=None), **asdict(job), "tokens": job.shape.tokens}


def show(work: Work, environment: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        these = [row for row in rows if row["tokens"] == tokens]
        base = next((row["ms"] for row in these if row["arm"] == "bf16"), None)
        table.show(
            f"{work.title}: {these[0]['world']} ranks, {tokens} tokens a rank, {table.headline(environment)}",
            ["arm", "ms a step", "bf16 / this", "peak GiB", work.received],
            [
                [
                    row["arm"],
                    table.number(row["ms"]),
                    table.number(base and base / row["ms"]),
                    table.number(row["peak_gib"]),
                    table.number(row["received"], 1, 1e-6),
                ]
                for row in these
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="fsdp", choices=WORKS)
    parser.add_argument("--arms", nargs="+", help="NAME or NAME:RECIPE")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 2048], help="of a rank, in sequences of 2048")
    parser.add_argument("--ranks", type=int, help="all GPUs")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="small blocks on the CPU")
    parser.add_argument("--json", type=Path, default=Path("out/ranks.json"))
    args = parser.parse_args()
    work, device = WORKS[args.work], "cpu" if args.tiny else "cuda"
    world = args.ranks or (2 if args.tiny else torch.cuda.device_count())
    if world < 2:
        raise SystemExit(f"{world} GPUs, expected two or more; --tiny runs on the CPU")
    big = Shape(layers=LAYERS, seq=2048)
    shapes = [TINY] if args.tiny else [replace(big, batch=max(tokens // big.seq, 1)) for tokens in args.tokens]
    iters, warmup = (2, 2) if args.tiny else (args.iters, args.warmup)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for arm in args.arms or work.arms:
            rows.append(run(Job(args.work, arm, shape, device, world, iters, warmup)))
            environment = rows[-1].pop("environment")
            harness.write_json(args.json, {"environment": environment, "rows": rows})
    show(work, environment, rows)
    print(f"numbers: {args.json}")


if __name__ == "__main__":
    main()
