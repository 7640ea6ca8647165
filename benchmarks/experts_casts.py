"""Casts of experts with scales of rows. Of weights, for fprop and dgrad: columns' scales found in the pass that casts
rows, and in a pass of their own. Of the rows of groups, for wgrad: each column of a group in two passes, and in one.

    python -m benchmarks.experts_casts                 # two layers, a minute
    python -m benchmarks.experts_casts --tune          # and other ways to cut the work

Of weights, `apart` is Inductor's cast of rows, then a pass over the weight for its columns' scales and one that casts
them; `joined` has two passes. Of groups, `two passes` reads all rows for their scales before it casts them, and `strips`
reads a group's columns a second time from L2. Bytes are the fewest: two reads of the weight and two writes of its
copies; one read of the rows and one write. Their rate stands beside a copy's in the same run. Results are compared
first, bit for bit."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, table
from benchmarks.quantize import copy_bytes_per_second

LAYERS = {  # (E, N, K) of the weight
    "Qwen3 gate, up": (128, 1536, 2048),
    "Qwen3 down": (128, 2048, 768),
    "Mixtral gate, up": (8, 28672, 4096),
    "Mixtral down": (8, 4096, 14336),
    "tiny": (3, 48, 80),
}
GROUPS = {  # rows, columns, groups
    "Qwen3 gate, up: dy": (131072, 1536, 128),
    "Qwen3 down: dy": (131072, 2048, 128),
    "Qwen3 down: x": (131072, 768, 128),
    "tiny": (300, 72, 5),
}
Copies = tuple[Tensor, ...]


def ways(weight: Tensor, tune: bool) -> dict[str, Callable[[Tensor], Copies]]:
    """The ways by name; each returns data and scale_inv of rows, then of columns."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer
    from te_inductor.templates.triton import experts_rows

    quantizer = Quantizer("e4m3", scope="row")

    def apart(w: Tensor) -> Copies:
        return *ops.quantize_experts(w, quantizer), *ops.quantize_experts(w, quantizer, None, True)

    def joined(w: Tensor, config: Any = None) -> Copies:
        if config is None:
            data, scale_inv, scale, scale_inv_t = ops.quantize_experts_rows(w, quantizer)
        else:
            data, scale_inv, scale, scale_inv_t = experts_rows.quantize_experts_rows(w, quantizer, config)
        return data, scale_inv, ops.quantize_experts_delayed(w, scale, quantizer, True), scale_inv_t

    found: dict[str, Callable[[Tensor], Copies]] = {
        "apart": torch.compile(apart, backend=harness.te_backend(), dynamic=False),
        "joined": joined,
        "joined, rows alone": lambda w: ops.quantize_experts_rows(w, quantizer),
    }
    narrow = weight.shape[2] <= 4096
    sizes = ((4096, 512, 80), (8192, 1024, 128), (8192, 512, 80), (4096, 1024, 128)) if narrow else ((8192, 1024, 128),)
    for elements, of_warp, registers in sizes if tune else ():
        for span in (16, 32, 64):
            config = experts_rows.RowsConfig(elements, of_warp, registers, span)
            found[f"joined, {elements} / {of_warp}, {span} rows"] = lambda w, config=config: joined(w, config)
    return found


def measure(name: str, args: argparse.Namespace, copy_rate: float) -> list[tuple[Any, ...]]:
    torch._dynamo.reset()
    shape = LAYERS[name]
    weights = [torch.randn(shape, device=args.device, dtype=torch.bfloat16) for _ in range(2)]
    found = ways(weights[0], args.tune)
    expected = found["apart"](weights[0])
    rows = []
    for way, run in found.items():
        copies = run(weights[0])
        whole = "alone" not in way
        if whole and not all(map(_same, copies, expected)):
            raise SystemExit(f"{name}, {way}: not the copies that passes of their own make")
        calls = [lambda w=w, run=run: run(w) for w in weights]
        us = harness.call_us(calls, args.device, args.iters)
        fewest = weights[0].numel() * (6 if whole else 3)
        kernels = harness.kernels(calls[0], args.device) if args.device.startswith("cuda") else []
        parts = ", ".join(f"{kernel['name'][:40]} {kernel['mean_us']:.0f}" for kernel in kernels)
        rows.append((name, way, f"{us:.0f}", f"{fewest / us / 1e3:.0f}", f"{fewest / us * 1e6 / copy_rate:.0%}", parts))
    return rows


def measure_groups(name: str, args: argparse.Namespace, copy_rate: float) -> list[tuple[Any, ...]]:
    from benchmarks.grouped_gemm import splits
    from te_inductor.recipes import Quantizer
    from te_inductor.runtime.eager import grouped
    from te_inductor.templates.triton import group_strips, grouped_casts

    rows, columns, count = GROUPS[name]
    quantizer = Quantizer("e4m3", scope="row")
    starts, tiles, source = grouped.layout(splits(count, rows, 1).cumsum(0).int().to(args.device), rows)
    tensors = [torch.randn(rows, columns, device=args.device, dtype=torch.bfloat16) for _ in range(2)]
    found: dict[str, Callable[[Tensor], Copies]] = {
        "two passes": lambda x: grouped_casts.quantize_groups(x, source, tiles, starts, quantizer),
        "strips": lambda x: group_strips.quantize_groups_by_column(x, source, starts, quantizer),
    }
    if not args.device.startswith("cuda"):  # where no kernel runs
        found = dict.fromkeys(found, lambda x: grouped.quantize_groups(x, source, tiles, starts, quantizer))
    expected, lines = found["two passes"](tensors[0]), []
    for way, run in found.items():
        if not all(map(_same, run(tensors[0]), expected)):
            raise SystemExit(f"{name}, {way}: not the copies that two passes make")
        us = harness.call_us([lambda x=x, run=run: run(x) for x in tensors], args.device, args.iters)
        fewest = columns * (2 * rows + len(source))
        lines.append((name, way, f"{us:.0f}", f"{fewest / us / 1e3:.0f}", f"{fewest / us * 1e6 / copy_rate:.0%}", ""))
    return lines


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def main() -> None:
    parser = harness.arguments(__doc__, "experts_casts", iters=20)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["Qwen3 gate, up", "Qwen3 down"])
    parser.add_argument("--groups", nargs="*", choices=GROUPS, default=[name for name in GROUPS if name != "tiny"])
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    environment = harness.environment(args.device)
    with torch.no_grad():
        copy_rate = copy_bytes_per_second(args.device, args.iters)
        rows = [row for name in args.layers for row in measure(name, args, copy_rate)]
        rows += [row for name in args.groups for row in measure_groups(name, args, copy_rate)]
    columns = ("what", "way", "us", "GB/s", "of copy", "kernels, us")
    caption = f"copy bandwidth {copy_rate / 1e9:.0f} GB/s, read + write"
    table.show(f"Casts of experts' weights, {table.headline(environment)}", columns, rows, caption)
    written = [dict(zip(columns, row, strict=True)) for row in rows]
    harness.write_json(args.json, {"environment": environment, "copy_bytes_per_s": copy_rate, "rows": written})


if __name__ == "__main__":
    main()
