"""Train small models under calibrated policies beside plain recipes: `python -m benchmarks.calibration`, on CPU.

Eight models, three of them with planted outliers, learn bytes of source text. Errors are measured on the models as they
are; times are those that the size rule expects of the same models `--wide` times as wide, with `--tokens` tokens, on
`--target`, as layers of the small ones would be too small for FP8 to pay. On a GPU, `--dim 2048 --wide 1` trains models
whose own layers pay, by their own times.
"""

import argparse
import copy
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.table import show
from examples.corpus import Corpus, standard_library
from examples.llama import Block, Llama, LlamaConfig
from te_inductor import targets
from te_inductor.api.calibration import Calibration, calibrated, timed
from te_inductor.api.calibration.errors import Batch
from te_inductor.backend import parse

ARMS = ("none", "delayed", "rowwise", "calibrated")
LAST = 25  # steps whose mean loss is compared
CHANNEL, MASSIVE = 100.0, 3e4


@dataclass(frozen=True)
class Case:
    """A model and what is planted in it."""

    change: Mapping[str, Any] = field(default_factory=dict)  # of the configuration
    plant: Callable[[Llama], None] = lambda model: None


def blocks_of(model: Llama) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def plant_channel(model: Llama) -> None:
    """One channel of each norm is 100 times as large, and the layers behind it take that back."""
    for block in blocks_of(model):
        for norm, layers in (
            (block.attention_norm, (block.attention.q, block.attention.k, block.attention.v)),
            (block.mlp_norm, (block.mlp.gate, block.mlp.up)),
        ):
            with torch.no_grad():
                norm.weight[7] *= CHANNEL
                for layer in layers:
                    layer.weight[:, 7] /= CHANNEL


def plant_dead_layer(model: Llama) -> None:
    """The MLP of the second block has no output and no gradient."""
    for layer in (blocks_of(model)[1].mlp.gate, blocks_of(model)[1].mlp.down):
        nn.init.zeros_(layer.weight)


def plant_first_token(model: Llama) -> None:
    """Two channels of the first token are massive in front of each MLP's last layer, and do not reach its output."""
    for block in blocks_of(model):
        with torch.no_grad():
            block.mlp.down.weight[:, :2] /= MASSIVE
        block.mlp.down.register_forward_pre_hook(_raise_first_token)


def _raise_first_token(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    [x] = inputs
    first = torch.zeros_like(x)
    first[:, 0, :2] = MASSIVE
    return (x + first,)


CASES = {
    "two layers": Case(),
    "another seed": Case(),
    "three layers": Case({"layers": 3}),
    "tied, grouped queries": Case({"tied": True, "kv_heads": 2}),
    "biases": Case({"bias": True}),
    "a channel of 100x": Case(plant=plant_channel),
    "a dead layer": Case(plant=plant_dead_layer),
    "a massive first token": Case(plant=plant_first_token),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--wide", type=int, default=32, help="how many times as wide the timed model is")
    parser.add_argument("--tokens", type=int, default=16384, help="of the timed step")
    parser.add_argument("--target", default="h100")
    parser.add_argument("--budget", type=float, default=1.03)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args(argv)
    corpus, rows = standard_library(), []
    for name in args.models:
        rows.append(row(name, args, corpus))
        print(" | ".join(rows[-1]), flush=True)
    heads = [
        "model",
        *(f"loss, {arm}" for arm in ARMS),
        "step/fastest",
        "step/delayed",
        "high GEMMs",
        "rank correlation",
    ]
    sizes = f"{args.steps} steps of {args.batch} x {args.context} bytes, dim {args.dim}"
    title = f"torch {torch.__version__}, {args.device}, {sizes}"
    show(f"{title}; mean loss of the last {LAST} steps, times expected on {args.target}", heads, rows)


def row(name: str, args: Any, corpus: Corpus) -> list[str]:
    """What one model's arms end at."""
    case = CASES[name]
    config = LlamaConfig(dim=args.dim, hidden=args.dim * 3, layers=2, context=args.context)
    config = replace(config, **case.change)
    seed = zlib.crc32(name.encode()) % 1000
    torch.manual_seed(seed)
    model = Llama(config)
    case.plant(model)
    model.to(args.device)
    windows = corpus.batches("train", steps=args.steps, batch=args.batch, context=args.context, seed=seed)
    windows = windows.to(args.device)
    calibration = calibrate(model, windows[:4], config, args)
    print(calibration.table(columns=180), flush=True)
    found = {}
    for arm in ARMS:
        options: dict[str, Any] = {"policy": calibration} if arm == "calibrated" else {"policy": {"*": arm}}
        found[arm] = train(copy.deepcopy(model), windows, {**options, "fallback": "silent"})
        print(f"{name}, {arm}: {found[arm]:.4f}", flush=True)
    chosen = [calibration.chosen(layer) for layer in calibration.layers]
    high = sum(name == "high_precision" for gemms in chosen for name in gemms.values()) / (3 * len(chosen))
    correlation = calibration.rank_correlation
    return [
        name,
        *(f"{found[arm]:.4f}" for arm in ARMS),
        f"{calibration.step_s / calibration.fastest_s:.3f}",
        f"{calibration.step_s / delayed_s(calibration):.3f}",
        f"{high:.0%}",
        "-" if correlation is None else f"{correlation:.2f}",
    ]


def calibrate(model: Llama, windows: Tensor, config: LlamaConfig, args: Any) -> Calibration:
    """The policy of a model, by the times of a wide one whose layers have the same names."""
    options, there = parse(None, {"fallback": "silent"}), targets.by_name(args.target)
    wide = replace(config, dim=config.dim * args.wide, hidden=config.hidden * args.wide, vocab=config.vocab * args.wide)
    with torch.device("meta"):
        twin = _Learner(Llama(replace(wide, context=args.context)).bfloat16())
        tokens = torch.zeros(args.tokens // args.context, args.context + 1, dtype=torch.long)
    graphs = timed(twin, ((tokens,), {}), options, there)
    batches: list[Batch] = [((window,), {}) for window in windows]
    return calibrated(_Learner(model), batches, graphs, args.budget, there.product, None, options, check=True)


def delayed_s(calibration: Calibration) -> float:
    """Seconds of a step whose layers are all `delayed`, or in high precision where the size rule leaves them."""
    units = {layer.beside: layer.time_s for layer in calibration.layers}
    more = sum(times.get("delayed", times["none"]) - times["chosen"] for times in units.values())
    return calibration.step_s + more


class _Learner(nn.Module):
    """A model and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(model: Llama, windows: Tensor, options: dict[str, Any]) -> float:
    """The mean loss of the last steps."""
    torch.compiler.reset()
    learner = _Learner(model)
    compiled = torch.compile(learner, backend="te", options=options)
    optimizer = torch.optim.AdamW(learner.parameters(), 1e-3, betas=(0.9, 0.95))
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_warm, 20))
    losses = []
    for tokens in windows:
        loss = compiled(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm.step()
        losses.append(loss.detach())
    return fmean(torch.stack(losses[-LAST:]).tolist())


def _warm(steps: int, step: int) -> float:
    return min(1.0, (step + 1) / steps)


if __name__ == "__main__":
    main()
