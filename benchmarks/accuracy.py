"""What recipes lose, on tensors of a training run: `python -m benchmarks.accuracy`, on CPU.

The demo's Llama learns for `--steps` steps in high precision. Then each recipe's operands are measured on the next
batch (`te_inductor.accuracy_report`), and products of one layer's gradient are averaged over draws of its random bits.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import te_inductor
from benchmarks.table import show
from examples.corpus import standard_library
from examples.llama import Llama, loss
from examples.training import Settings
from te_inductor import ops
from te_inductor.api.accuracy_figures import AccuracyReport
from te_inductor.numerics import arithmetic, blocks, microscaling
from te_inductor.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_inductor.recipes.formats import E2M1, Scope

NVFP4 = NVFP4BlockScaling()
RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "rowwise": Float8RowwiseScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4,
    "nvfp4, no RHT": replace(NVFP4, disable_rht=True),
    "nvfp4, to nearest": replace(NVFP4, disable_stochastic_rounding=True),
    "nvfp4, neither": replace(NVFP4, disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4, 1 x 16 weights": replace(NVFP4, disable_2d_quantization=True),
}
OPERANDS = (
    ("fprop", "input"),
    ("fprop", "weight"),
    ("dgrad", "grad_output"),
    ("wgrad", "grad_output"),
    ("wgrad", "input"),
)
DRAWS = 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layer", default="blocks.1.mlp.up", help="whose gradient is averaged")
    args = parser.parse_args(argv)
    settings = Settings(steps=args.steps)
    model, tokens = trained(settings)
    title = f"torch {torch.__version__}, after {settings.steps} steps; medians over layers"
    rows = [row(name, report(model, tokens, recipe)) for name, recipe in RECIPES.items()]
    columns = [" ".join(operand) for operand in OPERANDS]
    products = [f"{gemm} product" for gemm in ("fprop", "dgrad", "wgrad")]
    show(f"SQNR in dB; {title}", ["recipe", *columns, *products, "saturated", "underflow"], rows)
    x, dy = gradient_of(model, args.layer, tokens)
    columns = [f"{gemm}, {which}" for gemm in ("dgrad", "wgrad") for which in ("one draw", f"mean of {DRAWS}")]
    weight = model.get_submodule(args.layer).weight
    rows = [averaged(name, RECIPES[name], x, weight, dy) for name in RECIPES if name.startswith("nvfp4")]
    show(f"SQNR in dB of {args.layer}'s gradients, of dy's rounding alone", ["recipe", *columns], rows)


def trained(settings: Settings) -> tuple[Llama, Tensor]:
    """The model, and a batch that it has not seen."""
    model = settings.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.95), fused=True)
    batches = settings.batches(standard_library(), "train", settings.steps + 1)
    for tokens in batches[:-1]:
        loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, batches[-1]


def report(model: Llama, tokens: Tensor, recipe: Recipe) -> AccuracyReport:
    def criterion(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    options = {"policy": {"*": recipe}, "fallback": "silent"}
    return te_inductor.accuracy_report(model, tokens[:, :-1], options=options, loss=criterion)


def row(name: str, found: AccuracyReport) -> list[str]:
    operands = [(gemm.gemm, operand) for gemm in found.gemms for operand in (gemm.a, gemm.b)]
    decibels = [[o.sqnr_db for gemm, o in operands if (gemm, o.tensor) == wanted] for wanted in OPERANDS]
    products = [[gemm.sqnr_db for gemm in found.gemms if gemm.gemm == wanted] for wanted in ("fprop", "dgrad", "wgrad")]
    shares = [median(getattr(operand, share) for _, operand in operands) for share in ("saturated", "underflowed")]
    return [name, *(_median(values) for values in (*decibels, *products)), *(f"{share:.2%}" for share in shares)]


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.1f}" if known else "-"


def gradient_of(model: Llama, layer: str, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """x and dy of one layer, as matrices."""
    seen: dict[str, Any] = {}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["x"] = inputs[0].detach().flatten(0, -2)
        output.register_hook(lambda dy: seen.update(dy=dy.flatten(0, -2)))

    handle = model.get_submodule(layer).register_forward_hook(keep)
    loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
    handle.remove()
    return seen["x"], seen["dy"]


@torch.no_grad()
def averaged(name: str, recipe: Recipe, x: Tensor, weight: Tensor, dy: Tensor) -> list[str]:
    """Returns, of dgrad and wgrad, one product's SQNR and that of the mean of several, where nothing differs but dy's
    rounding. The other operand, which is the same each time, is part of what is right."""
    slots = recipe.slots()
    _, x_col = ops.copies([x], 0, slots.input, None, columnwise=True)
    _, w_col = ops.copies([weight], 0, slots.weight, None, columnwise=True)
    dy_t = microscaling.exact_hadamard(dy.t()) if slots.grad_output.hadamard else dy.t()
    exact = {
        "dgrad": exact_product(dy, w_col, slots.dgrad.granularities[1]),
        "wgrad": exact_product(dy_t, x_col, slots.wgrad.granularities[1]),
    }
    made: dict[str, list[Tensor]] = {"dgrad": [], "wgrad": []}
    for _ in range(DRAWS):
        row, column = ops.copies([dy], 0, slots.grad_output, None, columnwise=True)
        made["dgrad"].append(ops.product(row, w_col, None, slots.dgrad, torch.float32).double())
        made["wgrad"].append(ops.product(column, x_col, None, slots.wgrad, torch.float32).double())
    means = [[products[0], torch.stack(products).mean(0)] for products in made.values()]
    return [name, *(f"{decibels(exact[gemm], m):.1f}" for gemm, pair in zip(made, means, strict=True) for m in pair)]


def exact_product(dy: Tensor, other: ops.Copy | None, scope: Scope) -> Tensor:
    """dy in high precision times what the other operand stands for."""
    assert other is not None and other.amax is not None
    low = blocks.values(other.data, other.scale_inv, E2M1, scope).double() * other.amax / arithmetic.TWO_LEVEL_MAX
    return dy.double() @ low.t()[: dy.shape[1]]


def decibels(exact: Tensor, low: Tensor) -> float:
    return 10 * math.log10(exact.square().sum() / (low - exact).square().sum())


if __name__ == "__main__":
    main()
