"""Parameters with main_grad, as training frameworks have them."""

import torch
from torch import nn


def te(model, **options):
    options = {"recipe": "current", "fallback": "error", **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


def with_totals(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        if p.dim() == 2:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
            p.grad_added_to_main_grad = False
    return model
