"""A tiny Llama in transformers' Trainer, in FP8 with delayed scaling; a CPU will do:

    python -m examples.trainer --folder /tmp/run
    python -m examples.trainer --folder /tmp/run --steps 8 --resume

Two lines are ours: `register`, by which Accelerate, and so the Trainer, knows the backend's name, and the callback that
saves the scales with each checkpoint. The recipe, and that nothing reads logits, come from the environment, as the
Trainer passes no options."""

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from te_inductor.integrations.accelerate import register
from te_inductor.integrations.transformers import ScalingStateCallback

register()


def trainer(folder: Path, steps: int, recipe: str = "delayed") -> Trainer:
    """A trainer of random tokens, so that nothing has to be fetched."""
    os.environ.setdefault("TE_INDUCTOR_RECIPE", recipe)
    os.environ.setdefault("TE_INDUCTOR_LOGITS", "omit")  # which the Trainer throws away in training
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    ids = [torch.randint(64, (16,)) for _ in range(32)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        logging_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        torch_compile=True,
        torch_compile_backend="te",
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        report_to=[],
    )
    data = [{"input_ids": one, "labels": one} for one in ids]
    model = LlamaForCausalLM(config)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[ScalingStateCallback()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
    args = parser.parse_args()
    run = trainer(args.folder, args.steps)
    run.train(resume_from_checkpoint=args.resume)
    print(run.evaluate())


if __name__ == "__main__":
    main()
