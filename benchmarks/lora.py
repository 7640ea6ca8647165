"""LoRA on a frozen base: bf16, cast to FP8 in each call, and stored in FP8.

    python -m benchmarks.lora                       # about a minute
    python -m benchmarks.lora --tokens 2048 8192 --layers 4 --arms bf16 stored:rowwise

Llama-3-8B-shaped blocks, an adapter beside each of their seven linear layers, as peft writes it; a step is a forward and a
backward to the adapters and to x. Arms: `bf16`, Inductor; `cast:RECIPE`, the base in bf16, its weights cast in each call;
`stored:RECIPE`, by `te_inductor.quantize_`. Adapters stay in bf16 in all of them. `off` is how far the gradients of all
adapters are from those of bf16, relative."""

import argparse
import gc
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness, llama_blocks, table
from benchmarks.llama_blocks import WIDTHS, Shape


class Adapted(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self, layer: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": torch.bfloat16}
        self.base_layer, self.scaling = layer, scaling
        self.lora_A = nn.Linear(layer.in_features, rank, **made)
        self.lora_B = nn.Linear(rank, layer.out_features, **made)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


def adapt(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Put an adapter beside each linear layer; the parameters that train."""
    model.requires_grad_(False)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(2)
    trained = []
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, nn.Linear):
                adapted = Adapted(layer, rank, 2.0)
                setattr(parent, name, adapted)
                trained += [adapted.lora_A.weight, adapted.lora_B.weight]
    with torch.no_grad():
        for weight in trained:
            weight.normal_(std=0.02, generator=generator)
    return trained


def measure(arm: str, tokens: int, args: argparse.Namespace) -> tuple[dict[str, Any], list[Tensor]]:
    torch._dynamo.reset()
    gc.collect()
    kind, _, recipe = arm.partition(":")
    shape = Shape.of(args, batch=1, seq=tokens)
    model = llama_blocks.build(shape, torch.bfloat16, args.device)
    if kind == "stored":
        import te_inductor

        te_inductor.quantize_(model, recipe)
    trained = adapt(model, args.rank)
    x, dy = llama_blocks.inputs(shape, torch.bfloat16, args.device)
    if kind == "bf16":
        run = torch.compile(model, fullgraph=True)
    else:  # by policy, or the size rule might leave layers alone, or take an adapter
        options = {"recipe": "none", "policy": {"*.base_layer": recipe}} if kind == "cast" else {"recipe": "none"}
        run = torch.compile(model, fullgraph=True, backend=harness.te_backend(), options=options)

    def step() -> None:
        for tensor in (x, *trained):
            tensor.grad = None
        run(x).backward(dy)

    for _ in range(args.warmup):
        step()
    peak = harness.peak_bytes(args.device, step)
    times = harness.times_ms(step, args.device, args.iters, 1)
    gradients = [weight.grad.float().cpu() for weight in trained if weight.grad is not None]
    return {"arm": arm, "tokens": tokens, "step_ms": statistics.median(times), "peak_bytes": peak}, gradients


def off(gradients: list[Tensor], reference: list[Tensor]) -> float:
    flat, other = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (gradients, reference))
    return harness.relative_error(flat, other)["relative"]


def main() -> None:
    parser = harness.arguments(__doc__, "lora", layers=4, rank=16, iters=20, warmup=3, **WIDTHS)
    arms = ["bf16", "cast:current", "stored:current", "stored:rowwise"]
    parser.add_argument("--arms", nargs="+", default=arms)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048])
    args = parser.parse_args()
    environment, found = harness.environment(args.device), []
    for tokens in args.tokens:
        base: tuple[dict[str, Any], list[Tensor]] | None = None
        for arm in args.arms:
            row, gradients = measure(arm, tokens, args)
            base = (row, gradients) if arm == "bf16" else base
            if base is not None:
                row |= {"over": base[0]["step_ms"] / row["step_ms"], "off": off(gradients, base[1])}
                if row["peak_bytes"]:
                    row["peak_of_bf16"] = row["peak_bytes"] / base[0]["peak_bytes"]
            found.append(row)
            harness.write_json(args.json, {"environment": environment, "rows": found})
    columns = ("arm", "tokens", "step ms", "over bf16", "peak GiB", "of bf16's", "off bf16")
    rows = [
        (
            row["arm"], row["tokens"], table.number(row["step_ms"], 3), table.number(row.get("over")),
            table.number(row["peak_bytes"], 2, 2.0**-30), table.number(row.get("peak_of_bf16")),
            table.number(row.get("off"), 4),
        )
        for row in found
    ]  # fmt: skip
    table.show(f"LoRA, {args.layers} blocks, rank {args.rank}; {table.headline(environment)}", columns, rows)


if __name__ == "__main__":
    main()
