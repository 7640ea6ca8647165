"""A mixture-of-experts layer, forward and backward: te beside bf16 Inductor.

    python -m benchmarks.experts                       # both layers, all arms, one process
    python -m benchmarks.experts --layers mixtral --recipes delayed --profile 12
    python -m benchmarks.experts --layers qwen3 --tokens 4096 --mode reduce-overhead --forced    # CUDA graphs, all arms

The layer is transformers' sparse block (router, experts by its default `grouped_mm`), alone, with random tokens, so
that routing is about even; `--skew` makes some experts' share larger. Arms are timed in turn. `saved` is what the
forward keeps for the backward, without parameters; `error` is that of the output and of all gradients together against
bf16's. The peers `torchao` and `te_module` (experts_peers.py) run where they can be imported; else a line below the
table says why not."""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import experts_peers, harness, table

LAYERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # module, class, config, sizes
    "mixtral": (
        "transformers.models.mixtral.modeling_mixtral", "MixtralSparseMoeBlock", "MixtralConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3": (
        "transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
         "norm_topk_prob": True},
    ),
    "tiny": (
        "transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig",
        {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
RECIPES = ("delayed", "current", "rowwise", "block")
CLASSES = ("fp8 GEMM", "bf16 GEMM", "triton", "copy", "other")


@dataclass
class Arm:
    step: Callable[[], Any]
    output: Callable[[], Tensor]
    gradients: Callable[[], list[Tensor]]
    saved: int
    first_s: float


def layer(name: str, skew: float, device: str) -> nn.Module:
    import importlib

    import transformers

    module, block, config, sizes = LAYERS[name]
    made = getattr(transformers, config)(**sizes)
    made._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(importlib.import_module(module), block)(made).to(torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    if skew:
        with torch.no_grad():
            model.gate.weight *= 1 + skew * torch.rand_like(model.gate.weight[:, :1])
    return model


def arm(name: str, recipe: str, args: argparse.Namespace) -> Arm:
    device = args.device
    model = layer(name, args.skew, device)
    x = torch.randn(1, args.tokens, model_width(name), device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    torch._dynamo.reset()
    compiled: Callable[[Tensor], Any]
    start = time.perf_counter()
    if recipe == "bf16":
        compiled = torch.compile(model, mode=args.mode)
    elif recipe in experts_peers.PEERS:
        compiled = experts_peers.PEERS[recipe](model)
    else:
        options = {"recipe": recipe, "policy": {"gate": "none", "*": recipe} if args.forced else {}}
        options |= {"saved": args.saved, **({"mode": args.mode} if args.mode else {})}
        compiled = torch.compile(model, backend=harness.te_backend(), options=options)

    def output() -> Tensor:
        found = compiled(x)
        return found[0] if isinstance(found, tuple) else found

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        for parameter in (*model.parameters(), x):
            parameter.grad = None
        output().backward(dy)

    step()
    harness.synchronize(device)
    first_s = time.perf_counter() - start
    step()
    saved: dict[int, int] = {}
    known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), x)}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = output()
    del found
    return Arm(
        step, output, lambda: [p.grad for p in (x, *model.parameters()) if p.grad is not None], sum(saved.values()),
        first_s,
    )  # fmt: skip


def model_width(name: str) -> int:
    return int(LAYERS[name][3]["hidden_size"])


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    arms: dict[str, Arm] = {}
    rows: dict[str, Any] = {}
    for recipe in ("bf16", *args.recipes, *args.peers):
        try:
            arms[recipe] = arm(name, recipe, args)
            print(f"{name}, {recipe}: first step in {arms[recipe].first_s:.0f} s", flush=True)
        except Exception as error:  # the other arms are still worth having
            rows[recipe] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    times: dict[str, list[float]] = {recipe: [] for recipe in arms}
    for _ in range(args.rounds):
        for recipe, each in arms.items():
            times[recipe].append(statistics.median(harness.times_ms(each.step, args.device, args.iters, 2)))
    reference: list[Tensor] = []
    for recipe, each in arms.items():
        output = each.output().detach().clone()  # CUDA graphs write the next one over it
        each.step()
        found = [output, *each.gradients()]
        if recipe == "bf16":
            reference = [tensor.clone() for tensor in found]
        pairs = zip(found, reference, strict=True) if recipe not in experts_peers.OWN_WEIGHTS else ()
        errors = [harness.relative_error(*pair)["relative"] for pair in pairs]
        del found
        ms = statistics.median(times[recipe])
        kernels = harness.kernels(each.step, args.device) if args.profile else []
        totals = {kind: sum(k["total_us"] for k in kernels if k["class"] == kind) / 1e3 for kind in CLASSES}
        rows[recipe] = {
            "ms": ms, "speedup": statistics.median(times["bf16"]) / ms, "saved_mib": each.saved / 2**20,
            "first_s": each.first_s, "errors": errors, "by_class_ms": totals,
            "kernels": kernels[: args.profile],
        }  # fmt: skip
    return rows


def plot(path: Path, found: dict[str, Any]) -> None:
    """Speed over bf16 and bytes saved for the backward, one bar an arm of each layer."""
    panels: list[tuple[str, list[str], list[float]]] = [
        ("forward and backward, times as fast as bf16", [], []),
        ("saved for the backward, of bf16's", [], []),
    ]
    for name in (name for name in LAYERS if "ms" in found.get(name, {}).get("bf16", {})):
        for recipe, row in found[name].items():
            if recipe == "bf16" or "ms" not in row:
                continue
            saved = found[name]["bf16"]["saved_mib"]
            for (_, names, values), value in zip(panels, (row["speedup"], row["saved_mib"] / saved), strict=True):
                names.append(f"{name} {recipe}")
                values.append(value)
    if panels[0][1]:
        table.bars(path, f"experts, {found['tokens']} tokens; {table.headline(found['environment'])}", panels)


def main() -> None:
    parser = harness.arguments(__doc__, tokens=16384, rounds=3, iters=5)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["mixtral", "qwen3"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--peers", nargs="*", choices=experts_peers.PEERS, default=list(experts_peers.PEERS))
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N slowest kernels of each arm")
    parser.add_argument("--mode", help="torch.compile's mode, for bf16 and te")
    parser.add_argument("--forced", action="store_true", help="a policy that names every layer but the router")
    parser.add_argument("--saved", choices=("high_precision", "low_precision"), default="high_precision")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a picture")
    args = parser.parse_args()
    found: dict[str, Any] = {"environment": harness.environment(args.device), "tokens": args.tokens}
    for name in args.layers:
        found[name] = rows = measure(name, args)
        lines = [
            (recipe, f"{row['ms']:.2f}", f"{row['speedup']:.2f}x", f"{row['saved_mib']:.0f}", f"{row['first_s']:.0f}",
             " ".join(f"{error:.3f}" for error in row["errors"]))
            for recipe, row in rows.items() if "ms" in row
        ]  # fmt: skip
        title = f"{name}, {args.tokens} tokens, {found['environment']['device']}"
        table.show(title, ("arm", "ms", "over bf16", "saved MiB", "first s", "errors: y, dx, gradients"), lines)
        for recipe, row in rows.items():
            if "error" in row:
                print(f"{recipe}: {row['error']}")
            for kernel in row.get("kernels", ()):
                print(f"  {recipe:8} {kernel['total_us']:9.1f} us {kernel['calls']:5.1f}x  {kernel['name'][:110]}")
            if args.profile and "by_class_ms" in row:
                print(f"  {recipe:8} {row['by_class_ms']}")
        torch.cuda.empty_cache()
    if args.plot:
        plot(args.plot, found)
    if args.json:
        harness.write_json(args.json, found)


if __name__ == "__main__":
    main()
