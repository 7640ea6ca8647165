"""Memory-bound kernels: quantizing a tensor together with what produces it, against the copy bandwidth of the same run.

    python -m benchmarks.quantize
    python -m benchmarks.quantize --producers swiglu_backward --shapes 16384x14336 --ways known known_amax

Ways: `row`, a row copy, and `both`, a row and a column copy, with a scale from today's amax; `known`, both with a scale
that is known, and `known_amax`, which records the amax besides, as delayed scaling does; `block`, both with scales of
1 x 128.

Two counts of bytes. "Fewest": each input read once, each low-precision copy written once; only a scale that is known
beforehand can get there. "Two passes": the inputs read once more, which a scale from today's amax needs wherever they
are larger than the L2 cache. Inputs rotate, so that the cache holds none of them when a call starts.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness, table

SHAPES = ("16384x4096", "16384x14336", "4096x4096", "28672x4096")
ROTATION = 256 * 2**20  # bytes of inputs to rotate through: four times an H200's L2
# Rounding normal numbers to e4m3 costs 2.6% of the norm.
SUSPECT_ERROR = 0.04


@dataclass(frozen=True)
class Producer:
    """`make(*inputs)` gives the tensors to quantize, from `reads` bf16 tensors of the shape."""

    make: Callable[..., tuple[Tensor, ...]]
    reads: int
    makes: int = 1
    weight: bool = False  # a last argument of one row


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = (t.float() for t in (grad, gate, up))
    sigmoid = gate.sigmoid()
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return d_gate.bfloat16(), (grad * gate * sigmoid).bfloat16()


PRODUCERS = {
    "none": Producer(lambda x: (x,), reads=1),
    "rmsnorm": Producer(lambda x, w: (F.rms_norm(x, x.shape[-1:], w, 1e-5),), reads=1, weight=True),
    "swiglu": Producer(lambda gate, up: (F.silu(gate) * up,), reads=2),
    "swiglu_backward": Producer(_swiglu_backward, reads=3, makes=2),
}


@dataclass(frozen=True)
class Way:
    """How the result is quantized."""

    copies: int
    scope: str = "tensor"
    known: bool = False  # whether the scale is
    amax: bool = False  # whether it is recorded


WAYS = {
    "row": Way(1),
    "both": Way(2),
    "known": Way(2, known=True),
    "known_amax": Way(2, known=True, amax=True),
    "block": Way(2, "1x128"),
}


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "quantize", iters=50)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="ROWSxCOLUMNS")
    parser.add_argument("--producers", nargs="+", choices=PRODUCERS, default=list(PRODUCERS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--element", choices=("e4m3", "e5m2"), default="e4m3")
    parser.add_argument("--plot", action="store_true")
    return parser.parse_args()


def compiled(producer: Producer, way: Way, element: str) -> Callable[..., list[Tensor]]:
    """Compiles a function of `scale`, () fp32, which counts where it is known, `amax`, () fp32, and the producer's
    inputs: data and scale_inv of each copy."""
    from te_inductor import ops
    from te_inductor.recipes import Quantizer

    quantizer = Quantizer(element, scope=way.scope)

    def quantize(x: Tensor, scale: Tensor) -> list[Tensor]:
        if not way.known:
            return list((ops.quantize if way.copies == 1 else ops.quantize_rowcol)(x, quantizer))
        data, data_t = ops.quantize_rowcol_delayed(x, scale, quantizer)
        return [data, 1 / scale, data_t, 1 / scale]

    def run(scale: Tensor, amax: Tensor, *inputs: Tensor) -> list[Tensor]:
        tensors = producer.make(*inputs)
        if way.amax:
            ops.record_amax(list(tensors), amax)
        return [part for x in tensors for part in quantize(x, scale)]

    return torch.compile(run, backend=harness.te_backend(), dynamic=False)


def make_inputs(producer: Producer, rows: int, columns: int, device: str) -> list[list[Tensor]]:
    """Makes as many sets of inputs as the rotation takes, at least two."""
    size = 2 * rows * columns * producer.reads
    sets = [
        [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(producer.reads)]
        for _ in range(min(max(2, math.ceil(ROTATION / size)), 8))
    ]
    weight = torch.ones(columns, device=device, dtype=torch.bfloat16)
    return [[*inputs, weight] if producer.weight else inputs for inputs in sets]


def error(references: Sequence[Tensor], parts: list[Tensor], way: Way) -> float:
    """Relative error of the worst low-precision copy against the producer run eagerly."""
    from te_inductor.numerics import blocks
    from te_inductor.recipes.formats import ELEMENTS, SCOPES

    found = []
    for index, reference in enumerate(references):
        mine = parts[2 * way.copies * index : 2 * way.copies * (index + 1)]
        for data, scale_inv, transposed in zip(mine[::2], mine[1::2], (False, True), strict=False):
            expected = reference.t() if transposed else reference
            scope = SCOPES[way.scope]
            value = blocks.values(data, scale_inv, ELEMENTS[scope.elements[0]], scope)[:, : expected.shape[1]]
            found.append(harness.relative_error(value, expected)["relative"])
    return max(found, key=lambda e: math.inf if math.isnan(e) else e)


def measure(name: str, how: str, shape: str, args: argparse.Namespace, copy_rate: float) -> dict[str, Any]:
    from te_inductor.recipes.formats import ELEMENTS

    producer, way = PRODUCERS[name], WAYS[how]
    rows, columns = (int(size) for size in shape.split("x"))
    torch._dynamo.reset()
    run = compiled(producer, way, args.element)
    sets = make_inputs(producer, rows, columns, args.device)
    references = producer.make(*sets[0])
    amax = torch.stack([reference.abs().max().float() for reference in references]).max()
    scale = ELEMENTS[args.element].max / amax
    off = error(references, run(scale, amax.clone(), *sets[0]), way)
    calls = [lambda inputs=inputs: run(scale, amax, *inputs) for inputs in sets]
    us = harness.call_us(calls, args.device, args.iters)
    launched = harness.kernels(calls[0], args.device) if args.device.startswith("cuda") else []
    fewest = rows * columns * (2 * producer.reads + way.copies * producer.makes)
    two_passes = fewest + rows * columns * 2 * producer.reads
    return {
        "shape": shape, "producer": name, "way": how, "us": us, "error": off,
        "fewest_bytes": fewest, "two_pass_bytes": two_passes,
        "of_copy_fewest": fewest / us * 1e6 / copy_rate, "of_copy_two_passes": two_passes / us * 1e6 / copy_rate,
        "kernels": launched,
    }  # fmt: skip


def copy_bytes_per_second(device: str, replays: int) -> float:
    """Read + write, of a copy larger than any cache."""
    elements = 16384 * 14336 if device.startswith("cuda") else 2**22
    buffers = [torch.randn(elements, device=device, dtype=torch.bfloat16) for _ in range(3)]
    pairs = [(buffers[i], buffers[(i + 1) % 3]) for i in range(3)]
    us = harness.call_us([lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs], device, replays)
    return 4 * elements / us * 1e6


def main() -> None:
    args = parse()
    results: dict[str, Any] = {"environment": harness.environment(args.device), "element": args.element, "rows": []}
    with torch.no_grad():
        results["copy_bytes_per_s"] = copy_rate = copy_bytes_per_second(args.device, args.iters)
        for shape in args.shapes:
            for name in args.producers:
                for way in args.ways:
                    results["rows"].append(measure(name, way, shape, args, copy_rate))
                    harness.write_json(args.json, results)
    show(results)
    print(f"numbers: {args.json}")
    if args.plot:
        rows = results["rows"]
        names = [f"{row['shape']} {row['producer']} {row['way']}" for row in rows]
        values = [100 * row["of_copy_fewest"] for row in rows]
        table.bars(
            args.json.with_suffix(".png"),
            table.headline(results["environment"]),
            [("us", names, [row["us"] for row in rows]), ("% of copy bandwidth, fewest bytes", names, values)],
        )


def show(results: dict[str, Any]) -> None:
    cells = [
        (
            row["shape"],
            row["producer"],
            row["way"],
            f"{row['us']:.1f}",
            f"{sum(kernel['calls'] for kernel in row['kernels']):g}" if row["kernels"] else None,
            f"{row['fewest_bytes'] / row['us'] / 1e3:.0f}",
            f"{row['of_copy_fewest']:.0%}",
            f"{row['of_copy_two_passes']:.0%}",
            f"{row['error']:.4f}{'' if row['error'] <= SUSPECT_ERROR else ' SUSPECT'}",
        )
        for row in results["rows"]
    ]
    columns = ("shape", "producer", "way", "us", "kernels", "GB/s", "of copy, fewest", "of copy, two passes", "error")
    copy = f"copy bandwidth {results['copy_bytes_per_s'] / 1e9:.0f} GB/s, read + write; GB/s is of the fewest bytes"
    table.show(f"quantize to {results['element']}; " + table.headline(results["environment"]), columns, cells, copy)
    for row in results["rows"]:
        parts = ", ".join(f"{kernel['name']} {kernel['mean_us']:.1f} us" for kernel in row["kernels"])
        if parts:
            print(f"{row['shape']} {row['producer']} {row['way']}: {parts}")


if __name__ == "__main__":
    main()
