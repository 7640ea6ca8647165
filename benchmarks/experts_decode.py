"""A step of generation of a Qwen3-30B-A3B-shaped model: stored experts beside bf16 Inductor.

    python -m benchmarks.experts_decode
    python -m benchmarks.experts_decode --arms bf16 te:nvfp4_weight_only te:rowwise --batches 1 16 64

Some layers with random weights and a static KV cache, and the head, each a CUDA graph; tokens are others in each
step, so that other experts are chosen. `model` is 48 layers and one head. Experts are multiplied in the two ways that
transformers has: `grouped`, rows sorted by expert, and `picked`, the matrices of each row picked, as `generate` does
in a step. The ratio is to bf16 in the same way, and to the faster one of bf16. `touched` are the bytes of the experts
that are chosen. The head is timed with the first number of sequences."""

import argparse
import itertools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness, llama_decoder, table

ARMS = ("bf16", "te:nvfp4_weight_only")
FORMS = ("grouped", "picked")
LAYERS = 48  # of the whole model


@dataclass(frozen=True)
class Shape(llama_decoder.Shape):
    """Qwen3-30B-A3B's sizes."""

    dim: int = 2048
    ffn: int = 768
    kv_heads: int = 4
    vocabulary: int = 151936
    experts: int = 128
    each: int = 8

    @property
    def head_dim(self) -> int:
        return 128


class Experts(nn.Module):
    def __init__(self, shape: Shape, form: str) -> None:
        super().__init__()
        self.shape, self.form = shape, form
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.ffn, shape.dim))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.dim, shape.ffn))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:  # (B, D), (B, each), (B, each)
        return self.grouped(x, ids, weights) if self.form == "grouped" else self.picked(x, ids, weights)

    def grouped(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        count, each = self.shape.experts, self.shape.each
        numbers, order = torch.sort(ids.flatten())
        found = numbers.float() if x.device.type == "cpu" else numbers.int()
        ends = torch.histc(found, bins=count, min=0, max=count - 1).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // each], self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        y = y * weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return y[back].view(*ids.shape, -1).sum(1)

    def picked(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        numbers, rows = ids.flatten(), x.repeat_interleave(self.shape.each, 0)
        gate, up = torch.bmm(self.gate_up[numbers], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(self.down[numbers], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y * weights.flatten()[:, None]).view(*ids.shape, -1).sum(1)


class Block(nn.Module):
    def __init__(self, shape: Shape, batch: int, form: str) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(shape.dim, eps=1e-6), nn.RMSNorm(shape.dim, eps=1e-6)
        self.attention = llama_decoder.Attention(shape, batch, torch.bfloat16)
        self.gate = nn.Linear(shape.dim, shape.experts, bias=False)
        self.experts = Experts(shape, form)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor, place: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn, mask, place)
        h = self.norm(x).flatten(0, 1)
        weights, ids = self.gate(h).float().softmax(-1).topk(self.experts.shape.each)
        weights = (weights / weights.sum(-1, keepdim=True)).to(h.dtype)
        return x + self.experts(h, ids, weights).unsqueeze(1)


def parse() -> argparse.Namespace:
    parser = harness.arguments(__doc__, "experts_decode", device="cuda", experts=128)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--layers", type=int, default=8, help="more than caches hold")
    parser.add_argument("--steps", type=int, default=50, help="that are timed; the median counts")
    return parser.parse_args()


def layers_of(shape: Shape, batch: int, form: str, device: str) -> nn.ModuleList:
    """Makes layers with random weights, of the size that training starts from."""
    with torch.device("meta"):
        blocks = nn.ModuleList(Block(shape, batch, form) for _ in range(shape.layers))
    blocks = blocks.to(torch.bfloat16).to_empty(device=device).requires_grad_(False)
    for name, parameter in blocks.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        else:
            parameter.normal_(std=0.02)
    for buffer in blocks.buffers():
        buffer.normal_()
    return blocks.eval()


def prepare(arm: str, model: nn.Module) -> dict[str, Any]:
    """Store the weights as the arm does; what `torch.compile` is to be called with."""
    kind, _, recipe = arm.partition(":")
    if kind != "te":
        return {}
    from te_inductor import quantize_

    quantize_(model, recipe)
    return {"backend": harness.te_backend(), "options": {"recipe": "none", "fallback": "error"}}


def graph_ms(step: Any, x: Tensor, options: argparse.Namespace) -> float:
    """The milliseconds of a CUDA graph, with another x in each replay."""
    run = harness.captured(step, options.device)
    return statistics.median(harness.times_ms(run, options.device, options.steps, 3, lambda: x.normal_()))


def layer_ms(arm: str, form: str, batch: int, options: argparse.Namespace) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = Shape(layers=options.layers, experts=options.experts, each=min(8, options.experts))
    blocks, device = layers_of(shape, batch, form, options.device), options.device
    how = prepare(arm, blocks)
    for block in blocks:
        block.compile(fullgraph=True, **how)
    x = torch.randn(batch, 1, shape.dim, device=device, dtype=torch.bfloat16)
    angles = torch.randn(shape.head_dim // 2, device=device)
    turn = torch.stack((angles.cos(), angles.sin()))
    place = torch.full((1,), shape.context // 2, device=device)
    mask = (torch.arange(shape.context, device=device) <= place)[None, None, None]

    def step() -> Tensor:
        y = x
        for block in blocks:
            y = block(y, turn, mask, place)
        return y

    with torch.no_grad():
        return graph_ms(step, x, options) / shape.layers


def head_ms(arm: str, batch: int, options: argparse.Namespace) -> float:
    torch._dynamo.reset()
    shape = Shape()
    head = llama_decoder.Head(shape).to(options.device, torch.bfloat16).requires_grad_(False)
    head.compile(fullgraph=True, **prepare(arm, head))
    x = torch.randn(batch, 1, shape.dim, device=options.device, dtype=torch.bfloat16)
    with torch.no_grad():
        return graph_ms(lambda: head(x), x, options)


def touched(arm: str, batch: int) -> float:
    """Bytes a layer of the experts that are chosen, if routing is even."""
    shape = Shape()
    chosen = shape.experts * (1 - (1 - shape.each / shape.experts) ** batch)
    bits = {"te:nvfp4_weight_only": 4.5, "te:rowwise": 8.0}.get(arm, 16.0)
    return chosen * 3 * shape.ffn * shape.dim * bits / 8


def main() -> None:
    options = parse()
    environment, rows = harness.environment(options.device), []
    heads = {arm: head_ms(arm, options.batches[0], options) for arm in options.arms}
    for batch, arm in itertools.product(options.batches, options.arms):
        head = heads[arm]
        for form in options.forms:
            layer = layer_ms(arm, form, batch, options)
            rows.append({"arm": arm, "batch": batch, "form": form, "layer_ms": layer, "head_ms": head})
            rows[-1] |= {"model_ms": LAYERS * layer + head, "touched": touched(arm, batch)}
    for row in rows:
        plain = [one for one in rows if one["arm"] == "bf16" and one["batch"] == row["batch"]]
        same = [one for one in plain if one["form"] == row["form"]]
        row["of_same"] = same[0]["model_ms"] / row["model_ms"] if same else None
        row["of_best"] = min(one["model_ms"] for one in plain) / row["model_ms"] if plain else None
    harness.write_json(options.json, {"environment": environment, "rows": rows})
    columns = ("arm", "batch", "experts", "us a layer", "us of the head", "ms a step", "MB touched", "x same", "x best")
    shown = [
        (
            row["arm"],
            row["batch"],
            row["form"],
            table.number(row["layer_ms"], 1, 1e3),
            table.number(row["head_ms"], 1, 1e3),
            table.number(row["model_ms"]),
            table.number(row["touched"], 1, 1e-6),
            table.number(row["of_same"]),
            table.number(row["of_best"]),
        )
        for row in rows
    ]
    table.show("A step of generation, Qwen3-30B-A3B-shaped", columns, shown, table.headline(environment))


if __name__ == "__main__":
    main()
