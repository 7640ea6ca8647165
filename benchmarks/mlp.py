"""A GELU MLP in inference under delayed scaling: the GEMM that writes what the next one reads, and the GEMM and the
cast.

    python -m benchmarks.mlp

Weights are cast once. Arms: `bf16` (torch.compile); `apart`, a GEMM and a kernel; `whole`, where the table has the GEMM
do both. Each is one CUDA graph, arms take turns, the median round counts."""

import statistics
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor import config

from benchmarks import harness, table
from te_inductor.fused import quantized_epilogue
from te_inductor.passes import post_grad

TOKENS = (2048, 8192, 16384)
DIMS = (1024, 2048, 4096)  # of a hidden layer four times as wide
HELD = {"policy": {"*": "delayed"}, "weights": "once"}  # named, or the size rule would leave small layers alone


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.up, self.down = nn.Linear(dim, 4 * dim, **made), nn.Linear(4 * dim, dim, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Arm:
    """A compiled model in a CUDA graph, with all that the graph reads."""

    def __init__(self, name: str, model: Mlp, x: Tensor) -> None:
        torch._dynamo.reset()
        quantizes = name != "bf16"
        given: dict[str, Any] = {"backend": harness.te_backend(), "options": HELD} if quantizes else {}
        self.run = torch.compile(model, fullgraph=True, **given)
        if quantizes:  # in grad mode, for the scales
            for _ in range(2):
                self.run(x)
        with torch.no_grad():
            for _ in range(3):
                self.run(x)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y = self.run(x)

    def us(self, iters: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(iters):
            self.graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / iters


def measure(tokens: int, dim: int, rounds: int, iters: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Mlp(dim).requires_grad_(False)
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16)
    made = {name: Arm(name, model, x) for name in ("bf16", "whole")}
    others = tuple(one for one in post_grad.PASSES if getattr(one, "__wrapped__", one) is not quantized_epilogue.fold)
    left_out = mock.patch.object(post_grad, "PASSES", others)  # which no cache sees
    with left_out, config.patch(force_disable_caches=True), functorch.patch(enable_autograd_cache=False):
        made["apart"] = Arm("apart", model, x)
    times = [{name: arm.us(iters) for name, arm in made.items()} for _ in range(rounds)]
    for arm in made.values():
        arm.graph.replay()
    errors = {name: harness.relative_error(made[name].y, made["bf16"].y)["relative"] for name in ("apart", "whole")}
    us = {name: statistics.median(taken[name] for taken in times) for name in made}
    return {"tokens": tokens, "dim": dim, "us": us, "errors": errors}


def main() -> None:
    parser = harness.arguments(__doc__, "mlp", device=None, rounds=7, iters=10)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--dims", nargs="+", type=int, default=list(DIMS))
    args = parser.parse_args()
    environment, rows = harness.environment("cuda"), []
    for tokens, dim in ((tokens, dim) for dim in args.dims for tokens in args.tokens):
        rows.append(measure(tokens, dim, args.rounds, args.iters))
        harness.write_json(args.json, {"environment": environment, "rows": rows})
    columns = ("tokens x hidden x dim", "bf16 us", "apart us", "whole us", "apart / whole", "off bf16 apart", "whole")
    cells = [
        (
            f"{row['tokens']} x {4 * row['dim']} x {row['dim']}",
            *(f"{row['us'][name]:.1f}" for name in ("bf16", "apart", "whole")),
            f"{row['us']['apart'] / row['us']['whole']:.3f}",
            *(f"{row['errors'][name]:.4f}" for name in ("apart", "whole")),
        )
        for row in rows
    ]
    table.show("GELU MLP, inference, delayed scaling", columns, cells, table.headline(environment))


if __name__ == "__main__":
    main()
