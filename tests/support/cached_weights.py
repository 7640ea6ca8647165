"""Models whose weights are cast once, beside those that cast at each call."""

import copy

import torch

from te_inductor import state_dict
from tests.recipes import strict


def te(model, **options):
    options = {"recipe": "current", **options}
    options = {"fallback": strict(options["recipe"]), **options}
    return torch.compile(model, backend="te", fullgraph=True, options=options)


class Pair:
    """Two models of the same values: one casts its weights once, one at each call. Every call compares them."""

    def __init__(self, model, **options) -> None:
        self.models = model, copy.deepcopy(model)
        runs = (te(one, **options, weights=w) for one, w in zip(self.models, ("once", "each_call"), strict=True))
        self.runs = [run if model.training else torch.no_grad()(run) for run in runs]

    def __call__(self, x=None, scale: float = 1.0) -> list:
        x = torch.randn(8, 32) * scale if x is None else x
        ys = [run(x) for run in self.runs]
        assert torch.equal(*ys)
        self.check_state()
        return ys

    def check_state(self) -> None:
        """Compares the state of delayed scaling, if it is the recipe."""
        kept, other = (state_dict(model) for model in self.models)
        assert kept.keys() == other.keys() and all(torch.equal(kept[key], other[key]) for key in kept)

    def backward(self, ys) -> None:
        for y in ys:
            y.square().sum().backward()
        for a, b in zip(*(model.parameters() for model in self.models), strict=True):
            assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
        self.check_state()

    def each(self, change) -> None:
        for model in self.models:
            change(model)


RECIPES = ["current", "rowwise", "block", "delayed", "mxfp8", "nvfp4"]
