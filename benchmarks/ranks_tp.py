"""Tensor and sequence parallelism over the GPUs of one host: time of a step, peak memory, bytes on the wire.

    torchrun --nproc_per_node 2 -m benchmarks.ranks_tp                       # four Llama-8B blocks, 8192 tokens
    torchrun --nproc_per_node 2 -m benchmarks.ranks_tp --arms bf16 delayed --async-tp
    torchrun --nproc_per_node 2 -m benchmarks.ranks_tp --tiny                # gloo on the CPU: that it runs

An arm is bf16 (Inductor) or a recipe (the backend). Each is compiled whole, has the same weights and runs alone; a step is
a forward and a backward; a time is the slowest rank's median. The bytes are those that a rank receives in collectives of a
step, counted in the graphs.

What to expect of the defaults with two ranks, by bytes: bf16 receives 33.6 MB eleven times a block, for four gathers
(x of attention and MLP, dy of o and down), two sums of y and five of dx. The backend receives 16.8 MB four times and
33.6 MB four times, as q, k and v are one GEMM, and gate and up: 0.55 of it."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks import llama_blocks
from benchmarks.llama_blocks import Shape

DEFAULT = Shape(layers=4, batch=1, seq=8192)
TINY = Shape(layers=2, batch=1, seq=64, dim=256, ffn=512, heads=4, kv_heads=2)
ARMS = ("bf16", "delayed", "current")


def plan() -> dict[str, ParallelStyle]:
    """Of one block whose input is a plain tensor, this rank's part of the sequence."""
    into, out = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    styles: dict[str, ParallelStyle] = {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    styles |= {f"attention.{name}": into for name in ("q", "k", "v")} | {"mlp.gate": into, "mlp.up": into}
    return styles | {"attention.o": out, "mlp.down": out}


def parallelized(blocks: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Plain blocks, dealt to the ranks of a mesh in place."""
    for block in blocks.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan())
    return blocks


def build(arm: str, shape: Shape, mesh: DeviceMesh, see: Callable[[fx.Graph], None] | None = None) -> Any:
    """The blocks of one arm, compiled whole; `see` is shown each of Inductor's graphs."""
    model = parallelized(llama_blocks.build(shape, torch.bfloat16, mesh.device_type), mesh)
    shown = {} if see is None else {"post_grad_custom_post_pass": see}
    if arm == "bf16":
        return torch.compile(model, options=shown or None)
    return torch.compile(model, backend="te", options={"recipe": arm, "policy": {"*": arm}, **shown})


class Received:
    """Bytes that one rank receives in a step. The last forward and the last backward that are compiled run in it."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.bytes = ranks, {False: 0, True: 0}  # by whether a graph is a backward

    def see(self, graph: fx.Graph) -> None:
        share = {
            "all_gather_into_tensor": (self.ranks - 1) / self.ranks,  # of the output
            "reduce_scatter_tensor": self.ranks - 1,
            "all_reduce": 2 * (self.ranks - 1) / self.ranks,
        }
        total, backward = 0.0, any("tangents" in str(node.target) for node in graph.find_nodes(op="placeholder"))
        for node in graph.nodes:
            if getattr(node.target, "namespace", "") == "_c10d_functional":
                made, name = node.meta["val"], node.target._opname
                total += share.get(name, 0) * made.numel() * made.itemsize if isinstance(made, Tensor) else 0
        self.bytes[backward] = int(total)


def measure(arm: str, shape: Shape, mesh: DeviceMesh, iters: int, warmup: int) -> dict[str, Any]:
    """One arm on this rank."""
    torch._dynamo.reset()
    device, ranks = mesh.device_type, mesh.size()
    received = Received(ranks)
    run = build(arm, shape, mesh, received.see)
    x, dy = (
        whole.chunk(ranks, 1)[mesh.get_local_rank()].contiguous()
        for whole in llama_blocks.inputs(shape, torch.bfloat16, device)
    )
    x = x.detach().requires_grad_()

    def step() -> None:
        x.grad = None
        for parameter in run.parameters():
            parameter.grad = None
        run(x).backward(dy)

    for _ in range(warmup):
        step()
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(iters):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {"arm": arm, "ms": slowest.item(), "peak_gib": peak, "received": sum(received.bytes.values())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--async-tp", action="store_true", help="Inductor's _micro_pipeline_tp, for all arms")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json")
    asked = parser.parse_args(arguments)
    device = "cpu" if asked.tiny else "cuda"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if asked.tiny else "nccl")
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("tp",))
    if asked.async_tp:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh.get_group().group_name)
        torch._inductor.config._micro_pipeline_tp = True
    shape, iters = (TINY, 2) if asked.tiny else (DEFAULT, asked.iters)
    found = [measure(arm, shape, mesh, iters, asked.warmup) for arm in asked.arms]
    if rank == 0:
        base = next((one["ms"] for one in found if one["arm"] == "bf16"), None)
        for one in found:
            over = "" if base is None else f"  {base / one['ms']:.2f}x"
            peak = "" if one["peak_gib"] is None else f"  peak {one['peak_gib']:.2f} GiB"
            print(f"{one['arm']:10} {one['ms']:8.2f} ms{over}{peak}  received {one['received'] / 1e6:.2f} MB a step")
        if asked.json:
            with open(asked.json, "w") as file:
                json.dump({"shape": shape.to_dict(), "ranks": world, "async_tp": asked.async_tp, "arms": found}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
