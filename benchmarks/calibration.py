"""Train small models under calibrated policies beside plain recipes: `python -m benchmarks.calibration`, on CPU.

Eight models, three of them with planted outliers, learn bytes of source text. Errors are measured on the models as they
are; times are those that the size rule expects of the same models `--wide` times as wide, with `--tokens` tokens, on
`--target`, as layers of the small ones would be too small for FP8 to pay. On a GPU the models' own layers pay, and steps
are timed:

    python -m benchmarks.calibration --device cuda --dim 2048 --wide 1 --batch 16 --context 1024 --steps 1000
    python -m benchmarks.calibration --device cuda --dim 2048 --wide 1 --batch 16 --context 1024 --steps 1000 \\
        --models "two layers" "a channel of 100x"

Weights are fp32, on a GPU under autocast in bf16. The folder keeps each policy and what each arm has ended at: the same
command goes on from there, and the last one prints the table of all models that it names. Models may run beside each
other, each on a GPU. The arm "nudged" is "rowwise" from weights that differ in their last digits: how far it ends from
"rowwise" is what a gap of losses has to be compared with.
"""

import copy
import functools
import json
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.table import number, show
from examples.corpus import Corpus, standard_library
from examples.llama import Block, Llama, LlamaConfig
from te_inductor import targets
from te_inductor.api.calibration import Calibration, calibrated, timed
from te_inductor.api.calibration.errors import Batch
from te_inductor.backend import parse

ARMS = ("none", "delayed", "rowwise", "calibrated", "nudged")
LAST = 25  # steps whose mean loss is compared
HELD_OUT = 16  # batches
NUDGE = 2.0**-20  # of each weight, as the standard deviation
TIMED = 0.5  # the share of steps, the last ones, whose median time counts
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
    parser = harness.arguments(__doc__, device="cpu", steps=200, batch=4, context=64, dim=128)
    parser.add_argument("--wide", type=int, default=32, help="how many times as wide the timed model is")
    parser.add_argument("--tokens", type=int, help="of the timed step (default: of a step, or 16384 where it is wider)")
    parser.add_argument("--target", default="h100", help="the device of the expected times, such as h200")
    parser.add_argument("--budget", type=float, default=1.03)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--folder", type=Path, default=Path("out/calibration"))
    args = parser.parse_args(argv)
    if args.tokens is None:
        args.tokens = args.batch * args.context if args.wide == 1 else 16384
    args.folder.mkdir(parents=True, exist_ok=True)
    corpus, found = standard_library(), {}
    for name in args.models:
        begin = time.monotonic()
        found[name] = results(name, args, corpus)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    sizes = f"{args.steps} steps of {args.batch} x {args.context} bytes, dim {args.dim}"
    title = f"{_device(args)}, torch {torch.__version__}, {sizes}"
    heads = ["model", "arm", f"loss, last {LAST}", "held out", "over rowwise's", "step ms", "over delayed's"]
    heads += ["expected", "high GEMMs", "rank correlation"]
    rows = [row for name, arms in found.items() for row in rows_of(name, arms)]
    show(f"{title}; times expected on {args.target}", heads, rows, summary(found))


def _device(args: Any) -> str:
    return torch.cuda.get_device_name() if args.device == "cuda" else str(args.device)


def results(name: str, args: Any, corpus: Corpus) -> dict[str, dict[str, Any]]:
    """What each arm of a model ends at, as kept in the folder or trained for it."""
    settings = {key: value for key, value in vars(args).items() if key not in ("models", "arms", "folder")}
    stem, found = name.replace(" ", "_").replace(",", ""), {}
    setup = functools.cache(lambda: _Setup(name, args, corpus))
    for arm in args.arms:
        path = args.folder / f"{stem}-{arm}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("settings") != settings:
            result = setup().result(arm, args.folder / f"{stem}-policy.json")
            kept = {"settings": settings, "device": _device(args), "torch": torch.__version__} | result
            path.write_text(json.dumps(kept, indent=1))
            print(f"{name}, {arm}: {kept['loss']:.4f}, held out {fmean(kept['held_out']):.4f}", flush=True)
        found[arm] = kept
    return found


class _Setup:
    """A model before its first step, and what it learns."""

    def __init__(self, name: str, args: Any, corpus: Corpus) -> None:
        self.args, case = args, CASES[name]
        config = LlamaConfig(dim=args.dim, hidden=args.dim * 3, layers=2, context=args.context)
        self.config = replace(config, **case.change)
        self.seed = zlib.crc32(name.encode()) % 1000
        torch.manual_seed(self.seed)
        self.model = Llama(self.config)
        case.plant(self.model)
        self.model.to(args.device)
        self.train, self.held_out = (
            corpus.batches(split, steps=steps, batch=args.batch, context=args.context, seed=self.seed).to(args.device)
            for split, steps in (("train", args.steps), ("validation", HELD_OUT))
        )

    def result(self, arm: str, policy: Path) -> dict[str, Any]:
        """Trains an arm. Returns its loss, held-out losses, milliseconds, and, of the calibrated one, what its policy
        promised."""
        options: dict[str, Any] = {"policy": {"*": "rowwise" if arm == "nudged" else arm}}
        promised: dict[str, Any] = {}
        if arm == "calibrated":
            with precision_of(self.args):
                calibration = calibrate(self.model, self.train[:4], self.config, self.args)
            calibration.save(policy)
            print(calibration.table(columns=180), flush=True)
            options, promised = {"policy": calibration}, promises(calibration)
        model = copy.deepcopy(self.model)
        if arm == "nudged":
            nudge(model, self.seed)
        losses, milliseconds = train(model, self.train, {**options, "fallback": "silent"}, self.args)
        with torch.no_grad(), precision_of(self.args):
            held_out = torch.stack([_Learner(model)(batch) for batch in self.held_out]).tolist()
        return {"loss": fmean(losses[-LAST:]), "held_out": held_out, "ms": milliseconds, "losses": losses} | promised


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    """Changes each weight by about a millionth of itself."""
    torch.manual_seed(seed + 1)
    for parameter in model.parameters():
        parameter.mul_(1 + NUDGE * torch.randn_like(parameter))


def promises(calibration: Calibration) -> dict[str, Any]:
    chosen = [calibration.chosen(layer) for layer in calibration.layers]
    high = sum(name == "high_precision" for gemms in chosen for name in gemms.values()) / max(1, 3 * len(chosen))
    expected = calibration.step_s / delayed_s(calibration)
    return {"expected": expected, "high": high, "rank_correlation": calibration.rank_correlation}


def rows_of(name: str, arms: Mapping[str, Mapping[str, Any]]) -> list[list[str | None]]:
    """A row for each arm of a model."""
    rows: list[list[str | None]] = []
    for arm, found in arms.items():
        gap, error = gap_of(found, arms.get("rowwise"))
        delayed, correlation = arms.get("delayed", {}).get("ms"), found.get("rank_correlation")
        promised = (f"{found['expected']:.3f}", f"{found['high']:.0%}") if "expected" in found else (None, None)
        rows.append(
            [
                *("" if rows else name, arm, f"{found['loss']:.4f}", f"{fmean(found['held_out']):.4f}"),
                None if arm == "rowwise" or error is None else f"{gap:+.4f} ± {error:.4f}",
                *(f"{found['ms']:.2f}", None if delayed is None else f"{found['ms'] / delayed:.3f}"),
                *(*promised, number(correlation)),
            ]
        )
    return rows


def gap_of(found: Mapping[str, Any], to: Mapping[str, Any] | None) -> tuple[float, float | None]:
    """How far held-out losses lie above others of the same batches, and the standard error of that."""
    if to is None:
        return math.nan, None
    gaps = [one - other for one, other in zip(found["held_out"], to["held_out"], strict=True)]
    return fmean(gaps), stdev(gaps) / math.sqrt(len(gaps))


def summary(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """How often calibrated models end no worse than rowwise ones, beside how far equal runs end apart."""
    gaps = {
        arm: [gap_of(arms[arm], arms["rowwise"])[0] for arms in found.values() if arm in arms and "rowwise" in arms]
        for arm in ("calibrated", "nudged")
    }
    if not gaps["nudged"]:
        return ""
    apart, last = math.sqrt(fmean(gap**2 for gap in gaps["nudged"])), gaps["calibrated"]
    good = sum(gap <= 2 * apart for gap in last)
    return (
        f"Runs that should be equal end {apart:.4f} apart (root mean square of nudged's gaps). Calibrated models end at most"
        f" twice that above rowwise ones in {good} of {len(last)}."
    )


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


def precision_of(args: Any) -> AbstractContextManager[Any]:
    """Autocast where FP8 would be worth it."""
    return torch.autocast("cuda", torch.bfloat16, enabled=args.device == "cuda")


def train(model: Llama, windows: Tensor, options: dict[str, Any], args: Any) -> tuple[list[float], float]:
    """The losses of all steps, and the median milliseconds of the last ones, optimizer included."""
    torch.compiler.reset()
    learner = _Learner(model)
    compiled = torch.compile(learner, backend="te", options=options)
    rate = 1e-3 * min(1.0, math.sqrt(128 / args.dim))
    optimizer = torch.optim.AdamW(learner.parameters(), rate, betas=(0.9, 0.95), fused=args.device == "cuda")
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_warm, max(20, args.steps // 20)))
    losses, clock = [], _Clock(args.device)
    for tokens in windows:
        clock.tick()
        with precision_of(args):
            loss = compiled(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm.step()
        losses.append(loss.detach())
    clock.tick()
    return torch.stack(losses).tolist(), clock.median_ms()


class _Clock:
    """The times of steps, on a GPU by its own clock, so that the host never waits."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.ticks: list[Any] = []

    def tick(self) -> None:
        """A step begins, or the last one has ended."""
        if self.cuda:
            self.ticks.append(torch.cuda.Event(enable_timing=True))
            self.ticks[-1].record()
        else:
            self.ticks.append(time.perf_counter())

    def median_ms(self) -> float:
        pairs = list(pairwise(self.ticks))[-max(1, int(TIMED * (len(self.ticks) - 1))) :]
        if self.cuda:
            torch.cuda.synchronize()
            return median(one.elapsed_time(other) for one, other in pairs)
        return 1e3 * median(other - one for one, other in pairs)


def _warm(steps: int, step: int) -> float:
    return min(1.0, (step + 1) / steps)


if __name__ == "__main__":
    main()
