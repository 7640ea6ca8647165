"""The line that a warning names, what errors of saved models and pictures say, and graphs that may be frozen."""

import inspect
import warnings

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor.api import accuracy_figures
from te_inductor.api.accuracy_figures import AccuracyReport
from te_inductor.errors import FallbackWarning, OptionError, StoredWeightError
from tests import uncompiled


def test_a_warning_names_the_line_that_calls_the_model():
    compiled = torch.compile(nn.Linear(63, 65), backend="te", options={"recipe": "current"})
    with uncompiled.patched(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FallbackWarning)
        compiled(torch.randn(8, 63))
        line = inspect.currentframe().f_lineno - 1
    [one] = [one for one in said if one.category is FallbackWarning]
    assert (one.filename, one.lineno) == (__file__, line)


def test_a_heat_map_without_matplotlib_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy_figures, "find_spec", lambda name: None)
    with pytest.raises(
        OptionError, match="found no matplotlib, expected it to draw the picture; pip install matplotlib"
    ):
        AccuracyReport().heat_map(tmp_path / "picture.png")


def test_what_saves_a_model_is_told_how_stored_weights_are_saved():
    """`save_pretrained` asks a tensor for its storage."""
    weight = te_inductor.quantize_(nn.Sequential(nn.Linear(64, 64)), "rowwise")[0].weight
    with pytest.raises(StoredWeightError, match=r"for save_pretrained store weights by from_pretrained\(…, quant"):
        weight.storage()


@pytest.mark.usefixtures("no_caches")
def test_delayed_scaling_in_a_graph_that_may_be_frozen():
    """A graph that may be frozen holds its parameters behind what delayed scaling puts at its begin."""
    x, found = torch.randn(32, 64), []
    for freezing in (True, False):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        options = {"recipe": "delayed", "fallback": "error"}
        with uncompiled.patched(), torch._dynamo.config.patch(prepare_freezing=freezing):
            y = torch.compile(model, backend="te", fullgraph=True, options=options)(x)
        found.append([y, *torch.autograd.grad(y.sum(), list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
