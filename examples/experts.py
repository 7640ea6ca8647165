"""Loss curves of a small mixture of experts, under each recipe beside bf16: ``python -m examples.experts``, on a CPU or a
GPU. Exits with 1 where a recipe's last losses are further from bf16's than TOLERANCES allow."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.corpus import Corpus, standard_library

RECIPES = ("current", "delayed", "rowwise", "block", "mxfp8", "nvfp4")
TOLERANCE, TOLERANCES = 0.01, {"nvfp4": 0.03, "mxfp4": 0.03}  # of bf16's loss
EMULATED = ("mxfp8", "mxfp4", "nvfp4")  # where that is what is asked for, it needs no warning
WIDTH, INNER, EXPERTS, EACH, CONTEXT, BATCH = 128, 256, 8, 2, 64, 16


class Mixture(nn.Module):
    """A router and SwiGLU experts, as grouped products in bf16."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, experts: int = EXPERTS, each: int = EACH) -> None:
        super().__init__()
        self.each = each  # experts that a token asks
        self.gate = nn.Linear(width, experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, inner, width) / width**0.5) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:  # (T, width)
        scores, ids = self.gate(x).softmax(-1).topk(self.each, dim=-1)
        ids, order = torch.sort(ids.flatten())
        experts = self.gate.out_features
        ends = torch.histc(ids.float(), bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
        rows = x.bfloat16()[order // self.each]
        h = F.silu(self.product(rows, self.w1, ends)) * self.product(rows, self.w3, ends)
        y = self.product(h, self.w2, ends) * scores.flatten()[order][:, None]
        return y[torch.argsort(order)].view(-1, self.each, x.shape[-1]).sum(1).to(x.dtype)

    @staticmethod
    def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, w.bfloat16().transpose(-2, -1), offs=ends)


class Language(nn.Module):
    """Predicts which byte is next, by those before it: each of the blocks mixes a byte with earlier ones, then asks
    experts."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.mixes = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 4) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * blocks + 1))
        self.experts = nn.ModuleList(Mixture() for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T)
        x = self.embedding(tokens)
        for place, (mix, experts) in enumerate(zip(self.mixes, self.experts, strict=True)):
            before = F.pad(self.norms[2 * place](x).transpose(1, 2), (3, 0))
            x = x + mix(before).transpose(1, 2)
            x = x + experts(self.norms[2 * place + 1](x).flatten(0, 1)).view_as(x)
        return self.head(self.norms[-1](x))


def curve(recipe: str | None, steps: int, seed: int, device: str, corpus: Corpus) -> list[float]:
    """Losses, nats a byte; of Inductor in bf16 without a recipe."""
    torch.manual_seed(seed)
    torch.compiler.reset()
    model = Language().to(device)
    policy = {f"experts.*.{name}": recipe for name in ("w1", "w2", "w3")} | {"*": "none"}
    options: Any = {"policy": policy, "fallback": "silent" if recipe in EMULATED else "error"}
    run = (
        torch.compile(model, backend="inductor")
        if recipe is None
        else torch.compile(model, backend="te", options=options)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses = []
    for tokens in corpus.batches("train", steps=steps, batch=BATCH, context=CONTEXT, seed=seed):
        tokens = tokens.to(device)
        loss = F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.experts", description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of experts.json (default: out)")
    args = parser.parse_args(argv)
    corpus, last = standard_library(), min(50, args.steps // 2)
    curves: dict[str, list[float]] = {}
    failed = False
    print("| arm | step 1 | middle | mean of the last steps | against bf16 | apart |\n|---|---|---|---|---|---|")
    for recipe in (None, *args.recipes):
        losses = curves[recipe or "bf16"] = curve(recipe, args.steps, args.seed, args.device, corpus)
        end, expected = fmean(losses[-last:]), fmean(curves["bf16"][-last:])
        off = end / expected - 1
        apart = max(abs(one / other - 1) for one, other in zip(losses, curves["bf16"], strict=True))
        failed |= not abs(off) <= TOLERANCES.get(recipe or "", TOLERANCE)
        figures = (f"{losses[0]:.4f}", f"{losses[len(losses) // 2]:.4f}", f"{end:.4f}", f"{off:+.2%}", f"{apart:.2%}")
        print(f"| {' | '.join((recipe or 'bf16', *figures))} |", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "experts.json").write_text(json.dumps({"steps": args.steps, "seed": args.seed, "losses": curves}))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
