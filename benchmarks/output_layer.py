"""The output layer and the cross entropy behind it, alone, forward and backward: bf16, other libraries, and this backend.

    python -m benchmarks.output_layer                                     # three shapes, all arms
    python -m benchmarks.output_layer --shapes 8192x4096x128256 --arms bf16 liger quack:1024 te:delayed --kernels 6
    python -m benchmarks.output_layer --device cpu --shapes 64x32x500 --arms bf16 torch te:none

A shape is tokens x width x vocabulary. An arm is `bf16`, torch.compile of the plain program; `chunker`, the same with
Inductor's auto chunker; `liger` or `liger:float32`, LigerFusedLinearCrossEntropyLoss with a weight gradient that is
summed in that type; `quack` or `quack:TOKENS`, its chunks; `torch`, F.linear_cross_entropy in chunks; `te:RECIPE`. Arms
share x and the weight, which are bf16, and run in turn. The peak counts what a step holds beside these and the labels,
the two gradients included. Errors are those of the loss and of both gradients against float64, which is computed from
the same bf16 values in chunks: the loss's relative, the gradients' as the ratio of signal to error in dB."""

import argparse
import gc
import json
import math
import statistics
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import arms, harness, step_report, table
from benchmarks.fleet import take_workspaces

SHAPES = ("8192x4096x128256", "16384x2048x128256", "4096x1024x151936")  # Llama-3-8B, Llama-3.2-1B, Qwen3-0.6B
ARMS = (
    "bf16", "chunker", "liger", "liger:float32", "quack:1024", "quack:4096", "torch",
    "te:none", "te:current", "te:delayed", "te:rowwise", "te:block",
)  # fmt: skip
ROWS = 1024  # of float64 logits at once
Loss = Callable[[Tensor, Tensor], Tensor]  # of x and labels
Step = Callable[[], tuple[Tensor, ...]]  # the loss and the gradients of x and the weight


class Exact(NamedTuple):
    """The float64 results, gradients rounded to fp32."""

    loss: float
    dx: Tensor
    dw: Tensor


class Head(nn.Module):
    """The output layer and the loss, as models write them."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.head = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        self.head.weight = weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # (M, K), (M,) int64 -> () fp32
        return F.cross_entropy(self.head(x).float(), labels)


def bf16(weight: nn.Parameter, detail: str, options: dict[str, Any]) -> Loss:
    return torch.compile(Head(weight))


def chunker(weight: nn.Parameter, detail: str, options: dict[str, Any]) -> Loss:
    """Its own threshold of 8 times the operands' size lets it chunk none of `SHAPES`."""
    if not hasattr(torch._inductor.config, "auto_chunker"):
        raise ImportError("this torch's Inductor has no auto_chunker")
    given = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 0}
    return torch.compile(Head(weight), options=given)


def liger(weight: nn.Parameter, detail: str, options: dict[str, Any]) -> Loss:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=getattr(torch, detail) if detail else None)
    return lambda x, labels: loss(weight, x, labels)


def quack(weight: nn.Parameter, detail: str, options: dict[str, Any]) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as loss

    return lambda x, labels: loss(x, weight, labels, chunk_size=int(detail or 4096))


def in_torch(weight: nn.Parameter, detail: str, options: dict[str, Any]) -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("this torch has no F.linear_cross_entropy")
    chunks = nn.LinearCrossEntropyOptions()
    return lambda x, labels: F.linear_cross_entropy(x, weight, labels, options=chunks)


def te(weight: nn.Parameter, detail: str, options: dict[str, Any]) -> Loss:
    return arms.ARMS["te"].make(Head(weight), detail, None, options)  # type: ignore[return-value]


PEERS: dict[str, Callable[[nn.Parameter, str, dict[str, Any]], Loss]] = {
    "bf16": bf16, "chunker": chunker, "liger": liger, "quack": quack, "torch": in_torch, "te": te,
}  # fmt: skip


def inputs(shape: str, device: str) -> tuple[Tensor, nn.Parameter, Tensor]:
    """x as a final norm leaves it, a weight as it is initialised, and labels."""
    m, k, n = (int(size) for size in shape.split("x"))
    torch.manual_seed(0)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = nn.Parameter(torch.randn(n, k, device=device, dtype=torch.bfloat16).mul_(0.02))
    return x, weight, torch.randint(n, (m,), device=device)


@torch.no_grad()
def exact(x: Tensor, weight: Tensor, labels: Tensor) -> Exact:
    w, dw, loss, dx = weight.double(), torch.zeros_like(weight, dtype=torch.float64), 0.0, []
    for rows, wanted in zip(x.split(ROWS), labels.split(ROWS), strict=True):
        logits = rows.double() @ w.t()
        loss += F.cross_entropy(logits, wanted, reduction="sum").item() / len(x)
        dlogits = logits.softmax(-1)
        dlogits[torch.arange(len(rows), device=x.device), wanted] -= 1
        dlogits /= len(x)
        dx.append((dlogits @ w).float())
        dw.addmm_(dlogits.t(), rows.double())
    return Exact(loss, torch.cat(dx), dw.float())


def decibels(value: Tensor, reference: Tensor) -> float:
    error = harness.relative_error(value, reference)["relative"]
    return -20 * math.log10(error) if error else math.inf


def prepare(arm: str, x: Tensor, weight: nn.Parameter, labels: Tensor, options: dict[str, Any]) -> Step:
    kind, _, detail = arm.partition(":")
    run = PEERS[kind](weight, detail, options)

    def step() -> tuple[Tensor, ...]:
        loss = run(x, labels)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    for _ in range(3):  # the first two steps of `delayed` are not those that follow
        step()
    return step


def judge(step: Step, reference: Exact, before: int, cuda: bool) -> dict[str, Any]:
    """The peak of one step, and its errors."""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    loss, dx, dw = step()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() - before if cuda else None,
        "loss": abs(loss.item() / reference.loss - 1),
        "dx_db": decibels(dx, reference.dx),
        "dw_db": decibels(dw, reference.dw),
    }


def measure(shape: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    cuda = args.device.startswith("cuda")
    x, weight, labels = inputs(shape, args.device)
    reference = exact(x, weight, labels)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for arm in args.arms:
        row = rows[arm] = {"shape": shape, "arm": arm, "step_ms": []}
        gc.collect()
        before = torch.cuda.memory_allocated() if cuda else 0
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step = prepare(arm, x, weight, labels, args.options)
            row |= judge(step, reference, before, cuda)
            row["warnings"] = [str(one.message) for one in caught if "Fallback" in type(one.message).__name__]
            steps[arm] = step
        except Exception as error:  # the other arms are still worth having
            row["skipped"] = f"{type(error).__name__}: {error}".splitlines()[0]
    for _ in range(args.rounds):
        for arm, step in steps.items():
            rows[arm]["step_ms"] += harness.times_ms(step, args.device, args.iters, 1)
    for arm, step in steps.items():
        rows[arm]["ms"] = statistics.median(rows[arm]["step_ms"])
        rows[arm]["kernels"] = harness.kernels(step, args.device) if args.kernels else []
    return list(rows.values())


def show(shape: str, rows: list[dict[str, Any]], title: str, top: int) -> None:
    m, k, n = (int(size) for size in shape.split("x"))
    base, cells = next((row["ms"] for row in rows if row["arm"] == "bf16" and "ms" in row), None), []
    for row in rows:
        if "ms" not in row:
            cells.append((row["arm"], *[None] * 7, row["skipped"][:90]))
            continue
        rate = 6e-9 * m * k * n / row["ms"]
        over = base / row["ms"] if base else None
        numbers = (
            table.number(row["ms"]), table.number(over), table.number(rate, 0 if rate > 10 else 3),
            table.number(row["peak_bytes"], 2, 2.0**-30),
        )  # fmt: skip
        errors = (f"{row['loss']:.1e}", table.number(row["dx_db"], 1), table.number(row["dw_db"], 1))
        cells.append((row["arm"], *numbers, *errors, f"{len(row['warnings'])} warnings" if row["warnings"] else None))
    columns = ("arm", "ms", "over bf16", "TF/s", "peak GiB", "loss off by", "dx dB", "dW dB", "")
    table.show(f"{shape}, forward and backward; {title}", columns, cells)
    for row in rows:
        for warning in row.get("warnings", ()):
            print(f"{row['arm']}: {warning}")
        if row.get("kernels"):
            step_report.kernels(row["arm"], row, top, 6.0 * m * k * n)


def main() -> None:
    parser = harness.arguments(__doc__, "output_layer", iters=5)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="tokens x width x vocabulary: MxKxN")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--options", type=json.loads, default={}, help="options for te, as JSON")
    parser.add_argument("--rounds", type=int, default=3, help="arms take turns")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="list the N slowest kernels of each arm")
    args = parser.parse_args()
    unknown = [arm for arm in args.arms if arm.partition(":")[0] not in PEERS]
    if unknown:
        parser.error(f"arms {', '.join(unknown)}, expected {', '.join(PEERS)}, with a detail behind a colon")
    torch._dynamo.config.recompile_limit = 64  # all arms compile the same code
    take_workspaces(args.device)
    results: dict[str, Any] = {"environment": harness.environment(args.device), "rows": []}
    for shape in args.shapes:
        rows = measure(shape, args)
        results["rows"] += rows
        harness.write_json(args.json, results)
        show(shape, rows, table.headline(results["environment"]), args.kernels)


if __name__ == "__main__":
    main()
