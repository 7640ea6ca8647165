"""What training with the weights that will be stored is worth: held-out perplexity of a Llama stored in NVFP4.

    python -m benchmarks.qat

A Llama learns the demo's corpus, bytes of source files, in bf16. Two arms go on from there, over the same batches at the
same rates: one in bf16, one with the recipe `nvfp4_weight_only`, whose forward multiplies what `quantize_` will store. Both
are then stored by `quantize_`. The share is how much of the perplexity that storing costs the first arm is left in the
second; the asked share is one third.

Weights are fp32, under autocast in bf16 on a GPU. On a CPU, whose defaults are a small model's, all is fp32.
`--seconds` makes a run shorter that would take longer: it measures a step, and scales both numbers of steps.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import te_inductor
from benchmarks import harness, table
from examples.corpus import Corpus, standard_library
from examples.llama import Llama, LlamaConfig, loss

ASKED = 1 / 3
MEASURED = 20  # steps that tell how long one takes
Batches = Callable[[int], Tensor]  # of a step: pieces of the text, (B, T + 1)
SIZES = {  # defaults by device
    "cpu": {"pretrain": 1000, "steps": 300, "width": 64, "layers": 2, "batch": 16, "context": 64, "windows": 512},
    "cuda": {"pretrain": 4000, "steps": 1000, "width": 512, "layers": 6, "batch": 32, "context": 512, "windows": 960},
}


class Trainer:
    """A model with its optimizer, of one arm."""

    def __init__(self, model: nn.Module, args: argparse.Namespace, options: dict[str, Any] | None) -> None:
        self.model, self.run = model, compiled(model, args, options)
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self, pieces: Tensor, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.run(pieces).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, batches: Batches, steps: int, rate: float) -> None:
        for step in range(steps):
            self.step(batches(step), rate * schedule(step, steps))


def scale_of_steps(trainer: Trainer, pieces: Tensor, args: argparse.Namespace, began: float) -> float:
    """The share of all steps that fit in the time, from steps that change nothing."""
    times = list[float]()
    for steps in (1, MEASURED):
        start = time.monotonic()
        for _ in range(steps):
            trainer.step(pieces, 0.0)
        harness.synchronize(args.device)
        times.append(time.monotonic() - start)
    first, step = times[0], times[1] / MEASURED
    # Two more graphs train, and one or two evaluate. QAT casts its weights in each forward.
    left = began + args.seconds - time.monotonic() - 4 * first
    return min(1.0, max(0.0, left) / (step * (args.pretrain + 2.5 * args.steps)))


def schedule(step: int, steps: int) -> float:
    """The share of the rate: a linear warm-up of a twentieth, at most 100 steps, then half a cosine to zero."""
    warm = min(100, max(1, steps // 20))
    return (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def compiled(model: nn.Module, args: argparse.Namespace, options: dict[str, Any] | None) -> Callable[[Tensor], Tensor]:
    """The mean loss of pieces of text, (B, T + 1), in one graph. Without options Inductor compiles."""

    def objective(pieces: Tensor) -> Tensor:
        return loss(model, pieces[:, :-1], pieces[:, 1:])

    given: dict[str, Any] = {} if options is None else {"backend": "te", "options": options}
    run = torch.compile(objective, dynamic=False, **given)

    def call(pieces: Tensor) -> Tensor:
        cuda = args.device.startswith("cuda")
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            return run(pieces)  # type: ignore[no-any-return]

    return call


def held_out(corpus: Corpus, args: argparse.Namespace) -> Sequence[Tensor]:
    """Pieces of the text that no step reads, one behind the other, in batches."""
    pieces = corpus.validation.unfold(0, args.context + 1, args.context)[: args.windows].long().to(args.device)
    return [batch for batch in pieces.split(args.batch) if len(batch) == args.batch]


def windows(text: Tensor, seed: int, args: argparse.Namespace) -> Batches:
    """Random pieces of the text, a batch for each step; the same seed gives the same ones."""
    steps, generator = max(args.pretrain, args.steps), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - args.context, (steps, args.batch, 1), generator=generator).to(args.device)
    offsets = torch.arange(args.context + 1, device=args.device)
    return lambda step: text[starts[step] + offsets].long()


def model_of(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)
    hidden, heads = 32 * round(args.width * 2.75 / 32), max(1, args.width // 64)
    config = LlamaConfig(dim=args.width, layers=args.layers, heads=heads, hidden=hidden, context=args.context)
    return Llama(config).to(args.device)


def measured(args: argparse.Namespace, corpus: Corpus, say: Callable[[str, float], None]) -> dict[str, Any]:
    """The losses of all arms, stored and not, with the numbers of steps."""
    began, text, evaluated = time.monotonic(), corpus.train.to(args.device), held_out(corpus, args)
    recipe = te_inductor.recipes.NVFP4WeightOnly(prefill=args.prefill)
    base, batches = Trainer(model_of(args), args, None), windows(text, args.seed, args)
    scale = scale_of_steps(base, batches(0), args, began)
    pretrain, steps = (max(1, int(scale * count)) for count in (args.pretrain, args.steps))
    parameters = sum(one.numel() for one in base.model.parameters())
    losses, found = {}, {"parameters": parameters, "scale": scale, "pretrain": pretrain, "steps": steps}

    def evaluate(name: str, run: Callable[[Tensor], Tensor]) -> None:
        losses[name] = torch.stack([run(batch).detach() for batch in evaluated]).double().mean().item()
        say(name, losses[name])

    base.train(batches, pretrain, args.rate)
    evaluate("pretrained", base.run)
    qat = Trainer(copy.deepcopy(base.model), args, {"policy": {"*": recipe}})
    qat.optimizer.load_state_dict(copy.deepcopy(base.optimizer.state_dict()))
    for arm, trainer in (("bf16", base), ("QAT", qat)):
        trainer.train(windows(text, args.seed + 1, args), steps, args.tune_rate)
        evaluate(arm, trainer.run)
        stored = te_inductor.quantize_(trainer.model, recipe, fallback="error").requires_grad_(False)
        with torch.no_grad():
            evaluate(f"{arm}, stored", compiled(stored, args, {"recipe": "none"}))
    plain, gap, gap_qat = (math.exp(losses[name]) for name in ("bf16", "bf16, stored", "QAT, stored"))
    gap, gap_qat = gap - plain, gap_qat - plain
    return {**found, "losses": losses, "gap": gap, "gap_qat": gap_qat, "share": gap_qat / gap}


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.arguments(__doc__, "qat", seed=0)
    for name, meaning in {
        "pretrain": "steps in bf16 that both arms go on from",
        "steps": "of each arm",
        "width": "of the model",
        "layers": "of the model",
        "batch": "sequences of a step",
        "context": "bytes of a sequence",
        "windows": "sequences that perplexity is measured over",
    }.items():
        parser.add_argument(f"--{name}", type=int, help=meaning)
    parser.add_argument("--rate", type=float, default=1e-3, help="of pretraining")
    parser.add_argument("--tune-rate", type=float, default=3e-4, help="of both arms")
    parser.add_argument("--prefill", choices=("fp8", "exact"), default="fp8", help="NVFP4WeightOnly's")
    parser.add_argument("--seconds", type=float, default=200, help="that a run takes at most, about")
    args = parser.parse_args(argv)
    for name, default in SIZES["cuda" if args.device.startswith("cuda") else "cpu"].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    environment, rows, began = harness.environment(args.device), list[tuple[str, str, str]](), time.monotonic()

    def say(name: str, value: float) -> None:
        rows.append((name, f"{value:.5f}", f"{math.exp(value):.4f}"))
        print(*rows[-1], f"{time.monotonic() - began:.0f} s", sep=", ", flush=True)

    found = measured(args, standard_library(), say)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    harness.write_json(args.json, {"environment": environment, "settings": settings, "result": found})
    size = f"{found['parameters'] / 1e6:.1f}M parameters, {found['pretrain']} and {found['steps']} steps"
    caption = (
        f"perplexity that storing costs: {found['gap']:.4f} without QAT, {found['gap_qat']:.4f} with it,"
        f" {found['share']:.2f} of it (asked: {ASKED:.2f})"
    )
    table.show(f"Stored in NVFP4, {size}; {table.headline(environment)}", ("arm", "loss", "perplexity"), rows, caption)


if __name__ == "__main__":
    main()
