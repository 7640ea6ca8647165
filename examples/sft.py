"""LoRA by peft and fine-tuning by TRL's SFTTrainer of a tiny Llama, in FP8 with delayed scaling; a CPU will do:

    python -m examples.sft --folder /tmp/run
    python -m examples.sft --folder /tmp/run --steps 8 --resume

Two lines are ours, as in examples/trainer.py: `register`, and the callback that saves the scales with each checkpoint.
The recipe comes from the environment, as the Trainer passes no options. The frozen weights and the adapters' matrices
all run in low precision."""

import argparse
import os
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from te_inductor.integrations.accelerate import register
from te_inductor.integrations.transformers import ScalingStateCallback

register()

WORDS = "<unk> <pad> <s> </s> the a cat dog sees likes big small and it".split()
TEXT = "the big cat sees a small dog and it likes the dog"


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word, so that nothing has to be fetched."""
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def trainer(folder: Path, steps: int, recipe: str = "delayed") -> SFTTrainer:
    """A trainer of one sentence, again and again."""
    os.environ.setdefault("TE_INDUCTOR_RECIPE", recipe)
    os.environ.setdefault(
        "TE_INDUCTOR_POLICY", f'{{"*": "{recipe}"}}'
    )  # on a GPU, too, where so small layers gain nothing
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
    )
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        max_length=16,
        torch_compile=True,
        torch_compile_backend="te",
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        report_to=[],
    )
    return SFTTrainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Dataset.from_list([{"text": TEXT}] * 32),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[ScalingStateCallback()],
    )


def losses(run: SFTTrainer) -> list[float]:
    """The losses of each step, as the Trainer logged them."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
    args = parser.parse_args()
    run = trainer(args.folder, args.steps)
    run.train(resume_from_checkpoint=args.resume)
    print(losses(run))


if __name__ == "__main__":
    main()
