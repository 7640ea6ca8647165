"""Generation with a Llama-3-8B-shaped decoder, tokens a second, and the linear layers of it alone.

    python -m benchmarks.decode
    python -m benchmarks.decode --arms bf16 te:nvfp4_weight_only --batches 1 --layers 4

Random weights, a static KV cache. Each arm compiles a block, once for all, and the head; the step of one token is one
CUDA graph. Weights are read once a step, so bytes of weights over the copy bandwidth are the floor. Arms: `bf16`;
`te:RECIPE`, weights stored by `te_inductor.quantize_`; `torchao:float8`, `torchao:int4` and `gemlite` where importable.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import harness, llama_decoder, table

ARMS = ("bf16", "te:rowwise", "te:nvfp4_weight_only", "torchao:float8", "torchao:int4", "gemlite")
LAYERS = {"gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096)}
COPY = 4269e9  # bytes a second, reading and writing, measured on an H200
COLD = 160e6  # bytes of weights that a layer's calls rotate through


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "decode", device="cuda", layers=32)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--tokens", type=int, default=100, help="steps that are timed; the median counts")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16, 64, 256, 4096], help="M of the layers alone")
    parser.add_argument("--plot", type=Path, default=Path("out/decode.png"))
    return parser.parse_args()


def prepare(arm: str, model: nn.Module) -> dict[str, Any]:
    """Store the weights as the arm does; what `torch.compile` is to be called with."""
    kind, _, detail = arm.partition(":")
    if kind == "te":
        from te_inductor import quantize_

        quantize_(model, detail)
        return {"backend": harness.te_backend(), "options": {"fallback": "error"}}
    if kind == "torchao":
        from torchao import quantization

        config = {
            "float8": lambda: quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow()),
            "int4": lambda: quantization.Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"),
        }[detail]()
        quantization.quantize_(model, config)
    if kind == "gemlite":
        from gemlite.helper import A16W4_NVFP, patch_model

        patch_model(model, device="cuda", processor=A16W4_NVFP(dtype=torch.bfloat16), skip_modules=[])
    return {}


def held(model: nn.Module) -> float:
    """Bytes of the weights of linear layers and norms, all of which a step reads."""
    total = 0.0
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name.rpartition(".")[2] in ("keys", "values", "turns", "positions") or name.startswith("embedding"):
            continue
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else None
        parts = [tensor] if names is None else [getattr(tensor, part) for part in names]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


def generate(arm: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = llama_decoder.Shape(layers=options.layers)
    model = llama_decoder.make(shape, batch, options.device)
    how = prepare(arm, model)
    for block in model.blocks:
        block.compile(fullgraph=True, **how)
    model.head.compile(fullgraph=True, **how)
    tokens = torch.randint(shape.vocabulary, (batch, 1), device=options.device)
    place = torch.full((1,), shape.context // 2, device=options.device)
    with torch.no_grad():
        step = harness.captured(lambda: model(tokens, place), options.device)
        ms = statistics.median(harness.times_ms(step, options.device, options.tokens, 5))
    return {"arm": arm, "batch": batch, "ms": ms, "tokens_s": 1e3 * batch / ms, "bytes": held(model)}


def layer_us(arm: str, name: str, m: int, options: argparse.Namespace) -> float:
    """One compiled layer, with everything that its product takes: casts of activations, sums of partial sums."""
    torch._dynamo.reset()
    n, k = LAYERS[name]
    count = max(2, round(COLD / (n * k * 0.5625)))
    layers = nn.ModuleList(
        nn.Linear(k, n, bias=False, device=options.device, dtype=torch.bfloat16).requires_grad_(False)
        for _ in range(count)
    )
    how = prepare(arm, layers)
    run = torch.compile(F.linear, fullgraph=True, **how)
    x = torch.randn(m, k, device=options.device, dtype=torch.bfloat16)
    with torch.no_grad():
        return harness.call_us([lambda w=layer.weight: run(x, w) for layer in layers], options.device, 9)


def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
    """A peer that does not run here is a row that says so; an arm of ours is an error."""
    try:
        return work(*arguments)
    except Exception as error:
        if arguments[0].startswith(("bf16", "te")):
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def main() -> None:
    options = parse()
    arms = [arm for arm in options.arms if arm[:4] not in ("torc", "geml") or harness.importable(arm.partition(":")[0])]
    environment = harness.environment(options.device)
    steps: list[tuple[str, int, Any]] = []
    layers: list[tuple[str, str, int, Any]] = []
    for batch, arm in itertools.product(options.batches, arms):
        steps.append((arm, batch, attempt(generate, arm, batch, options)))
        save(steps, layers, options, environment)
    for name, m, arm in itertools.product(LAYERS, options.rows, arms):
        if not arm.startswith("gemlite"):
            layers.append((arm, name, m, attempt(layer_us, arm, name, m, options)))
            save(steps, layers, options, environment)
    if steps:
        show_steps(steps, options, environment)
    if layers:
        show_layers(layers)


def save(steps: list[Any], layers: list[Any], options: argparse.Namespace, environment: dict[str, Any]) -> None:
    """Is called after each measurement: a run that is cut short keeps what it has."""
    rows = [found if isinstance(found, dict) else {"arm": arm, "error": found} for arm, _, found in steps]
    kernels = [dict(zip(("arm", "layer", "m", "us"), row, strict=True)) for row in layers]
    print(kernels[-1] if kernels else rows[-1], flush=True)
    harness.write_json(options.json, {"environment": environment, "steps": rows, "layers": kernels})


def show_steps(steps: list[tuple[str, int, Any]], options: argparse.Namespace, environment: dict[str, Any]) -> None:
    rows = []
    base = {batch: found["ms"] for arm, batch, found in steps if arm == "bf16"}
    for arm, batch, found in steps:
        if not isinstance(found, dict):
            rows.append((arm, batch, None, None, None, None, found))
            continue
        floor = found["bytes"] / COPY * 1e3
        over = base[batch] / found["ms"] if batch in base else None
        digits = (table.number(found["tokens_s"], 0), table.number(found["ms"], 3), table.number(over))
        rows.append((arm, batch, *digits, table.number(found["bytes"] / 1e9), f"{floor / found['ms']:.0%}"))
    columns = ("arm", "batch", "tokens/s", "ms a step", "over bf16", "weights GB", "of the weights' floor")
    title = f"Llama-3-8B shape, {options.layers} layers, {table.headline(environment)}"
    table.show(title, columns, rows)
    panels = [
        (f"tokens/s, batch {batch}", *zip(*pairs, strict=True))
        for batch in options.batches
        if (pairs := [(a, f["tokens_s"]) for a, b, f in steps if b == batch and isinstance(f, dict)])
    ]
    if panels:
        table.bars(options.plot, title, panels)


def show_layers(layers: list[tuple[str, str, int, Any]]) -> None:
    base = {(name, m): us for arm, name, m, us in layers if arm == "bf16"}
    rows = []
    for arm, name, m, us in layers:
        n, k = LAYERS[name]
        if not isinstance(us, float):
            rows.append((name, f"{n} x {k}", m, arm, None, None, None, us))
            continue
        size = n * k * {"bf16": 2, "te:nvfp4_weight_only": 0.5625, "torchao:int4": 0.53125}.get(arm, 1)
        over = base[name, m] / us if (name, m) in base else None
        speed = size / us / 1e3
        cells = (table.number(us, 1), table.number(over), table.number(speed, 0), f"{speed * 1e9 / COPY:.0%}")
        rows.append((name, f"{n} x {k}", m, arm, *cells))
    columns = ("layer", "N x K", "M", "arm", "us", "over bf16", "GB/s of weights", "of copy")
    table.show("linear layers alone, compiled, in a CUDA graph", columns, rows)


if __name__ == "__main__":
    main()
