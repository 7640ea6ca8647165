"""Loss curves of Llamas on real text, a recipe at a time, beside bf16. Runs stop at a time limit and go on later:

    python -m examples.curves --folder out/curves --shape 125m --recipe bf16 --minutes 9
    python -m examples.curves --folder out/curves --shape 125m --recipe bf16 --seed 1 --minutes 9
    python -m examples.curves --folder out/curves --shape 125m --recipe delayed --minutes 9
    python -m examples.curves_table --folder out/curves --shape 125m

Each command trains for that long, or to the end, and says which; the same command goes on from there, bit for bit where
the device's kernels are. The folder keeps the text (examples/text.py; name your own by `--text`), and for each run a
checkpoint and `log.jsonl`: loss, gradient norm and held-out losses. All runs read the
same batches in the same order, and those of a seed start from the same weights, so that they differ in rounding alone.
Two seeds of bf16 say how far apart runs end that should be equal.

Weights are fp32 under autocast in bf16. A policy names the recipe for every layer, whatever the size rule says, so that
a curve is of what its name says. The shape `tiny` is for a CPU."""

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import te_inductor
from examples.experts import Mixture
from examples.llama import Llama, LlamaConfig, loss
from examples.text import Text, prepare

WORDS = 8192
SHAPES = {
    "tiny": LlamaConfig(vocab=WORDS, dim=64, layers=1, heads=2, hidden=128, context=64),
    "125m": LlamaConfig(vocab=WORDS, dim=2048, layers=3, heads=32, kv_heads=8, hidden=3072, context=1024),
    "0.5b": LlamaConfig(vocab=WORDS, dim=2048, layers=8, heads=32, kv_heads=8, hidden=8192, context=1024),
    "tiny-moe": LlamaConfig(vocab=WORDS, dim=64, layers=1, heads=2, hidden=128, context=64),
    "moe": LlamaConfig(vocab=WORDS, dim=2048, layers=4, heads=32, kv_heads=8, hidden=2048, context=1024),
}
EXPERTS, EACH = 8, 2  # of shapes named "moe", whose hidden width is an expert's
RECIPES: dict[str, Any] = {
    "nvfp4-plain": te_inductor.recipes.NVFP4BlockScaling(  # without its aids
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    )
}
EMULATED = ("mxfp8", "mxfp4", "nvfp4", "nvfp4-plain")  # where that is what is asked for, it needs no warning
ROUTERS = "model.blocks.*.mlp.gate"  # of those shapes; elsewhere a layer of the MLP
FLUSH = 50  # steps between two looks at the clock


@dataclass(frozen=True)
class Plan:
    """What a run is; one that goes on has to be the same."""

    shape: str
    recipe: str
    seed: int = 0
    tokens: int = 100_000_000
    batch: int = 16  # sequences of a step
    learning_rate: float = 3e-4
    warmup: int = 200
    evaluate: int = 250  # steps between two evaluations
    held_out: int = 16  # batches of an evaluation
    digest: str = ""  # of the text

    @property
    def config(self) -> LlamaConfig:
        return SHAPES[self.shape]

    @property
    def experts(self) -> bool:
        return self.shape.endswith("moe")

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.config.context))

    def rate(self, step: int) -> float:
        """The learning rate: linear warmup, then half a cosine down to a tenth."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def places(self, step: int, pieces: int) -> Tensor:  # (batch,) int64
        """Which pieces of the text a step reads: each epoch has all of them once, in an order of its own."""
        wanted = torch.arange(step * self.batch, (step + 1) * self.batch)
        return torch.stack([_order(int(place) // pieces, pieces)[place % pieces] for place in wanted])


@lru_cache(maxsize=2)
def _order(epoch: int, pieces: int) -> Tensor:
    return torch.randperm(pieces, generator=torch.Generator().manual_seed(epoch))


class Objective(nn.Module):
    """A model and its loss, so that both are one graph."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config = plan.config
        self.model = Llama(config)
        for block in self.model.blocks if plan.experts else ():
            block.mlp = Experts(config)

    def forward(self, pieces: Tensor) -> Tensor:  # (B, T + 1)
        return loss(self.model, pieces[:, :-1], pieces[:, 1:])


class Experts(Mixture):
    """A mixture for rows of several sequences."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.dim, config.hidden, EXPERTS, EACH)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width)
        return super().forward(x.flatten(0, 1)).view_as(x)


class Run:
    """A run in its folder: model, optimizer, and how far it is."""

    def __init__(self, plan: Plan, folder: Path, text: Text, device: str, options: dict[str, Any]) -> None:
        self.plan, self.folder, self.device = plan, folder, device
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(plan.seed)
        self.objective = Objective(plan).to(device)
        self.optimizer = torch.optim.AdamW(
            self.objective.parameters(), plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.train, self.held_out = (pieces(part, plan.config.context, device) for part in (text.train, text.held_out))
        self.step, self.lines = 0, list[str]()
        self.compiled = self._compile(options)
        if (folder / "checkpoint.pt").exists():
            self._load()

    def _compile(self, options: dict[str, Any]) -> Any:
        plan = self.plan
        if plan.recipe == "bf16":
            return torch.compile(self.objective)
        recipe = RECIPES.get(plan.recipe, plan.recipe)
        fallback = "silent" if plan.recipe in EMULATED else "error"
        routers = {ROUTERS: "none"} if plan.experts else {}
        given = {"policy": routers | {"*": recipe}, "fallback": fallback} | options
        with self._autocast():
            report = te_inductor.explain(self.objective, self.train[: plan.batch], options=given)
        low = sum(site.kernel != "high_precision" for site in report.sites)
        print(f"{low} of {len(report.sites)} GEMMs in low precision, {len(report.fallbacks)} fell back", flush=True)
        return torch.compile(self.objective, backend="te", options=given)

    def _autocast(self) -> Any:
        return torch.autocast(self.device, torch.bfloat16)

    def go_on(self, minutes: float, until: int) -> None:
        """Train up to a step, or for so long; the log and the checkpoint are written at the end, too."""
        end = time.monotonic() + 60 * minutes
        waiting: list[
            tuple[Tensor, Tensor]
        ] = []  # losses and norms that stay on the device until the clock is looked at
        begin, until = time.perf_counter(), min(until, self.plan.steps)
        while self.step < until:
            waiting.append(self._step())
            self.step += 1
            evaluate = self.step % self.plan.evaluate == 0 or self.step == self.plan.steps
            if evaluate or self.step % FLUSH == 0 or self.step == until:
                values = torch.stack([torch.stack(pair) for pair in waiting]).tolist()
                seconds = (time.perf_counter() - begin) / len(values)
                for place, (value, norm) in enumerate(values, self.step - len(values) + 1):
                    self._note(step=place, loss=value, norm=norm, seconds=seconds)
                if evaluate:
                    self._note(step=self.step, held_out=self._evaluate())
                waiting, begin = [], time.perf_counter()
                if not all(math.isfinite(value) for value, _ in values):
                    print(f"step {self.step}: the loss is not finite", flush=True)
                    break
                if time.monotonic() > end:
                    break
        self._save()

    def _step(self) -> tuple[Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(self.step)
        chosen = self.train[self.plan.places(self.step, len(self.train)).to(self.device, non_blocking=True)]
        with self._autocast():
            value = self.compiled(chosen)
        value.backward()
        norm = nn.utils.clip_grad_norm_(self.objective.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.detach().float(), norm

    def _evaluate(self) -> list[float]:
        """Losses of held-out batches, the same in all runs, in the run's own precision."""
        batches = self.held_out.split(self.plan.batch)[: self.plan.held_out]
        with torch.no_grad(), self._autocast():
            found = [self.compiled(batch) for batch in batches if len(batch) == self.plan.batch]
        return torch.stack(found).tolist() if found else []

    def _note(self, **line: Any) -> None:
        self.lines.append(json.dumps(line))

    def _save(self) -> None:
        """The checkpoint, and the log up to it, so that a run that was ended by force repeats what it had not saved."""
        state = {
            "plan": asdict(self.plan),
            "step": self.step,
            "lines": self.lines,
            "model": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scales": te_inductor.state_dict(self.objective),
            "random": torch.get_rng_state(),
            "device_random": torch.cuda.get_rng_state() if self.device == "cuda" else None,
        }
        torch.save(state, self.folder / "checkpoint.new")
        os.replace(self.folder / "checkpoint.new", self.folder / "checkpoint.pt")
        header = json.dumps({"plan": asdict(self.plan)})
        (self.folder / "log.jsonl").write_text("\n".join([header, *self.lines]) + "\n")

    def _load(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", map_location=self.device)
        if state["plan"] != asdict(self.plan):
            other = {key: value for key, value in state["plan"].items() if value != asdict(self.plan)[key]}
            raise ValueError(f"{self.folder} holds a run with {other}, expected {self.plan}; name another folder")
        self.objective.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        te_inductor.load_state_dict(self.objective, state["scales"])
        torch.set_rng_state(state["random"].cpu())
        if state["device_random"] is not None:
            torch.cuda.set_rng_state(state["device_random"].cpu())
        self.step, self.lines = state["step"], state["lines"]


def pieces(tokens: Tensor, context: int, device: str) -> Tensor:  # (n, context + 1) int64
    """The text, cut into sequences; the last token of each is the first of the next."""
    return tokens.unfold(0, context + 1, context).to(device).long()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--recipe", default="bf16", help="bf16 (Inductor's), nvfp4-plain, or a recipe's name")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument(
        "--tokens", type=float, default=100e6, help="of a whole run; the learning rate falls until then"
    )
    parser.add_argument("--until", type=float, help="stop behind so many tokens, of a curve that is not to be whole")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop behind so many, and go on next time")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--text", type=Path, nargs="*", default=(), help="files and folders (default: what is installed)"
    )
    parser.add_argument("--megabytes", type=float, help="of the text (default: all of it)")
    parser.add_argument("--options", type=json.loads, default={}, help="further compile options, as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    text = prepare(args.folder / "text", roots=args.text, vocabulary=WORDS, megabytes=args.megabytes)
    plan = Plan(args.shape, args.recipe, args.seed, int(args.tokens), args.batch, digest=text.digest)
    folder = args.folder / f"{args.shape}-{args.recipe}-{args.seed}"
    run = Run(plan, folder, text, args.device, args.options)
    parameters = sum(parameter.numel() for parameter in run.objective.parameters())
    known = len(text.train)
    print(f"{folder.name}, {parameters / 1e6:.0f}M parameters: step {run.step} of {plan.steps};", flush=True)
    print(f"{known / 1e6:.1f}M tokens of text, read {plan.tokens / known:.2f} times", flush=True)
    until = plan.steps if args.until is None else int(args.until) // (plan.batch * plan.config.context)
    run.go_on(args.minutes - (time.monotonic() - begin) / 60, until)
    last = next((line for line in reversed(run.lines) if "loss" in line), "")
    print(f"step {run.step} of {plan.steps}: {last}, {'whole' if run.step >= until else 'not finished'}", flush=True)


if __name__ == "__main__":
    main()
