"""Generation from weights that are stored in FP8 or NVFP4, from a folder that another process has written:

    python -m examples.trainer --folder /tmp/run
    python -m examples.generate --model /tmp/run/model --stored /tmp/run/stored
    python -m examples.generate --stored /tmp/run/stored

The first command trains a model and saves it, the second stores its weights and writes them to a folder, the third
loads that folder alone. Both of the latter generate the same text. On a GPU a step of generation is compiled; on a CPU
it is not, as transformers compiles on GPUs only."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig

from te_inductor.integrations.pretrained import StoredWeightsConfig


def store(model: Path, stored: Path, recipe: str) -> None:
    """Writes a folder of stored weights from one of weights in high precision."""
    how = StoredWeightsConfig(recipe, policy={"lm_head": "none"})
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, quantization_config=how).save_pretrained(stored)
    AutoTokenizer.from_pretrained(model).save_pretrained(stored)


def load(stored: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of such a folder."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.bfloat16, device_map=device).eval()
    return model, AutoTokenizer.from_pretrained(stored)


def generated(model: Any, prompts: Tensor, tokens: int) -> Tensor:  # (B, T + tokens)
    """The likeliest tokens behind the prompts, by a compiled step that reads a cache of constant size."""
    options = {"recipe": "none", "mode": "reduce-overhead"}
    how = CompileConfig(backend="te", mode=None, options=options, fullgraph=False, dynamic=False)
    found: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        compile_config=how,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stored", type=Path, required=True, help="folder of stored weights; written if --model is given"
    )
    parser.add_argument("--model", type=Path, help="folder of weights in high precision to store first")
    parser.add_argument("--recipe", default="rowwise", help="by which weights are stored (default: rowwise)")
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate")
    args = parser.parse_args()
    if args.model is not None:
        store(args.model, args.stored, args.recipe)
    model, tokenizer = load(args.stored)
    weight = model.model.layers[0].mlp.up_proj.weight
    print(f"{args.stored} holds weights such as {weight}")
    prompts = tokenizer(args.prompt, return_tensors="pt").input_ids.to(model.device)
    found = generated(model, prompts, args.tokens)
    begin = time.perf_counter()
    again = generated(model, prompts, args.tokens)
    tokens = again.shape[1] - prompts.shape[1]
    print(f"{tokens / (time.perf_counter() - begin):.1f} tokens a second, the prompt included, the second time")
    print("the second time the same:", bool(torch.equal(found, again)))
    print("generated:", found[0].tolist())
    print(repr(tokenizer.decode(found[0])))


if __name__ == "__main__":
    main()
