"""Whole training steps of models whose output layer is much of them, as transformers' users call them.

    python -m benchmarks.head_models                                      # four models, all arms
    python -m benchmarks.head_models --works qwen3-0.6b --arms bf16 te:delayed te:delayed:omit

Published models' own vocabularies; all layers but for Llama-3-8B, of which there are four. Labels and an attention mask
of ones, bf16 parameters, loss, backward and fused AdamW, as `benchmarks.masks` has them. An arm is `bf16`, `te:RECIPE`, or
`te:RECIPE:LOGITS`, which gives this backend the option `logits`."""

import argparse
from typing import Any

import torch

from benchmarks import harness, masks

_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
_QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_TIED = {"tie_word_embeddings": True}
WORKS: dict[str, masks.Work] = {
    "llama-3-8b": masks.WORKS["vocabulary"],
    "llama-3.2-1b": ("Llama", _LLAMA | _TIED, 16, 128256, 4, 4096, "ones"),
    "qwen3-0.6b": ("Qwen3", _QWEN | _TIED, 28, 151936, 4, 4096, "ones"),
    "gemma-2-2b": ("Gemma2", _GEMMA | _TIED, 26, 256000, 2, 4096, "ones"),
}
ARMS = ("bf16", *(f"te:{recipe}:{logits}" for logits in ("keep", "omit") for recipe in ("none", "current", "delayed")))


def measure(work: str, arm: str, args: argparse.Namespace) -> dict[str, Any]:
    kind, *rest = arm.split(":")
    options = {"logits": rest.pop()} if len(rest) > 1 else {}
    try:
        return masks.measure(WORKS[work], ":".join((kind, *rest)), args, **options)
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}


def main() -> None:
    parser = harness.arguments(__doc__, "head_models", device="cuda", iters=5)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    args = parser.parse_args()
    environment, rows = harness.environment(args.device), []
    for work in args.works:
        for arm in args.arms:
            rows.append({"work": work, "arm": arm, **measure(work, arm, args)})
            harness.write_json(args.json, {"environment": environment, "rows": rows})
    masks.show(rows, environment)


if __name__ == "__main__":
    main()
