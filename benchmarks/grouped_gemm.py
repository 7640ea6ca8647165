"""Grouped GEMMs of experts: our FP8 kernel, torch._scaled_grouped_mm and bf16 torch._grouped_mm.

    python -m benchmarks.grouped_gemm
    python -m benchmarks.grouped_gemm --tune --gemms fprop --layers "Mixtral down"

Groups are of random, uneven sizes. Operands are larger than the L2 cache by far. Each result is first held to the bf16
product of the dequantized operands, whose time is the one beside it."""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, table
from te_inductor.kernels.grouped_mm import GroupedConfig
from te_inductor.recipes import Gemm
from te_inductor.recipes.formats import ELEMENTS
from te_inductor.templates.triton.grouped_mm import grouped_mm, grouped_wgrad

LAYERS = {  # E, N, K of the weight, rows
    "Mixtral gate, up": (8, 28672, 4096, 32768),
    "Mixtral down": (8, 4096, 14336, 32768),
    "Qwen3 gate, up": (128, 1536, 2048, 131072),
    "Qwen3 down": (128, 2048, 768, 131072),
}
GEMMS = {"fprop": ("e4m3", "e4m3"), "dgrad": ("e5m2", "e4m3"), "wgrad": ("e5m2", "e4m3")}
SCOPES = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "1x128": ("1x128", "128x128")}
CONFIGS = [GroupedConfig(256, 4, band) for band in (4, 8, 16, 32)] + [
    GroupedConfig(128, stages, 16) for stages in (4, 6)
]
TOLERANCE = 0.01  # of the norm: both results are rounded to bf16, as are the operands of the other
BLOCK = 128


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "grouped_gemm", device=None, iters=7)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--gemms", nargs="+", choices=GEMMS, default=list(GEMMS))
    parser.add_argument("--scopes", nargs="+", choices=SCOPES, default=list(SCOPES))
    parser.add_argument("--tune", action="store_true", help="each of several ways to cut the work")
    return parser.parse_args()


def splits(e: int, rows: int, multiple: int) -> Tensor:
    """Sizes of groups whose largest is several times the smallest: softmax of normal scores."""
    generator = torch.Generator().manual_seed(0)
    share = torch.softmax(torch.randn(e, generator=generator) * 0.5, 0) * (rows // multiple)
    sizes = share.floor().long()
    sizes[0] += rows // multiple - sizes.sum()
    return sizes * multiple


def values(*shape: int, element: str) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(40).to(ELEMENTS[element].dtype)


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape, device="cuda") + 0.5) / 64


class Problem:
    """Operands of one GEMM of one layer, with scales of one scope."""

    def __init__(self, name: str, layer: str, scope: str) -> None:
        e, n, k, m = LAYERS[layer]
        self.name, self.scope = name, scope
        if name == "dgrad":
            n, k = k, n
        elements = GEMMS[name]
        self.flops = 2.0 * m * n * k
        self.scopes = ("1x128", "1x128") if name == "wgrad" and scope == "1x128" else SCOPES[scope]
        if name == "wgrad":
            ends = splits(e, m, BLOCK).cumsum(0)
            self.a, self.b = values(n, m, element=elements[0]), values(k, m, element=elements[1])
            shapes = {
                "tensor": ((), ()), "row": ((e, n), (e, k)), "1x128": ((m // BLOCK * n,), (m // BLOCK * k,))
            }[scope]  # fmt: skip
        else:
            ends = splits(e, m, 1).cumsum(0)
            self.a, self.b = values(m, k, element=elements[0]), values(e, n, k, element=elements[1])
            blocks = k // BLOCK
            shapes = {
                "tensor": ((), (e,)), "row": ((m, 1), (e, n)), "1x128": ((blocks * m,), (e, n // BLOCK * blocks))
            }[scope]  # fmt: skip
        self.a_scale, self.b_scale = scales(*shapes[0]), scales(*shapes[1])
        self.ends = ends.int().cuda()
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int().cuda()

    def ours(self, fast: bool, config: GroupedConfig | None) -> Callable[[], Tensor]:
        gemm = Gemm(self.name, fast, self.scopes, GEMMS[self.name])
        given = self.a, self.a_scale, self.b, self.b_scale
        if self.name == "wgrad":
            return functools.partial(grouped_wgrad, *given, self.starts, gemm, torch.bfloat16, config=config)
        return functools.partial(grouped_mm, *given, self.ends, None, gemm, torch.bfloat16, config=config)

    def library(self, fast: bool) -> Callable[[], Tensor] | None:
        """E4M3 with scales of rows, as torch.nn.functional has it."""
        if self.scope != "row" or self.name == "wgrad":
            return None
        a = self.a.float().clamp(-448, 448).to(torch.float8_e4m3fn) if self.name == "dgrad" else self.a
        return lambda: torch._scaled_grouped_mm(
            a, self.b.transpose(1, 2), self.a_scale.flatten(), self.b_scale, offs=self.ends,
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip

    def plain(self) -> Callable[[], Tensor]:
        """The product of the dequantized operands, in the layouts that a training step has."""
        a, b = self._wide(self.a, self.a_scale, True), self._wide(self.b, self.b_scale, False)
        if self.name == "wgrad":  # rows of dy and x, of which the product contracts the first dimension
            a, b = a.t().contiguous().t(), b.t().contiguous()
        elif self.name == "dgrad":
            b = b.transpose(1, 2).contiguous()
        else:
            b = b.transpose(1, 2)
        return lambda: torch._grouped_mm(a, b, offs=self.ends)

    def _wide(self, x: Tensor, scale: Tensor, left: bool) -> Tensor:
        x = x.bfloat16()
        if self.name == "wgrad":
            if self.scope == "row":
                sizes = self.starts.diff().long()
                return x.mul_(scale.t().bfloat16().repeat_interleave(sizes, 1))
            if self.scope == "1x128":
                return x.mul_(scale.view(-1, x.shape[0]).t().bfloat16().repeat_interleave(BLOCK, 1))
            return x.mul_(scale)
        if self.scope == "1x128":
            if left:
                return x.mul_(scale.view(-1, x.shape[0]).t().bfloat16().repeat_interleave(BLOCK, 1))
            e, n, k = x.shape
            blocks = scale.view(e, n // BLOCK, 1, k // BLOCK, 1).bfloat16()
            return x.view(e, n // BLOCK, BLOCK, k // BLOCK, BLOCK).mul_(blocks).view(e, n, k)
        if left:
            return x.mul_(scale.bfloat16())
        return x.mul_((scale.unsqueeze(-1) if self.scope == "row" else scale.view(-1, 1, 1)).bfloat16())


def assert_right(found: Tensor, expected: Tensor, what: str) -> None:
    """Part by part: of rows, or an expert's gradient."""
    parts = zip(found.split(max(found.shape[0] // 32, 1)), expected.split(max(found.shape[0] // 32, 1)), strict=True)
    for place, (one, other) in enumerate(parts):
        empty = not other.any()  # an expert without rows
        error = float(one.any()) if empty else harness.relative_error(one, other)["relative"]
        if not error < TOLERANCE:
            raise SystemExit(f"{what} is wrong by {error} of its norm in part {place}")


def measure(layer: str, name: str, scope: str, options: argparse.Namespace) -> list[tuple[Any, ...]]:
    torch.cuda.empty_cache()
    problem = Problem(name, layer, scope)
    plain = problem.plain()
    expected = plain()
    bf16 = _ms(plain, options)
    rows = []
    for fast in (True, False) if scope != "1x128" else (False,):
        library = problem.library(fast)
        library_ms = None if library is None else _ms(library, options)
        for config in CONFIGS if options.tune else [None]:
            ours = problem.ours(fast, config)
            assert_right(ours(), expected, f"{layer} {name} {scope} {config}")
            milliseconds = _ms(ours, options)
            rows.append((fast, milliseconds, library_ms, config))
    return [
        (
            layer, name, scope, "fast" if fast else "slow", table.number(ms), table.number(problem.flops / ms / 1e9, 0),
            table.number(problem.flops / bf16 / 1e9, 0), table.number(bf16 / ms),
            table.number(library and problem.flops / library / 1e9, 0), config,
        )
        for fast, ms, library, config in rows
    ]  # fmt: skip


def _ms(call: Callable[[], Tensor], options: argparse.Namespace) -> float:
    return statistics.median(harness.times_ms(call, "cuda", options.iters, warmup=3))


def main() -> None:
    options = parse()
    environment = harness.environment("cuda")
    rows = []
    for layer in options.layers:
        for name in options.gemms:
            for scope in options.scopes:
                found = measure(layer, name, scope, options)
                print(*(" | ".join(map(str, row)) for row in found), sep="\n", flush=True)
                rows += found
    columns = ("layer", "GEMM", "scales", "sums", "ms", "TF/s", "bf16 TF/s", "over bf16", "torch FP8 TF/s", "config")
    table.show(f"Grouped GEMMs of experts, {table.headline(environment)}", columns, rows)
    written = [dict(zip(columns, map(str, row), strict=True)) for row in rows]
    harness.write_json(options.json, {"environment": environment, "rows": written})


if __name__ == "__main__":
    main()
