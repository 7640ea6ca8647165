"""Training steps of models with narrow layers, where FP8 may cost more than it saves: the size rule's ground.

    python -m benchmarks.small_models                                  # both models, all arms, under three minutes
    python -m benchmarks.small_models --models smollm-360m --layers 8

A few layers with a small vocabulary: forward, loss, backward and fused AdamW of bf16 parameters, all arms in one
process, timed in turn. An arm is `bf16`, plain torch.compile; `RECIPE`, that recipe by default, as the size rule has
it; `RECIPE!`, a policy that names every layer. `host ms` is how long the host takes to launch a step while the device
is idle: where it is near the step's own time, the device waits for the host. The slowest kernels of bf16 and of the
forced arms are listed."""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness, table

VOCABULARY, TOKENS = 8192, 16384
MODELS: dict[str, tuple[str, str, int, dict[str, Any]]] = {  # classes of transformers, the sequence, what differs
    "smollm-360m": (
        "LlamaForCausalLM", "LlamaConfig", 2048,
        {"hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_key_value_heads": 5,
         "max_position_embeddings": 2048, "tie_word_embeddings": True, "use_cache": False},
    ),
    "bert-large": (
        "BertForMaskedLM", "BertConfig", 512,
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "max_position_embeddings": 512,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}  # fmt: skip
ARMS = ("bf16", "delayed", "current", "delayed!", "current!")
CLASSES = ("fp8 GEMM", "bf16 GEMM", "triton", "attention", "copy", "other")


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # both (batch, sequence) int64 -> ()
        return F.cross_entropy(self.model(input_ids=ids).logits.flatten(0, 1).float(), labels.flatten())


@dataclass
class Arm:
    step: Callable[[], Any]
    peak_bytes: int | None
    first_s: float
    low: int  # GEMMs in low precision, of `sites`
    sites: int


def build(name: str, layers: int, device: str) -> Loss:
    import transformers

    model, config, _, changes = MODELS[name]
    torch.manual_seed(0)
    changes = {**changes, "vocab_size": VOCABULARY, "num_hidden_layers": layers}
    with torch.device(device):
        return Loss(getattr(transformers, model)(getattr(transformers, config)(**changes)).bfloat16())


def make(name: str, arm: str, args: argparse.Namespace) -> Arm:
    """An arm whose step has run, with the peak of its own memory."""
    cuda, sequence, recipe = args.device.startswith("cuda"), min(MODELS[name][2], args.tokens), arm.rstrip("!")
    before = torch.cuda.memory_allocated() if cuda else 0
    loss = build(name, args.layers, args.device)
    ids, labels = torch.randint(VOCABULARY, (2, args.tokens // sequence, sequence), device=args.device)
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-4, fused=True)
    options = {"policy": {"*": recipe}} if arm.endswith("!") else {"recipe": recipe}
    given: dict[str, Any] = {} if arm == "bf16" else {"backend": harness.te_backend(), "options": options}
    run = torch.compile(loss, **given)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        run(ids, labels).backward()
        optimizer.step()

    start = time.perf_counter()
    step()
    harness.synchronize(args.device)
    first = time.perf_counter() - start
    step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before if cuda else None
    return Arm(step, peak, first, *_sites(loss, ids, labels, options if given else None))


def _sites(loss: Loss, ids: Tensor, labels: Tensor, options: dict[str, Any] | None) -> tuple[int, int]:
    if options is None:
        return 0, 0
    from te_inductor import explain

    sites = explain(loss, ids, labels, options=options).sites
    return sum(site.kernel != "high_precision" for site in sites), len(sites)


def host_ms(step: Callable[[], Any], device: str, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        harness.synchronize(device)
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    harness.synchronize(device)
    return statistics.median(times)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    made = {arm: make(name, arm, args) for arm in args.arms}
    times: dict[str, list[float]] = {arm: [] for arm in made}
    for _ in range(args.rounds):
        for arm, one in made.items():
            times[arm] += harness.times_ms(one.step, args.device, args.iters, 2)
    found: dict[str, Any] = {}
    for arm, one in made.items():
        profiled = arm == "bf16" or arm.endswith("!")
        found[arm] = {
            "ms": statistics.median(times[arm]),
            "host_ms": host_ms(one.step, args.device),
            "peak_bytes": one.peak_bytes,
            "first_s": one.first_s,
            "low": f"{one.low} of {one.sites}",
            "kernels": harness.kernels(one.step, args.device, 2) if profiled else [],
        }
    return found


def show(name: str, found: dict[str, Any], environment: dict[str, Any], args: argparse.Namespace) -> None:
    base, rows = found.get("bf16", {}).get("ms"), []
    for arm, one in found.items():
        sums = [sum(row["total_us"] for row in one["kernels"] if row["class"] == kind) / 1e3 for kind in CLASSES]
        over = table.number(None if base is None else base / one["ms"], 3)
        peak = table.number(one["peak_bytes"], 2, 2.0**-30)
        launched = round(sum(row["calls"] for row in one["kernels"])) or None
        times = [table.number(value) if one["kernels"] else None for value in sums]
        rows.append(
            (arm, one["low"], table.number(one["ms"]), over, table.number(one["host_ms"]), peak, launched, *times)
        )
    columns = ("arm", "low GEMMs", "step ms", "over bf16", "host ms", "peak GiB", "kernels", *CLASSES)
    title = f"{name}, {args.layers} layers, {args.tokens} tokens; {table.headline(environment)}"
    table.show(title, columns, rows, "classes of kernels in ms a step")
    for arm, one in found.items():
        kernels = one["kernels"][: args.top]
        cells = []
        for row in kernels:
            us = (table.number(row[key], 1) for key in ("mean_us", "total_us"))
            cells.append((row["name"][:110], row["class"], f"{row['calls']:.0f}", *us))
        if cells:
            table.show(
                f"{name}, {arm}: the slowest kernels", ("kernel", "class", "calls", "mean us", "us a step"), cells
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="bf16, RECIPE, RECIPE!")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--top", type=int, default=16, help="how many kernels to list")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=Path("out/small_models.json"))
    args = parser.parse_args()
    # All arms compile the same code, and none is given up for another.
    torch._dynamo.config.recompile_limit = 64
    environment = harness.environment(args.device)
    results: dict[str, Any] = {"environment": environment, "models": {}}
    for name in args.models:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that the size rule leaves alone
            results["models"][name] = measure(name, args)
        harness.write_json(args.json, results)
        show(name, results["models"][name], environment, args)


if __name__ == "__main__":
    main()
