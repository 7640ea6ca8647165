"""A tiny BERT in sentence-transformers, trained in FP8 on pairs of sentences; a CPU will do:

    python -m examples.sentence_transformers_run --folder /tmp/run

One line is ours: `sentence.compile(…)`, in place, so that saved models stay those of the plain one. To compile the
transformer inside (`sentence[0].auto_model.compile`) has no effect: from version 6 on its `forward` is called by name,
past what was compiled."""

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from te_inductor import assert_low_precision

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a cat dog sees likes big small runs sleeps old new".split()
PAIRS = [("a big cat", "a cat sees"), ("a small dog", "a dog likes"), ("old cat sleeps", "new cat runs")]


def base(folder: Path) -> str:
    """The path of a random BERT and a tokenizer with a token a word, so that nothing has to be fetched."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **special).save_pretrained(folder)
    config = BertConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


def model(folder: Path, recipe: str = "current") -> SentenceTransformer:
    """Compiled in place. The policy names the recipe once more, for GPUs, where so small layers gain nothing."""
    transformer = Transformer(base(folder))
    sentence = SentenceTransformer(
        modules=[transformer, Pooling(64)], device="cuda" if torch.cuda.is_available() else "cpu"
    )
    sentence.compile(backend="te", options={"recipe": recipe, "policy": {"*": recipe}})
    return sentence


def trainer(sentence: SentenceTransformer, folder: Path, steps: int) -> SentenceTransformerTrainer:
    """A step an epoch, of all pairs."""
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=steps,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=len(PAIRS),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        report_to=[],
    )
    pairs = [{"anchor": one, "positive": other} for one, other in PAIRS]
    loss = MultipleNegativesRankingLoss(sentence)
    return SentenceTransformerTrainer(sentence, arguments, train_dataset=Dataset.from_list(pairs), loss=loss)


def losses(run: SentenceTransformerTrainer) -> list[float]:
    """The losses of each step, as the Trainer logged them."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def ran(sentence: SentenceTransformer) -> Any:
    """Returns the layers that ran in low precision; raises if one did not."""
    return assert_low_precision(lambda: sentence.encode([one for one, _ in PAIRS]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    sentence = model(args.folder / "base")
    run = trainer(sentence, args.folder, args.steps)
    run.train()
    print(losses(run))
    print(ran(sentence))
    print(sentence.encode([one for one, _ in PAIRS]).shape)
    sentence.save(str(args.folder / "trained"))
    print(SentenceTransformer(str(args.folder / "trained")).encode(["a cat"]).shape)


if __name__ == "__main__":
    main()
