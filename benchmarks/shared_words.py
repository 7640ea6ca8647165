"""The output layer and the cross entropy behind it, of words that ranks share (`loss_parallel`), forward and backward.

    torchrun --nproc-per-node 2 -m benchmarks.shared_words
    torchrun --nproc-per-node 2 -m benchmarks.shared_words --device cpu --shape 64x32x501 --arms bf16 te:none

A shape is tokens x width x vocabulary, of all ranks. An arm is `bf16`, torch.compile of the plain program, or
`te:RECIPE`; arms run in turn. The peak counts what a step of the first rank holds beside x, its weight and the
labels."""

import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from benchmarks import arms, harness, table
from benchmarks.output_layer import Head, inputs

ARMS = ("bf16", "te:current", "te:delayed", "te:rowwise")


def made(arm: str, weight: nn.Parameter, mesh: Any) -> tuple[Any, nn.Module]:
    """A compiled model, and the model."""
    model = Head(nn.Parameter(weight.detach()))
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    kind, _, recipe = arm.partition(":")
    return torch.compile(model) if kind == "bf16" else arms.ARMS["te"].make(model, recipe, None, {}), model


def figures(arm: str, x: Tensor, weight: nn.Parameter, labels: Tensor, mesh: Any, rounds: int) -> dict[str, Any]:
    run, model = made(arm, weight, mesh)
    [parameter] = model.parameters()

    def step() -> Tensor:
        x.grad = parameter.grad = None
        with loss_parallel():
            loss = run(x, labels)
            loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    for _ in range(3):  # the first two steps of `delayed` are not those that follow
        loss = step()
    x.grad = parameter.grad = None
    before = torch.cuda.memory_allocated() if x.is_cuda else 0
    most = harness.peak_bytes(x.device.type, step)
    peak = None if most is None else most - before
    dist.barrier()
    times = harness.times_ms(step, x.device.type, rounds, 2)
    return {"arm": arm, "ms": statistics.median(times), "peak": peak, "loss": loss.full_tensor().item()}


def main(given: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__, device="cuda", rounds=20)
    parser.add_argument("--shape", default="8192x4096x128256")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    args = parser.parse_args(given)
    rank = int(os.environ["LOCAL_RANK"])
    place = args.device if args.device == "cpu" else f"cuda:{rank}"
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group({"cuda": "nccl", "cpu": "gloo"}[args.device])
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    x, weight, labels = inputs(args.shape, place)
    rows = [figures(arm, x, weight, labels, mesh, args.rounds) for arm in args.arms]
    if rank == 0:
        title = f"{args.shape}, {dist.get_world_size()} ranks, {table.headline(harness.environment(place))}"
        cells = [
            (row["arm"], table.number(row["ms"]), table.number(row["peak"], 2, 2**-30), table.number(row["loss"], 4))
            for row in rows
        ]
        table.show(title, ("arm", "ms", "peak GiB", "loss"), cells)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
