"""Models with main_grad, compiled on a GPU."""

import torch


def te(model, recipe, **options):
    options = {"policy": {"*": recipe}, "fallback": "error", **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)
