"""torch.export takes neither a backend nor a region of autocast: it is said, once an export, with the remedy."""

import warnings

import pytest
import torch
from torch import nn

from te_inductor import autocast, quantize_
from te_inductor.errors import FallbackError, FallbackWarning

X = torch.randn(16, 32)


class Model(nn.Module):
    def __init__(self, region=None) -> None:
        super().__init__()
        self.lin, self.region = nn.Linear(32, 32), region

    def forward(self, x):
        if self.region is None:
            return self.lin(x)
        with autocast(**self.region):
            return self.lin(x)


def compiled(model, **options):
    return torch.compile(model, backend="te", options=options or None)


def by_method(model):
    model.compile(backend="te")
    return model


def said(model, strict=False) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = torch.export.export(model, (X,), strict=strict)
    assert torch.equal(program.module()(X), model(X)) or isinstance(model, torch._dynamo.OptimizedModule)
    return [str(one.message) for one in caught if one.category is FallbackWarning]


@pytest.mark.parametrize(
    "make", [compiled, by_method, lambda m: nn.Sequential(compiled(m))], ids=["", "method", "inside"]
)
def test_a_compiled_model(make):
    model = make(Model())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.export.export(model, (X,))
    [text] = [str(one.message) for one in caught if one.category is FallbackWarning]
    assert 'leaves out backend="te" and its recipe' in text
    assert "te_inductor.lower(program" in text and "te_inductor.quantize_(model, 'rowwise')" in text


def test_as_its_options_want_it():
    assert not said(compiled(Model(), fallback="silent"))
    with pytest.raises(FallbackError, match="leaves out backend"):
        torch.export.export(compiled(Model(), fallback="error"), (X,))


@pytest.mark.parametrize("strict", [False, True])
def test_an_autocast_inside(strict):
    [text] = said(Model({"recipe": "current"}), strict)
    assert "torch.export takes no recipe" in text and "quantize_" in text
    assert not said(Model({"enabled": False}), strict)


@pytest.mark.parametrize("strict", [False, True])
def test_an_autocast_around(strict):
    compiled(Model())  # loads the backend
    with autocast(recipe="current"):
        [text] = said(Model(), strict)
    assert "torch.export takes no recipe" in text


def test_what_says_nothing():
    assert not said(Model()) and not said(torch.compile(Model(), backend="eager"))
    assert not said(quantize_(Model(), "nvfp4_weight_only"))


def test_torchs_entry_is_the_one_that_is_replaced():
    """`compat.before_export` counts on it; where torch has a hook, that has to go."""
    from torch.export import _trace

    assert _trace._export.__wrapped__.__module__ == "torch.export._trace"
