"""Reinforcement learning with TRL's GRPOTrainer, where rollouts and training are one model under one recipe; a CPU will
do:

    python -m examples.grpo --folder /tmp/run
    python -m examples.grpo --folder /tmp/run --recipe bf16

A Llama learns to sort digits: a prompt is `sort 3 1 4 2 =`, and a program rewards each digit that is in its place. The
weights are random, so that some steps of plain training come first, until some answers are right.

Blocks are compiled in place, so that TRL's `generate`, with a cache of constant size, and its training step run the
same ones. For each step it prints the reward, how far the log-probabilities of tokens are from rollout to training, and
the seconds of both."""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.shapes import SHAPES, llama

WORDS = "<pad> <end> sort = 0 1 2 3 4 5 6 7 8 9".split()
DIGITS = 4  # of a prompt
LENGTH = DIGITS + 1  # tokens of an answer, its end included


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, so that nothing has to be fetched."""
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left")


def prompts(count: int, seed: int) -> list[str]:
    """Digits to sort."""
    choose = random.Random(seed)
    return [f"sort {' '.join(str(choose.randrange(10)) for _ in range(DIGITS))} =" for _ in range(count)]


def answer(prompt: str) -> list[str]:
    return sorted(prompt.split()[1:-1])


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of digits that are in their place; an answer that is too long or too short loses a half."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted, given = answer(prompt), completion.split()
        right = sum(one == other for one, other in zip(wanted, given, strict=False)) / DIGITS
        found.append(right if len(given) == DIGITS else right / 2)
    return found


class Rollouts:
    """Stands in the place of a model's `generate`, and keeps the log-probabilities of what it has sampled."""

    def __init__(self, model: Any) -> None:
        self.generate, self.end = model.generate, model.config.eos_token_id
        self.kept: dict[tuple[int, ...], Tensor] = {}  # by tokens of prompt and answer
        self.seconds = 0.0

    def __call__(self, *args: Any, **given: Any) -> Tensor:
        begin = time.perf_counter()
        found = self.generate(*args, **given, return_dict_in_generate=True, output_logits=True)
        sequences: Tensor = found.sequences
        logits = torch.stack(found.logits, 1).float()  # (B, T, V), before any change by a sampler
        sampled = sequences[:, -logits.shape[1] :]
        logs = logits.log_softmax(-1).gather(-1, sampled[..., None])[..., 0].cpu()
        start, rows = sequences.shape[1] - logits.shape[1], sequences.tolist()
        ends = [row.index(self.end, start) + 1 if self.end in row[start:] else len(row) for row in rows]
        self.kept = {tuple(row[:end]): log[: end - start] for row, end, log in zip(rows, ends, logs, strict=True)}
        self.seconds = time.perf_counter() - begin  # reading the tokens has waited for the device
        return sequences


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's, which compares the log-probabilities that it trains on with those that were sampled."""

    rollouts: Rollouts
    apart: Tensor = torch.zeros(1)  # of each token of the last step

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **given: Any
    ) -> Any:
        found = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **given)
        apart = []
        for tokens, mask, logs in zip(input_ids, attention_mask.bool(), found[0].detach().float().cpu(), strict=True):
            sampled = self.rollouts.kept[tuple(tokens[mask].tolist())]
            apart.append((logs[: len(sampled)] - sampled).abs())
        self.apart = torch.cat(apart)
        return found


class Report(TrainerCallback):  # type: ignore[misc]
    """A line a step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.begin = trainer, 0.0
        self.lines: list[dict[str, float]] = []

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
        self.lines.append(line)
        print("  ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)


def warm_up(model: Any, words: PreTrainedTokenizerFast, steps: int, rate: float) -> float:
    """Plain training on right answers, and its last loss."""
    optimizer, value = torch.optim.AdamW(model.parameters(), lr=rate), torch.zeros(())
    for step in range(steps):
        texts = [f"{prompt} {' '.join(answer(prompt))} <end>" for prompt in prompts(64, 1000 + step)]
        tokens = words(texts, return_tensors="pt").input_ids.to(model.device)
        logits = model(tokens, use_cache=False).logits[:, -LENGTH - 1 : -1].float()
        value = F.cross_entropy(logits.flatten(0, 1), tokens[:, -LENGTH:].flatten())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return value.item()


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the steps' figures")
    parser.add_argument("--recipe", default="current", help="bf16 is Inductor's (default: current)")
    parser.add_argument("--options", type=json.loads, default={}, help="further compile options, as JSON")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=100, help="steps of plain training before")
    parser.add_argument("--batch", type=int, default=64, help="answers of a step, eight of each prompt")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    args = parser.parse_args(argv)
    gpu, words = torch.cuda.is_available(), tokenizer()
    model: Any = llama(
        args.shape,
        len(words) if args.shape == "tiny" else 151936,
        layers=args.layers,
        device="cuda" if gpu else "cpu",
        dtype=torch.bfloat16 if gpu else torch.float32,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        bos_token_id=None,
    )
    print(f"loss behind the warm-up: {warm_up(model, words, args.warm_up, args.rate):.3f}", flush=True)
    how: dict[str, Any] = {"backend": "inductor"}
    if args.recipe != "bf16":
        how = {"backend": "te", "options": {"recipe": args.recipe} | args.options}
    for block in model.model.layers:
        block.compile(**how)
    model.generate = rollouts = Rollouts(model)
    settings = GRPOConfig(
        output_dir=str(args.folder),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        num_generations=8,
        max_completion_length=LENGTH,
        learning_rate=args.rate / 10,
        lr_scheduler_type="constant",
        cache_implementation="static",
        logging_steps=1,
        save_strategy="no",
        use_cpu=not gpu,
        bf16=gpu,
        gradient_checkpointing=False,
        disable_tqdm=True,
        report_to=[],
    )
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts(4096, 0)])
    trainer = Trainer(model, reward, settings, train_dataset=data, processing_class=words)
    trainer.rollouts = rollouts
    report = Report(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(report)
    trainer.train()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / f"grpo-{args.recipe}.json").write_text(json.dumps(report.lines))
    first, last = (sum(line["reward"] for line in part) / len(part) for part in (report.lines[:5], report.lines[-5:]))
    ratio = torch.tensor([line["mean_apart"] for line in report.lines]).mean().exp().item()
    print(
        f"reward {first:.3f} to {last:.3f} (means of five steps), tokens' probabilities apart by {ratio:.4f} on average"
    )
    return report.lines


if __name__ == "__main__":
    main()
