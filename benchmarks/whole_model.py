"""Training a whole model of transformers: embedding, blocks, head, loss, and AdamW, each arm in a process of its own.

    python -m benchmarks.whole_model --arms bf16 te:delayed te:current te:block
    python -m benchmarks.whole_model --model qwen3-0.6b --steps 200 --plot
    python -m benchmarks.whole_model --kernels                      # what each arm's step runs, and for how long

Parameters are fp32 under torch.autocast, as most train. Text is the standard library's source, byte by byte, in models
with their own vocabulary: the head is as wide as it is. All arms see the same batches from the same weights, so that
their losses can be compared."""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import arms, harness, step_report, table
from examples.corpus import standard_library

MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # a configuration of transformers, and what differs from its defaults
    "llama-3.2-1b": (
        "LlamaConfig",
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        "Qwen3Config",
        {
            "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        "LlamaConfig",
        {
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
    ),
}  # fmt: skip
LAST = 10  # steps whose mean loss is an arm's


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "whole_model", batch=8, context=2048, steps=60)
    parser.add_argument("--model", default="llama-3.2-1b", choices=MODELS)
    parser.add_argument(
        "--arms", nargs="+", default=["bf16", "te:delayed", "te:current"], help="te:RECIPE, torchao:RECIPE"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="options for te, as JSON")
    parser.add_argument("--warmup", type=int, default=10, help="steps that are not timed")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument(
        "--kernels", action="store_true", help="profile each arm's kernels, in steps behind the timed ones"
    )
    parser.add_argument("--top", type=int, default=20, help="how many kernels to list")
    parser.add_argument("--plot", action="store_true", help="the loss curves, beside the JSON")
    parser.add_argument("--arm", help="run this one arm, here, and write its numbers")
    return parser.parse_args()


def build(name: str, device: str) -> nn.Module:
    import transformers

    config, changes = MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**changes))  # type: ignore[no-any-return]


def run_arm(args: argparse.Namespace) -> dict[str, Any]:
    device = args.device.partition(":")[0]
    arm, detail = arms.find(args.arm)
    model = build(args.model, args.device)
    batches = standard_library().batches("train", steps=args.steps, batch=args.batch, context=args.context, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    forward = arm.make(_Loss(model), detail, None, args.options)

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = forward(ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = batches.to(args.device)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [step(batches[0])]
        harness.synchronize(args.device)
        first = time.perf_counter() - start
    losses += [step(ids) for ids in batches[1 : args.warmup]]
    rest = iter(batches[args.warmup :])
    times = harness.times_ms(lambda: losses.append(step(next(rest))), args.device, args.steps - args.warmup, 0)
    found = {"kernels": harness.kernels(lambda: step(batches[-1]), args.device)} if args.kernels else {}
    return found | {
        "arm": args.arm,
        "first_step_s": first,
        "step_ms": times,
        "losses": torch.stack(losses).tolist(),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "warnings": [str(w.message) for w in caught if "FallbackWarning" in type(w.message).__name__],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


class _Loss(nn.Module):
    """The mean loss of a batch, with the model that it is compiled with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:  # (batch, context + 1) int64 -> ()
        logits = self.model(ids[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    given = ("model", "batch", "context", "steps", "warmup", "learning_rate", "device")
    arguments = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in given]
    arguments += ["--kernels"] if args.kernels else []
    results: dict[str, Any] = {"environment": harness.environment(args.device), "runs": {}, "failed": {}}
    results |= {name: getattr(args, name) for name in (*given, "options")}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.arms:
            given = [*arguments, f"--options={json.dumps(args.options)}", "--arm", name]
            cache = f"{folder}/{name.replace(':', '-')}"
            run = harness.run_arm("benchmarks.whole_model", given, TORCHINDUCTOR_CACHE_DIR=cache)
            results["failed" if "failed" in run else "runs"][name] = run.get("failed", run)
            harness.write_json(args.json, results)
            print(f"{name}: {run.get('failed', 'done')}", flush=True)
    return results


def show(results: dict[str, Any], top: int) -> None:
    runs, rows = results["runs"], []
    found = {
        name: (statistics.median(run["step_ms"]), statistics.mean(run["losses"][-LAST:])) for name, run in runs.items()
    }
    for name, (ms, loss) in found.items():
        over, off, peak = None, None, runs[name]["peak_bytes"]
        if "bf16" in found:
            bf16_ms, bf16_loss = found["bf16"]
            over, off = bf16_ms / ms, f"{loss / bf16_loss - 1:+.2%}"
        cells = (table.number(ms), table.number(over, 3), table.number(loss, 4), off, table.number(peak, 2, 2.0**-30))
        rows.append((name, *cells, table.number(runs[name]["first_step_s"], 1), runs[name]["graphs"]))
    size = f"{results['batch']} x {results['context']} tokens"
    columns = ("arm", "step ms", "over bf16", f"loss, last {LAST}", "off bf16", "peak GiB", "first step s", "graphs")
    table.show(f"{results['model']}, {size}, AdamW; {table.headline(results['environment'])}", columns, rows)
    for name, run in runs.items():
        if "kernels" in run:
            step_report.kernels(name, run, top)
        for warning in run["warnings"]:
            print(f"{name}: {warning}")
    for name, failure in results["failed"].items():
        print(f"{name} failed: {failure}")


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    for name, run in results["runs"].items():
        axis.plot(run["losses"], label=name, linewidth=1)
    axis.set(xlabel="step", ylabel="loss", title=results["model"])
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


def main() -> None:
    args = parse()
    if args.arm:
        harness.write_json(args.json, run_arm(args))
        return
    results = run_all(args)
    show(results, args.top)
    if args.plot:
        plot(results, args.json.with_suffix(".png"))
    if results["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
