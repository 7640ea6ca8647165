"""Parts of a model that are compiled themselves: Dynamo traces them into the graph of what calls them, with the options of
that one. What they were to have is named."""

import warnings

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor.errors import FallbackWarning

pytestmark = pytest.mark.usefixtures("without_tracing")

INNER = {"recipe": "delayed", "weights": "once", "fallback": "silent"}
OUTER = {"recipe": "current"}


def compiled(part, **options):
    return torch.compile(part, backend="te", options=options)


class Model(nn.Module):
    def __init__(self, part) -> None:
        super().__init__()
        self.sub, self.last = part, nn.Linear(32, 32)

    def forward(self, x):
        return self.last(self.sub(x))


def in_place(**options):
    part = nn.Linear(32, 32)
    part.compile(backend="te", options=options)
    return part


def function(**options):
    return compiled(nn.Linear(32, 32).forward, **options)


PARTS = {
    "a module": lambda **options: compiled(nn.Linear(32, 32), **options),
    "a module in place": in_place,
    "in a list": lambda **options: nn.Sequential(nn.ReLU(), compiled(nn.Linear(32, 32), **options)),
    "a method": function,
}
NAMES = {"in a list": "sub.1", "a method": "Linear.forward"}
X = torch.randn(16, 32)


def lost(model, **options):
    """What is said of a compile, and the pairs of option and part that `explain` has."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(model, **options)(X)
    said = "\n".join(str(one.message) for one in caught if one.category is FallbackWarning)
    torch._dynamo.reset()
    report = te_inductor.explain(model, X, options={**options, "fallback": "silent"})
    return said, [(one.option, one.fqn) for one in report.unmet]


@pytest.mark.parametrize("part", PARTS)
def test_what_a_part_was_to_have_is_named(part):
    said, unmet = lost(Model(PARTS[part](**INNER)), **OUTER)
    name = NAMES.get(part, "sub")
    assert unmet == [("recipe", name), ("weights", name)]
    assert "option 'recipe' does not reach, because Dynamo traces a compiled part into the graph" in said
    assert said.count(name) == 2


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_said_where_nothing_is_lost(part):
    for inner in (OUTER, {"fallback": "error"}, {}):
        assert lost(Model(PARTS[part](**inner)), **OUTER) == ("", [])


def test_the_model_itself_is_asked_about_with_other_options():
    model = compiled(Model(nn.Linear(32, 32)), **INNER)
    for one in (model, compiled(model._orig_mod.forward, **INNER)):
        report = te_inductor.explain(one, X, options=OUTER)
        assert not report.unmet and {site.recipe for site in report.sites} == {"current"}


def test_a_part_that_stands_in_another_graph_has_its_own():
    class Broken(Model):
        def forward(self, x):
            return self.last(outside(self.sub, x))

    @torch._dynamo.disable(recursive=False)
    def outside(part, x):
        return part(x)

    assert lost(Broken(PARTS["a module"](**INNER)), **OUTER) == ("", [])


def test_what_is_lost_is_an_error_where_that_was_asked_for():
    model = compiled(Model(PARTS["a module"](**INNER)), **OUTER, fallback="error")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"FallbackError(.|\n)*'recipe' does not reach"):
        model(X)
