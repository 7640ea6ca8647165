"""A rollout of many prompts, as reinforcement learning makes them: bf16 by Inductor, and stored weights of each recipe.

    python -m benchmarks.rollouts                                   # 64 prompts of 256 tokens, 128 sampled for each
    python -m benchmarks.rollouts --shape 8b --layers 8 --prompts 256 --recipes current nvfp4_weight_only
    python -m benchmarks.rollouts --shape tiny --words 64 --prompts 4 --prompt 8 --answer 4 --device cpu

A Llama of transformers with random bf16 weights and a tied output layer, which stays in high precision; its blocks are
compiled in place and sampled by examples/rollouts.py, in a CUDA graph from the second rollout on. Recipes are those of
`te_inductor.rollout`'s views, whose blocks are compiled with recipe "none". "refresh" is the first rollout behind a step
of the optimizer, which stores all weights again, less one that finds them as they were. Arms take turns, medians."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import te_inductor
from benchmarks import harness, table
from examples.rollouts import Sampler
from examples.shapes import SHAPES, llama

RECIPES = ("rowwise", "current", "nvfp4_weight_only")


def rollout(model: Any, recipe: str, prompts: torch.Tensor, args: argparse.Namespace) -> Callable[[], None]:
    """A rollout of an arm, compiled and captured."""
    generating, how = model, {"backend": "inductor"}
    if recipe != "bf16":
        generating = te_inductor.rollout(model, recipe, policy={"lm_head": "none"})
        how = {"backend": harness.te_backend(), "options": {"recipe": "none"}}
    for part in (*generating.model.layers, generating.model.norm):
        part.compile(dynamic=False, **how)
    sampler = Sampler(generating, args.prompts, args.prompt, args.answer)
    for _ in range(3):  # the first compiles, the second captures
        sampler(prompts)
    return lambda: (sampler(prompts), None)[1]


def seconds(call: Callable[[], None], device: str) -> float:
    harness.synchronize(device)
    start = time.perf_counter()
    call()
    harness.synchronize(device)
    return time.perf_counter() - start


def measured(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of each arm's rollout, and of the refresh in front of one."""
    arms, models = {}, []
    for recipe in ("bf16", *args.recipes):
        model = llama(
            args.shape, args.words, layers=args.layers, device=args.device, dtype=torch.bfloat16,
            tie_word_embeddings=True,
        )  # fmt: skip
        prompts = torch.randint(0, args.words, (args.prompts, args.prompt), device=args.device)
        arms[recipe] = rollout(model, recipe, prompts, args)
        models.append(model)
    whole: dict[str, list[float]] = {recipe: [] for recipe in arms}
    after: dict[str, list[float]] = {recipe: [] for recipe in arms}
    for _ in range(args.rounds):
        for recipe, model in zip(arms, models, strict=True):
            whole[recipe].append(1e3 * seconds(arms[recipe], args.device))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            after[recipe].append(1e3 * seconds(arms[recipe], args.device))
    return {
        recipe: {
            "ms": statistics.median(whole[recipe]),
            "refresh_ms": statistics.median(
                one - other for one, other in zip(after[recipe], whole[recipe], strict=True)
            ),
        }
        for recipe in arms
    }


def main() -> None:
    parser = harness.arguments(__doc__, "rollouts", device="cuda", prompts=64, rounds=5)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--words", type=int, default=151936, help="of the vocabulary")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each")
    parser.add_argument("--answer", type=int, default=128, help="tokens sampled for each")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    environment, found = harness.environment(args.device), measured(args)
    arguments = {name: value for name, value in vars(args).items() if name != "json"}
    harness.write_json(args.json, {"environment": environment, "arguments": arguments, "rows": found})
    base = found["bf16"]["ms"]
    rows = [
        [recipe, table.number(row["ms"], 1), table.number(base / row["ms"]), table.number(row["refresh_ms"], 1)]
        for recipe, row in found.items()
    ]
    title = f"{args.prompts} prompts of {args.prompt} tokens, {args.answer} sampled for each, {args.shape}"
    table.show(title, ("weights", "ms", "times as fast as bf16", "refresh ms"), rows, table.headline(environment))


if __name__ == "__main__":
    main()
