"""Linear layers whose sizes no fp8 GEMM takes: padded inside the op, or left in bf16?

    python -m benchmarks.padding

cuBLASLt wants sizes that are multiples of 16. The op pads (the pads fuse with the casts), which costs work;
`te_inductor.passes.pre_grad.sites.requirements.MAX_PADDING` says up to how much. This measures where padding stops to pay:
forward and backward of one `nn.Linear` in bf16, every size padded however much that takes, against torch.compile.
Kernel times are summed: one layer alone is bound by the host, whatever its sizes."""

import argparse
import functools
import math
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks import harness, table
from te_inductor.passes.pre_grad.sites import requirements
from te_inductor.recipes.formats import padded

SHAPES = (
    "8192x4096x4096",  # no padding, for comparison
    "8192x2048x2048",
    "8192x1024x1024",
    "8192x512x512",
    "8191x4096x4096",  # M alone: only the columnwise copies are padded
    "8192x4090x4090",
    "8192x1000x4096",
    "8192x50257x768",  # GPT-2's head
    "8192x4096x100",
    "8192x100x4096",
    "8192x40x4096",
    "8192x20x4096",
    "8192x4096x20",
    "8192x1x4096",
)


def step(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    layer(x).backward(dy)


def measure(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    m, n, k = (int(size) for size in shape.split("x"))
    layer = nn.Linear(k, n, device=args.device, dtype=torch.bfloat16)
    x = torch.randn(m, k, device=args.device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device=args.device, dtype=torch.bfloat16)
    times = {}
    forced = {"policy": {"*": "current"}}  # or the size rule would leave small layers alone
    for arm, backend, options in (("bf16", "inductor", None), ("te", harness.te_backend(), forced)):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=backend, options=options)
        with mock.patch.object(requirements, "MAX_PADDING", math.inf):
            call = functools.partial(step, compiled, x, dy)
            for _ in range(args.warmup):
                call()
            times[arm] = sum(kernel["total_us"] for kernel in harness.kernels(call, args.device, args.iters))
    work = padded(n) * padded(k) / (n * k)
    return {
        "shape": shape,
        "work": work,
        "bf16_us": times["bf16"],
        "te_us": times["te"],
        "over_bf16": times["bf16"] / times["te"],
    }


def main() -> None:
    parser = harness.arguments(__doc__, "padding", iters=10, warmup=5)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="MxNxK")
    args = parser.parse_args()
    rows = [measure(shape, args) for shape in args.shapes]
    environment = harness.environment(args.device)
    table.show(
        f"nn.Linear, forward and backward; {table.headline(environment)}",
        ("M x N x K", "work of N and K padded", "bf16 us", "te us", "over bf16"),
        [(r["shape"], *(table.number(r[key], 2) for key in ("work", "bf16_us", "te_us", "over_bf16"))) for r in rows],
        f"MAX_PADDING is {requirements.MAX_PADDING}",
    )
    harness.write_json(args.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
