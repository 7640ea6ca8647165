"""AdamW's step over the parameters of Llama layers, alone: one kernel a group of tensors, torch's own fused kernel, and
Inductor's.

    python -m benchmarks.optimizer_step                       # four layers of Llama-3-8B and its vocabulary, all arms
    python -m benchmarks.optimizer_step --words 0 --dtype float32 --arms fused compiled
    python -m benchmarks.optimizer_step --layers 1 --dim 64 --ffn 128 --words 500 --device cpu

An arm is `foreach`, torch's default on GPUs; `fused`; `compiled`, torch.compile of the foreach step, whose learning rate
is a tensor, as a number that a scheduler changes would compile anew. A step reads the parameter, its gradient and both
moments, and writes all but the gradient: 14 bytes a parameter in bf16, 28 in fp32. The share is of what a copy on the
same device moves, measured beside the arms."""

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, table
from benchmarks.llama_blocks import Block, Shape

ARMS = ("foreach", "fused", "compiled")
MOVED = 7  # values of a parameter's dtype that a step reads or writes for each
COPIED = 2**30  # bytes of the tensor whose copy is timed


def parameters(shape: Shape, words: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """The parameters of all layers, an embedding and an output layer, with a gradient each."""
    torch.manual_seed(0)
    with torch.device(device):
        found = [one.data.to(dtype) for _ in range(shape.layers) for one in Block(shape).parameters()]
        found += [torch.randn(words, shape.dim, dtype=dtype) for _ in range(2) if words]
    for one in found:
        one.requires_grad_().grad = torch.randn_like(one) * 1e-3
    return found


def stepped(arm: str, given: list[Tensor], device: str) -> Callable[[], Any]:
    """A step of an arm's optimizer."""
    rate: Any = torch.tensor(1e-4, device=device) if arm == "compiled" else 1e-4
    kind = {"fused": True} if arm == "fused" else {"foreach": True}
    optimizer = torch.optim.AdamW(given, lr=rate, weight_decay=0.1, capturable=arm == "compiled", **kind)
    return torch.compile(optimizer.step) if arm == "compiled" else optimizer.step


def copy_rate(device: str, size: int) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * size / statistics.median(harness.times_ms(lambda: target.copy_(source), device, 10, 3))


def measure(arm: str, args: argparse.Namespace, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    given = parameters(shape, args.words, dtype, args.device)
    gc.collect()
    size = sum(one.numel() * one.element_size() for one in given)
    step = stepped(arm, given, args.device)
    step()  # makes the moments
    before = torch.cuda.memory_allocated() if args.device.startswith("cuda") else 0
    peak = harness.peak_bytes(args.device, step)
    times = harness.times_ms(step, args.device, args.iters, 3)
    beside = None if peak is None else peak - before
    moved = MOVED * size
    return {"arm": arm, "step_ms": times, "ms": statistics.median(times), "bytes": moved, "beside_bytes": beside}


def main() -> None:
    parser = harness.arguments(__doc__, "optimizer_step", layers=4, dim=Shape.dim, ffn=Shape.ffn, iters=10)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--words", type=int, default=128256, help="of the vocabulary")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    shape, dtype = Shape(layers=args.layers, dim=args.dim, ffn=args.ffn), getattr(torch, args.dtype)
    rate = copy_rate(args.device, COPIED if args.device.startswith("cuda") else 2**24)
    rows = []
    for arm in args.arms:
        torch._dynamo.reset()
        rows.append(measure(arm, args, shape, dtype))
        gc.collect()
    environment = harness.environment(args.device)
    harness.write_json(args.json, {"environment": environment, "copy_bytes_per_s": rate, "rows": rows})
    cells = [
        (
            row["arm"], table.number(row["ms"]), table.number(row["bytes"], 2, 1e-9),
            table.number(row["bytes"] / row["ms"], 0, 1e-6), table.number(1e3 * row["bytes"] / row["ms"] / rate),
            table.number(row["beside_bytes"], 2, 2.0**-30),
        )
        for row in rows
    ]  # fmt: skip
    columns = ("arm", "ms", "GB moved", "GB/s", "of a copy", "peak GiB beside")
    title = f"AdamW, {args.layers} layers of {args.dim}, {args.words} words, {args.dtype}"
    table.show(f"{title}; a copy moves {rate / 1e9:.0f} GB/s; {table.headline(environment)}", columns, cells)


if __name__ == "__main__":
    main()
