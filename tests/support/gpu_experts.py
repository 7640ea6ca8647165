"""Experts compiled on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RECIPES = ["current", "delayed", "rowwise", "block", "mxfp8", "nvfp4"]


DIM, HIDDEN, EXPERTS, EACH, TOKENS = 256, 128, 8, 2, 300


class Experts(nn.Module):
    """Choices are inputs, so that a test says which groups there are."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, transposed: bool = False) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self.transposed = transposed
        shapes = ((dim, 2 * hidden), (hidden, dim)) if transposed else ((2 * hidden, dim), (dim, hidden))
        self.gate_up, self.down = (nn.Parameter(torch.randn(EXPERTS, *shape, **made) / 16) for shape in shapes)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = (w if self.transposed else w.transpose(-2, -1) for w in (self.gate_up, self.down))
        ids, order = chosen.flatten().sort()
        ends = torch.histc(ids.int(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // EACH], gate_up, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, down, offs=ends) * weights.flatten()[order][:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return y[back].view(x.shape[0], EACH, -1).sum(1)


def chosen_by(kind: str) -> Tensor:
    """(TOKENS, EACH)"""
    if kind == "one":  # has every row
        return torch.full((TOKENS, EACH), 5, device="cuda")
    most = {"all": EXPERTS, "some": 3}[kind]
    return torch.randint(0, most, (TOKENS, EACH), device="cuda")


def inputs(kind: str = "all", dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(TOKENS, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return x, chosen_by(kind), torch.rand(TOKENS, EACH, device="cuda", dtype=torch.bfloat16)


def step(run, model: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor, dy: Tensor) -> list[Tensor]:
    model.zero_grad()
    x.grad = None
    y = run(x, chosen, weights)
    y.backward(dy)
    return [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def compiled(model: nn.Module, recipe: str, **options):
    options = {"recipe": recipe, "policy": {"*": recipe}, **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)
