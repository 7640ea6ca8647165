"""A layer of few rows on a GPU."""

import torch
from torch import nn

import te_inductor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(512), nn.Linear(512, 2048), nn.Linear(1024, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def layer(recipe: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = Mlp().to("cuda", torch.bfloat16).requires_grad_(False)
    te_inductor.quantize_(model, recipe)
    return model, torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
