"""Reinforcement learning with TRL's GRPOTrainer, where rollouts and training are one model; a CPU will do:

    python -m examples.grpo --folder /tmp/run
    python -m examples.grpo --folder /tmp/run --arm fp8-exact --picture /tmp/run/grpo.png
    python -m examples.grpo --folder /tmp/run --arm fp8 --device cuda --shape 0.6b --seconds 100

A Llama learns to sort digits: a prompt is `sort 3 1 4 2 =`, and a program rewards each digit that is in its place. The
weights are random, so that some steps of plain training come first, until some answers are right.

| arm | training multiplies in | rollouts multiply |
|---|---|---|
| `bf16` | the weights' dtype, by Inductor | the same |
| `fp8` | `current`, by default options | stored weights of `te_inductor.rollout`, which follow the step |
| `fp8-exact` | `rowwise` with `batch_invariant` | in the same module: the same numbers, bit for bit |
| `nvfp4-qat` | `nvfp4_weight_only`: weights as they will be stored | stored weights of `te_inductor.rollout` |

Each arm writes a line a step to its own file. A run that `--seconds` stops goes on by the same command. The table at
the end, and the picture, are of all arms that the folder has: rewards, how far log-probabilities of tokens are from
rollout to training, and the seconds of both."""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import te_inductor
from examples.grpo_table import show
from examples.rollouts import Sampler
from examples.shapes import SHAPES, llama

WORDS = "<pad> <end> sort = 0 1 2 3 4 5 6 7 8 9".split()


@dataclass(frozen=True)
class Arm:
    """How a model trains and generates."""

    options: dict[str, Any] | None  # of the backend; without, Inductor compiles
    stored: str | None = None  # recipe of the view that generates; without, the model itself does


ARMS = {
    "bf16": Arm(None),
    "fp8": Arm({"recipe": "current"}, "current"),
    "fp8-exact": Arm({"recipe": "rowwise", "batch_invariant": True}),
    "nvfp4-qat": Arm({"recipe": "nvfp4_weight_only"}, "nvfp4_weight_only"),
}


@dataclass(frozen=True)
class Plan:
    """What a run is; one that goes on has to be the same."""

    arm: str
    shape: str = "tiny"
    layers: int | None = None  # all of the shape's
    device: str = "cpu"
    digits: int = 4  # of a prompt
    batch: int = 64  # answers of a step, eight of each prompt
    steps: int = 60
    warm_up: int = 150  # steps of plain training before
    warm_rate: float = 1e-3
    rate: float = 1e-4
    seed: int = 0

    @property
    def prompt(self) -> int:  # tokens
        return self.digits + 2

    @property
    def answer(self) -> int:  # tokens, the end included
        return self.digits + 1


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, so that nothing has to be fetched."""
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left")


def prompts(count: int, digits: int, seed: int) -> list[str]:
    """Digits to sort."""
    choose = random.Random(seed)
    return [f"sort {' '.join(str(choose.randrange(10)) for _ in range(digits))} =" for _ in range(count)]


def answer(prompt: str) -> list[str]:
    return sorted(prompt.split()[1:-1])


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of digits that are in their place; an answer that is too long or too short loses a half."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted, given = answer(prompt), completion.split()
        right = sum(one == other for one, other in zip(wanted, given, strict=False)) / len(wanted)
        found.append(right if len(given) == len(wanted) else right / 2)
    return found


def warm_up(model: Any, words: PreTrainedTokenizerFast, plan: Plan, kept: Path) -> None:
    """Plain training on right answers, in the weights' dtype, which arms of one plan share by a file."""
    if kept.exists():
        model.load_state_dict(torch.load(kept, weights_only=True))
        return
    optimizer, value = torch.optim.AdamW(model.parameters(), lr=plan.warm_rate, fused=True), torch.zeros(())
    for step in range(plan.warm_up):
        for group in optimizer.param_groups:
            group["lr"] = plan.warm_rate * min(1, (step + 1) / 20)
        texts = [f"{one} {' '.join(answer(one))} <end>" for one in prompts(plan.batch, plan.digits, 1000 + step)]
        tokens = words(texts, return_tensors="pt").input_ids.to(model.device)
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, -plan.answer - 1 : -1]).float()
        value = F.cross_entropy(logits.flatten(0, 1), tokens[:, -plan.answer :].flatten())
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss behind the warm-up: {value.item():.3f}", flush=True)
    torch.save(model.state_dict(), kept)


def compile_(model: Any, options: dict[str, Any] | None) -> None:
    """Compiles what both rollout and training run: blocks, which share their graphs, the last norm and the head, which
    stays in high precision."""
    how: dict[str, Any] = {"backend": "inductor", "dynamic": False}
    high = how
    if options is not None:
        how = {"backend": "te", "options": {**options, "policy": {"*": options["recipe"]}}, "dynamic": False}
        high = {"backend": "te", "options": {**options, "recipe": "none"}, "dynamic": False}
    for layer in model.model.layers:
        layer.compile(**how)
    model.model.norm.compile(**high)
    head = model.lm_head

    def logits(x: Tensor) -> Tensor:
        return F.linear(x, head.weight)

    head.forward = torch.compile(
        logits, **high
    )  # torch leaves the code of nn.Linear as it is, also where it is compiled


class Rollouts:
    """Stands in the place of a model's `generate`, and keeps the log-probabilities of what it has sampled."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.tokens, self.logs, self.seconds = torch.empty(0), torch.empty(0), 0.0

    def __call__(self, input_ids: Tensor, **_: Any) -> Tensor:
        begin = time.perf_counter()
        self.tokens, self.logs = self.sampler(input_ids)
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - begin
        return self.tokens


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's, which scores tokens by the parts that rollouts run, in one shape whatever the answers' length, and compares
    the log-probabilities that it trains on with those that were sampled."""

    rollouts: Rollouts
    apart: Tensor = torch.zeros(1)  # of each token of the last step

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> Any:
        sampled, answers = self.rollouts.logs, self.rollouts.logs.shape[1]
        prompt = input_ids.shape[1] - logits_to_keep
        # Padding stands behind what counts, where no causal attention sees it.
        tokens = F.pad(input_ids, (0, answers - logits_to_keep), value=self.processing_class.pad_token_id)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        every = model.lm_head(hidden[:, prompt - 1 : -1]).float().log_softmax(-1)
        logs = every.gather(-1, tokens[:, prompt:, None])[..., 0]
        more = answers - logits_to_keep
        counts = F.pad(attention_mask, (0, more)).bool()
        with torch.no_grad():
            entropies = -(every.exp() * every).sum(-1)
            # TRL has shuffled what was sampled; its tokens say which answer each is.
            which = ((self.rollouts.tokens[:, None] == tokens) | ~counts).all(-1).int().argmax(0)
            self.apart = (logs - sampled[which]).abs()[counts[:, prompt:]].cpu()
        return logs[:, :logits_to_keep], entropies[:, :logits_to_keep], None


class Report(TrainerCallback):  # type: ignore[misc]
    """Writes a line a step, and stops a run whose time is over, which a checkpoint lets go on."""

    def __init__(self, trainer: Trainer, log: Path, end: float | None) -> None:
        self.trainer, self.log, self.end, self.begin = trainer, log, end, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" not in logs:
            return
        apart, rollout = self.trainer.apart, self.trainer.rollouts.seconds
        line = {
            "step": state.global_step,
            "reward": logs["reward"],
            "mean_apart": apart.mean().item(),
            "max_apart": apart.max().item(),
            "rollout_s": rollout,
            "training_s": time.perf_counter() - self.begin - rollout,
        }
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print("  ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.end is not None and time.perf_counter() > self.end and state.global_step < state.max_steps:
            control.should_training_stop = control.should_save = True


def resumed(log: Path, checkpoints: Path, plan: Plan) -> tuple[bool, Path | None]:
    """Whether a run is at its end, and the checkpoint that it goes on from. Its log is cut there, or begun."""
    lines = log.read_text().splitlines() if log.exists() else []
    header = json.dumps({"plan": asdict(plan)})
    if lines and lines[0] != header:
        raise ValueError(f"{log} is of {lines[0]}, expected {header}; name another --folder")
    if len(lines) > plan.steps:
        return True, None
    found = {int(path.name.rsplit("-")[-1]): path for path in checkpoints.glob("checkpoint-*")}
    last = max(found, default=0)
    log.write_text("\n".join([header, *lines[1 : last + 1], ""]))
    return False, found.get(last)


def train(plan: Plan, folder: Path, end: float | None) -> None:
    """Runs an arm, to the end or as far as time lets it."""
    torch._dynamo.reset()
    log, checkpoints = folder / f"{plan.arm}.jsonl", folder / f"checkpoints-{plan.arm}"
    done, checkpoint = resumed(log, checkpoints, plan)
    if done:
        print(f"{plan.arm} has all of its {plan.steps} steps", flush=True)
        return
    words, arm, gpu = tokenizer(), ARMS[plan.arm], plan.device == "cuda"
    model: Any = llama(
        plan.shape,
        len(words) if plan.shape == "tiny" else 151936,
        layers=plan.layers,
        device=plan.device,
        dtype=torch.bfloat16 if gpu else torch.float32,
        seed=plan.seed,
        tie_word_embeddings=plan.shape != "tiny",
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        bos_token_id=None,
    )
    warm_up(model, words, plan, folder / f"warm-{plan.shape}-{plan.layers}-{plan.digits}-{plan.warm_up}.pt")
    generating = model
    if arm.stored is not None:
        generating = te_inductor.rollout(model, arm.stored, policy={"lm_head": "none"})
        compile_(generating, {"recipe": "none"})
    compile_(model, arm.options)
    model.generate = rollouts = Rollouts(Sampler(generating, plan.batch, plan.prompt, plan.answer))
    settings = GRPOConfig(
        output_dir=str(checkpoints),
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch,
        num_generations=8,
        max_completion_length=plan.answer,
        learning_rate=plan.rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        use_cpu=not gpu,
        bf16=False,  # weights have their dtype, and rollouts run without autocast
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to=[],
        seed=plan.seed,
    )
    # The fingerprint is given, as datasets would find one by pickling modules.
    asked = pyarrow.table({"prompt": prompts(plan.batch // 8 * plan.steps, plan.digits, 0)})
    trainer = Trainer(
        model, reward, settings, train_dataset=Dataset(asked, fingerprint="digits"), processing_class=words
    )
    trainer.rollouts = rollouts
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Report(trainer, log, end))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def main(argv: Sequence[str] | None = None) -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the arms' figures")
    parser.add_argument(
        "--arm", choices=ARMS, nargs="*", default=list(ARMS), help="those to run; none: the table alone"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default=Plan.shape)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--digits", type=int, default=Plan.digits, help="of a prompt")
    parser.add_argument("--batch", type=int, default=Plan.batch, help="answers of a step, eight of each prompt")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--warm-up", type=int, default=Plan.warm_up, help="steps of plain training before")
    parser.add_argument("--warm-rate", type=float, default=Plan.warm_rate, help="their learning rate")
    parser.add_argument("--rate", type=float, default=Plan.rate, help="learning rate")
    parser.add_argument(
        "--seconds", type=float, help="after which an arm stops behind a step; it goes on when run again"
    )
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args(argv)
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    args.folder.mkdir(parents=True, exist_ok=True)
    names = ("shape", "layers", "device", "digits", "batch", "steps", "warm_up", "warm_rate", "rate")
    for arm in args.arm:
        end = None if args.seconds is None else began + args.seconds
        train(Plan(arm, **{name: getattr(args, name) for name in names}), args.folder, end)
        began = time.perf_counter()
    show(
        args.folder,
        args.picture,
        f"GRPO, {args.shape}, {args.digits} digits, {args.batch} answers a step, {args.device}",
    )


if __name__ == "__main__":
    main()
