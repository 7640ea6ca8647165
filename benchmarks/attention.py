"""Attention of the fleet's models: which backend SDPA takes, and how fast each is, forward and backward.

    python -m benchmarks.attention                    # under a minute
    python -m benchmarks.attention --share            # sums alone, on any machine: attention's share of FLOPs and time
    python -m benchmarks.attention --models llama-3-8b --tokens 4096 32768

For each shape of heads: SDPA as it is called without a choice, and flash, cuDNN and memory-efficient attention, one at a
time; "error" is that of the output and of the furthest gradient against float64, relative, at the first length. `share`
reckons with GEMMs and attention at the rates below, and leaves everything else out."""

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import harness, table
from benchmarks.fleet_models import MODELS, Model
from benchmarks.rows import shapes

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# FLOP/s of one H200 (docs/ledger.md): bf16 and FP8 GEMMs; causal attention forward and backward by cuDNN, of 32 heads of
# 128 and 8 KV heads, by tokens.
BF16, FP8 = 672e12, 1359e12
ATTENTION = {4096: 482e12, 32768: 560e12}
TOKENS = (4096, 32768)
EXACT = 1024  # tokens at which results are compared with float64, which holds all scores


class Heads(NamedTuple):
    """Shape of one layer's attention."""

    heads: int
    kv: int
    width: int
    causal: bool


def heads_of(of: Model) -> Heads:
    get = of.changes.get
    d = get("hidden_size") or of.changes["d_model"]
    heads = get("num_attention_heads") or get("num_heads") or of.changes["encoder_attention_heads"]
    width = get("head_dim") or get("d_kv") or d // heads
    return Heads(heads, get("num_key_value_heads", heads), width, of.model.endswith("CausalLM"))


def flops(of: Model, tokens: int) -> tuple[float, float]:
    """The FLOPs of one token, forward and backward, in one layer whose sequences have so many: of linear layers, and of
    attention: two products forward and five backward, half of the scores where they are causal."""
    weights = sum(n * k for n, k in shapes(of))
    heads = heads_of(of)
    products = 7 * 2 * tokens * heads.heads * heads.width
    return 3 * 2.0 * weights, products * (0.5 if heads.causal else 1.0)


def rate_of(tokens: int) -> float:
    """The rate of attention, at the measured length that is nearest."""
    return ATTENTION[min(ATTENTION, key=lambda known: abs(known - tokens))]


def share(names: list[str], tokens: list[int]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        for length in tokens:
            linear, attention = flops(MODELS[name], length)
            attending = attention / rate_of(length)
            times = [linear / rate + attending for rate in (BF16, FP8)]
            twice = linear / FP8 + attending / 2
            rows.append(
                {
                    "model": name,
                    "tokens": length,
                    "flops": attention / (linear + attention),
                    "time_bf16": attending / times[0],
                    "time_fp8": attending / times[1],
                    "at_twice": times[1] / twice,
                }
            )
    return rows


@contextlib.contextmanager
def only(backend: str) -> Iterator[None]:
    """One backend of SDPA's; "default" is its own choice."""
    if backend == "default":
        yield
        return
    with sdpa_kernel(BACKENDS[backend]):
        yield


def inputs(heads: Heads, tokens: int, args: argparse.Namespace) -> list[Tensor]:
    """q, k, v and dy, laid out as a model's projections leave them."""
    torch.manual_seed(0)
    counts = (heads.heads, heads.kv, heads.kv, heads.heads)
    made = [
        torch.randn(1, tokens, count, heads.width, device=args.device, dtype=torch.bfloat16).transpose(1, 2)
        for count in counts
    ]
    return [*(tensor.requires_grad_() for tensor in made[:3]), made[3]]


def attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=heads.causal, enable_gqa=heads.kv != heads.heads)


def exact(heads: Heads, args: argparse.Namespace) -> list[Tensor]:
    """The output and gradients of q, k, v, in float64."""
    q, k, v, dy = (tensor.detach().double() for tensor in inputs(heads, EXACT, args))
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    group = heads.heads // heads.kv
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) / heads.width**0.5
    if heads.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dy)]


def measure(heads: Heads, backend: str, tokens: int, reference: list[Tensor] | None, args: Any) -> dict[str, Any]:
    """Milliseconds forward, and forward and backward; what the profiler calls the kernels; errors at `EXACT` tokens."""
    q, k, v, dy = inputs(heads, tokens, args)

    def both() -> list[Tensor]:
        out = attend(q, k, v, heads)
        return [out, *torch.autograd.grad(out, (q, k, v), dy)]

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, heads)

    with only(backend):
        row: dict[str, Any] = {
            "ms": statistics.median(harness.times_ms(both, args.device, args.iters, 2)),
            "forward_ms": statistics.median(harness.times_ms(forward, args.device, args.iters, 2)),
        }
        if backend == "default":
            row["kernel"] = harness.kernels(forward, args.device, 1)[0]["name"][:60]
        if reference is not None:
            q, k, v, dy = inputs(heads, EXACT, args)
            errors = [
                harness.relative_error(found.double(), other)["relative"]
                for found, other in zip(both(), reference, strict=True)
            ]
            row["errors"] = [errors[0], max(errors[1:])]
    factor = 0.5 if heads.causal else 1.0
    row["tflops"] = 14e-12 * factor * tokens**2 * heads.heads * heads.width / (1e-3 * row["ms"])
    return row


def main() -> None:
    parser = harness.arguments(__doc__, "attention", iters=5)
    parser.add_argument("--models", nargs="+", default=[name for name in MODELS if name != "tiny"], choices=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of one sequence")
    parser.add_argument("--share", action="store_true", help="nothing is measured")
    args = parser.parse_args()
    shares = share(args.models, args.tokens)
    table.show(
        "attention's share of a layer's products, derived",
        ("model", "tokens", "of FLOPs", "of time, bf16", "of time, FP8 layers", "gain at twice its rate"),
        [
            (row["model"], row["tokens"], *(f"{row[key]:.0%}" for key in ("flops", "time_bf16", "time_fp8")),
             table.number(row["at_twice"]))
            for row in shares
        ],
    )  # fmt: skip
    if args.share:
        return
    environment, found = harness.environment(args.device), []
    asked: dict[Heads, list[str]] = {}
    for name in args.models:
        asked.setdefault(heads_of(MODELS[name]), []).append(name)
    for heads, names in asked.items():
        reference = exact(heads, args)
        for place, tokens in enumerate(args.tokens):
            for backend in ("default", *BACKENDS):
                row = {"heads": heads._asdict(), "models": names, "tokens": tokens, "backend": backend}
                try:
                    row |= measure(heads, backend, tokens, reference if place == 0 else None, args)
                except RuntimeError as error:  # it takes no such heads
                    row["refused"] = str(error).splitlines()[0]
                found.append(row)
                harness.write_json(args.json, {"environment": environment, "shares": shares, "rows": found})
    columns = ("heads, KV, width", "tokens", "backend", "ms", "forward ms", "TF/s", "error: output, gradient", "models")
    cells = [
        (
            "{heads}, {kv}, {width}{}".format(" causal" if row["heads"]["causal"] else "", **row["heads"]),
            row["tokens"], f"{row['backend']} {row.get('kernel', row.get('refused', ''))}"[:90],
            table.number(row.get("ms"), 3), table.number(row.get("forward_ms"), 3), table.number(row.get("tflops"), 0),
            ", ".join(f"{error:.1e}" for error in row.get("errors", ())), ", ".join(row["models"]),
        )
        for row in found
    ]  # fmt: skip
    table.show(f"attention, forward and backward; {table.headline(environment)}", columns, cells)


if __name__ == "__main__":
    main()
