"""A Llama in transformers' Trainer, in FP8 with delayed scaling, on text: evaluation, checkpoints, a run that goes on
from one, and adapters on a base that is stored in FP8. A CPU will do:

    python -m examples.trainer --folder /tmp/run
    python -m examples.trainer --folder /tmp/run --resume /tmp/run/checkpoint-4
    python -m examples.trainer --folder /tmp/adapters --base rowwise --adapters 16

On a GPU add `--shape 1b --layers 4`, and `--text FILE` for text of your own. The model, its tokenizer and its weights
are made on the spot.

Two lines are ours: `register`, by which Accelerate, and so the Trainer, knows the backend's name, and the callback that
saves the scales with each checkpoint. The recipe, and that nothing reads logits, come from the environment, as the
Trainer passes no options."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import te_inductor
from examples.shapes import SHAPES, llama
from examples.text import END, prepare
from te_inductor.integrations.accelerate import register
from te_inductor.integrations.transformers import ScalingStateCallback

register()


def windows(tokens: Tensor, context: int, limit: int) -> list[dict[str, Tensor]]:
    """Examples of the Trainer: the text cut into pieces, at most `limit`."""
    pieces = tokens[: len(tokens) // context * context].view(-1, context)[:limit].long()
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def trainer(
    folder: Path,
    steps: int,
    recipe: str = "delayed",
    *,
    text: Sequence[Path] = (),
    shape: str = "tiny",
    layers: int | None = None,
    context: int = 64,
    batch: int = 4,
    base: str | None = None,  # recipe that the weights are stored by
    adapters: int | None = None,  # their rank
) -> Trainer:
    """A Trainer of a new model. Weights that are stored are not trained: give them adapters."""
    os.environ.setdefault("TE_INDUCTOR_RECIPE", recipe)
    os.environ.setdefault("TE_INDUCTOR_LOGITS", "omit")  # which the Trainer throws away in training
    vocabulary, megabytes = (1024, 2) if shape == "tiny" else (8192, 16)
    prepared = prepare(folder / "text", roots=text, vocabulary=vocabulary, megabytes=megabytes)
    words = PreTrainedTokenizerFast(tokenizer_object=prepared.tokenizer, eos_token=END, pad_token=END)
    gpu = torch.cuda.is_available()
    model: Any = llama(
        shape, len(words), layers=layers, device="cuda" if gpu else "cpu", max_position_embeddings=context
    )
    if base is not None:
        model = te_inductor.quantize_(model.requires_grad_(False), base, policy={"lm_head": "none"})
    if adapters is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=adapters, target_modules="all-linear", task_type="CAUSAL_LM"))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=max(1, steps // 2),
        eval_strategy="steps",
        eval_steps=max(1, steps // 2),
        logging_steps=1,
        learning_rate=1e-3 if shape == "tiny" or adapters else 3e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2,
        torch_compile=True,
        torch_compile_backend="te",
        use_cpu=not gpu,
        bf16=gpu,
        disable_tqdm=True,
        report_to=[],
    )
    train, held_out = windows(prepared.train, context, 4000), windows(prepared.held_out, context, 4 * batch)
    return Trainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=words,
        callbacks=[ScalingStateCallback()],
    )


def losses(run: Trainer) -> list[float]:
    """The losses of each step, those before a checkpoint that the run went on from included."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints, and of the model in the end")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument(
        "--text", type=Path, nargs="*", default=(), help="files and folders (default: what is installed)"
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences at a time; two times so many are a step")
    parser.add_argument("--base", help="recipe to store the weights by, such as rowwise")
    parser.add_argument("--adapters", type=int, help="rank of adapters (peft)")
    args = vars(parser.parse_args())
    resume = args.pop("resume")
    run = trainer(**args)
    run.train(resume_from_checkpoint=None if resume is None else str(resume))
    print(f"{len(te_inductor.state_dict(run.model))} tensors of scaling state")
    print("held-out loss", run.evaluate()["eval_loss"])
    print(losses(run))
    run.save_model(str(args["folder"] / "model"))


if __name__ == "__main__":
    main()
