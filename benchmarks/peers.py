"""Every peer in one run: TransformerEngine, torchao and bf16 Inductor beside this backend, one table.

    python -m benchmarks.peers                                   # Llama blocks, Mixtral's and Qwen3-MoE's layers
    python -m benchmarks.peers --works llama --tokens 8192 --rounds 2
    python -m benchmarks.peers --works tiny --tokens 64 --device cpu

Forward and backward of layers alone: two blocks of Llama-3-8B's shape, in sequences of 4096 tokens, or a layer of
experts of transformers' (benchmarks/experts.py). Each arm runs in a process of its own; arms take turns over the rounds,
as a card's clock drifts. An arm whose package is not installed is left out, and a line says how to install it.

Errors are those of the output and of all gradients together against float64, of the same bf16 weights, the same x and
the same gradient of the output: relative norms. A token whose experts bf16 chooses otherwise than float64 is an error
of all arms. Layers of TransformerEngine have weights of their own, and no error here. Each arm is told and written down
when it has run, so that a run that is cut off leaves what it has measured."""

import argparse
import statistics
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import arms, experts, experts_peers, harness, llama_blocks, table
from benchmarks.llama_blocks import Shape

WORKS = ("llama", *experts.LAYERS)
DENSE = (
    "bf16", "te:delayed", "te:current", "te:rowwise", "torchao:tensorwise", "torchao:rowwise",
    "te_module:delayed", "te_module:current",
)  # fmt: skip
GROUPED = ("bf16", "te:delayed", "te:current", "te:rowwise", "torchao", "te_module")
INSTALLED_BY = {
    "torchao": "pip install torchao",
    "transformer_engine": "pip install --no-build-isolation transformer_engine[pytorch], which builds for an hour",
}
LENGTH = 4096  # tokens of a sequence


def made(work: str, tokens: int, args: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    """The plain layers in bf16, x, and the gradient of the output."""
    if work == "llama":
        length = min(LENGTH, tokens)
        shape = Shape(batch=tokens // length, seq=length)
        return llama_blocks.build(shape, torch.bfloat16, args.device), *llama_blocks.inputs(
            shape, torch.bfloat16, args.device
        )
    model = experts.layer(work, 0.0, args.device)
    generator = torch.Generator(args.device).manual_seed(1)
    x, dy = (
        torch.randn(1, tokens, experts.model_width(work), generator=generator, device=args.device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    return model, x.requires_grad_(), dy


def compiled(work: str, arm: str, model: nn.Module, args: argparse.Namespace) -> Callable[[Tensor], Tensor]:
    if work != "llama" and arm in experts_peers.PEERS:
        run: Callable[[Tensor], Any] = experts_peers.PEERS[arm](model)
    else:
        kind, detail = arms.find(arm)
        run = kind.make(model, detail, None, {})

    def forward(x: Tensor) -> Tensor:
        y = run(x)
        return y[0] if isinstance(y, tuple) else y  # type: ignore[no-any-return]

    return forward


def results(forward: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and all gradients, in fp32."""
    without_gradients(model, x)
    y = forward(x)
    y.backward(dy)  # type: ignore[no-untyped-call]
    return [y.detach().float(), *gradients(model, x)]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients in fp32, which the model then has no longer."""
    found = [one.grad.float() for one in (x, *model.parameters()) if one.grad is not None]
    without_gradients(model, x)
    return found


def without_gradients(model: nn.Module, x: Tensor) -> None:
    for one in (x, *model.parameters()):
        one.grad = None


def oracle(work: str, tokens: int, args: argparse.Namespace) -> list[Tensor]:
    """The float64 results of the same bf16 values, a sequence at a time."""
    model, x, dy = made(work, tokens, args)
    if work != "llama":
        model.experts.config._experts_implementation = "eager"  # type: ignore[union-attr]
    wide, leaf = model.double(), x.detach().double().requires_grad_()
    outputs = []
    for sequence, its_dy in zip(leaf.split(1), dy.double().split(1), strict=True):
        y = wide(sequence)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(its_dy)
        outputs.append(y.detach().float())
    return [torch.cat(outputs), *gradients(wide, leaf)]


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    off = sum(float((one - other).double().norm() ** 2) for one, other in zip(found, expected, strict=True))
    return float((off / sum(float(one.double().norm() ** 2) for one in expected)) ** 0.5)


def run_arm(args: argparse.Namespace) -> None:
    """One arm's numbers, of this process."""
    [work], [tokens] = args.works, args.tokens
    model, x, dy = made(work, tokens, args)
    forward = compiled(work, args.arm, model, args)

    def step() -> None:
        without_gradients(model, x)
        forward(x).backward(dy)  # type: ignore[no-untyped-call]

    found: dict[str, Any] = {"arm": args.arm}
    times = harness.times_ms(step, args.device, args.iters, args.warmup)
    found["ms"] = statistics.median(times)
    without_gradients(model, x)
    peak = harness.peak_bytes(args.device, step)
    found |= {} if peak is None else {"peak_gib": peak / 2**30}
    if args.errors and not args.arm.startswith("te_module"):
        low = results(forward, model, x, dy)
        expected = oracle(work, tokens, args)
        found["y"], found["gradients"] = apart(low[:1], expected[:1]), apart(low[1:], expected[1:])
    harness.write_json(args.json, found)


def missing(arm: str) -> str | None:
    return arms.missing(arm.partition(":")[0])


def measure(work: str, tokens: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The numbers of all arms, each the median of its rounds."""
    chosen = args.arms or (DENSE if work == "llama" else GROUPED)
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in chosen if missing(arm) is None}
    for place in range(args.rounds):
        for arm, found in rows.items():
            given = ["--arm", arm, "--works", work, "--tokens", str(tokens), "--device", args.device]
            given += ["--iters", str(args.iters), "--warmup", str(args.warmup)]
            given += ["--errors"] if place == 0 else []
            one = harness.run_arm("benchmarks.peers", given)
            found.append(one)
            told = {"arm": arm, "failed": _reason(one["failed"])} if "failed" in one else one
            print(f"{work}, {tokens} tokens: {told}", flush=True)
            harness.write_json(args.json.with_suffix(".part.json"), rows)
    merged = {}
    for arm, found in rows.items():
        whole = {**found[-1], **found[0]}
        if "failed" not in whole:
            whole["ms"] = statistics.median(one["ms"] for one in found if "ms" in one)
        merged[arm] = whole
    return merged


def versions() -> str:
    names = ("torch", "triton", "torchao", "transformer_engine", "transformers")
    return ", ".join(f"{name} {metadata.version(name)}" for name in names if harness.importable(name))


def _reason(written: str) -> str:
    """The line of what a process wrote that names its error, or the last one."""
    lines = written.splitlines()
    return next((line for line in lines if "Error" in line), "".join(lines[-1:]))[:70]


def show(work: str, tokens: int, rows: dict[str, dict[str, Any]]) -> None:
    base = rows.get("bf16", {}).get("ms")
    lines = [
        [
            arm, table.number(row.get("ms")), table.number(base / row["ms"] if base and "ms" in row else None, 3),
            table.number(row.get("peak_gib")), table.number(row.get("y"), 4), table.number(row.get("gradients"), 4),
            _reason(row.get("failed") or ""),
        ]
        for arm, row in rows.items()
    ]  # fmt: skip
    columns = ("arm", "ms", "over bf16", "peak GiB", "error of y", "of gradients", "failed")
    table.show(f"{work}, {tokens} tokens", columns, lines)


def main() -> None:
    parser = harness.arguments(__doc__, "peers", device="cuda", rounds=1, iters=20)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["llama", "mixtral", "qwen3"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--arms", nargs="+", help=f"of {', '.join(dict.fromkeys((*DENSE, *GROUPED)))}")
    parser.add_argument("--warmup", type=int, default=15, help="steps before: the card's clock settles within ten")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--errors", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        run_arm(args)
        return
    environment, found = harness.environment(args.device), {}
    for work in args.works:
        for tokens in args.tokens:
            found[f"{work} {tokens}"] = rows = measure(work, tokens, args)
            harness.write_json(args.json, {"environment": environment, "versions": versions(), "rows": found})
            show(work, tokens, rows)
    print(f"\n{table.headline(environment)}; {versions()}")
    for package, how in INSTALLED_BY.items():
        if not harness.importable(package):
            print(f"without {package}, which is not installed: {how}")


if __name__ == "__main__":
    main()
