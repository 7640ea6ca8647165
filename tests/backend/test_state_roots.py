"""One quantizer, one state: whatever root its module's path is seen from, and never two modules' in one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_inductor
from te_inductor.errors import StateError
from te_inductor.runtime.state.store import states_of
from tests.backend.delayed_programs import te

pytestmark = pytest.mark.usefixtures("without_tracing")


def scales(model: nn.Module, slot: str = "input") -> dict[str, float]:
    end = f"{slot}.scale"
    return {
        key.removesuffix(end).rstrip("."): v.item()
        for key, v in te_inductor.state_dict(model).items()
        if key.endswith(end)
    }


def train(run, steps: int = 1, x: torch.Tensor | None = None) -> None:
    for _ in range(steps):
        run(torch.randn(8, 32) if x is None else x).square().sum().backward()


class OfAnother(nn.Module):
    """A head as GPT-2's authors wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return F.linear(self.layer(x) * 1e-4, self.embedding.weight)


class OfAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(32, 32))])

    def forward(self, x):
        return (1e-4 * x) @ self.weights[0]


class Around(nn.Module):
    """A loss around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square()


def in_a_function(model: nn.Module):
    return te(lambda x: model(x).square())


@pytest.mark.quick("True-module-OfAnother", "True-function-OfAList", "False-module-OfAList", "False-function-OfAnother")
@pytest.mark.parametrize("make", [OfAnother, OfAList])
@pytest.mark.parametrize("around", [lambda model: te(Around(model)), in_a_function], ids=["module", "function"])
@pytest.mark.parametrize("inner_first", [True, False])
def test_a_region_around_a_region_has_its_state(make, around, inner_first):
    model, x = make(), torch.randn(8, 32)
    first, second = (te(model), around(model)) if inner_first else (around(model), te(model))
    train(first, 2, x)
    before = scales(model)
    assert before and all(scale != 1 for scale in before.values())
    with torch.no_grad():  # reads state and makes none
        second(x)
    assert scales(model) == before


@pytest.mark.parametrize("make", [OfAnother, OfAList])
def test_state_saved_from_a_region_around_is_loaded(make):
    model, other, x = make(), make(), torch.randn(8, 32)
    train(te(Around(model)), 2, x)
    state = te_inductor.state_dict(model)
    assert te_inductor.load_state_dict(other, state) == ([], [])
    with torch.no_grad():
        te(other)(x)
    after = te_inductor.state_dict(other)
    assert list(after) == list(state) and all(torch.equal(after[key], state[key]) for key in state)


class TwoNames(nn.Module):
    """One module that a model holds and a part of it too, each of which uses it: as the heads of a detector."""

    def __init__(self, name: str) -> None:
        super().__init__()
        head = nn.Linear(32, 32, bias=False)
        self.name, self.decoder = name, nn.Module()
        setattr(self, name, head)
        self.decoder.head = head

    def forward(self, x):
        return getattr(self, self.name)(x * 1e6), self.decoder.head(x.cos())


@pytest.mark.parametrize("name", ["head", "other"])
@pytest.mark.parametrize("around", [lambda model: model, Around], ids=["alone", "around"])
def test_a_path_that_ends_with_another_is_another_module(name, around):
    model, x = TwoNames(name), torch.randn(8, 32)
    run = te(lambda x: sum(y.sum() for y in model(x))) if around is Around else te(model)
    for _ in range(2):
        y = run(x)
        (y if around is Around else y[0] + y[1]).sum().backward()
    found = scales(model)
    assert found[name] < 1e-3 < 1 < found["decoder.head"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x) * 100)


def test_a_tied_weights_modules_are_not_told_apart_from_inside_one():
    model = Tied()
    train(te(model), 2)
    state = te_inductor.state_dict(model)
    assert len(set(scales(model).values())) == 2
    for call in (te_inductor.state_dict, lambda module: te_inductor.load_state_dict(module, state)):
        with pytest.raises(StateError, match="serves first and second, whose state cannot be told apart from inside"):
            call(model.second)


def test_a_region_that_may_be_either_of_two_suits_both_and_changes_neither():
    model, x = Tied(), torch.randn(8, 32)
    train(te(model), 2, x)
    before = te_inductor.state_dict(model)
    with torch.no_grad():
        y, expected = te(model.second)(100 * model.first(x)), model(x)
    assert (y - expected).norm() < 0.1 * expected.norm()
    train(te(model.second), 2, x)
    torch._dynamo.reset()
    train(te(model), 1, x)
    after = scales(model)
    assert after["first"] == before["first.input.scale"].item()


def test_what_was_trained_alone_serves_two_modules_of_a_graph_apart():
    """Its state may be either's: both begin with a copy."""
    model, x = Tied(), torch.randn(8, 32)
    train(te(model.second), 2, x)
    train(te(model), 3, x)
    assert len({id(state) for p in model.parameters() for state in states_of(p).values()}) == 7


@pytest.mark.parametrize("name", ["blocks[0]", "a]b", "in 'a'"])
def test_names_with_brackets_load_back(name):
    model, other = (nn.ModuleDict({"blocks": nn.ModuleDict({name: nn.Linear(32, 32)})}) for _ in range(2))
    train(te(model["blocks"][name]))
    state = te_inductor.state_dict(model)
    assert f"blocks.{name}.input.scale" in state
    assert te_inductor.load_state_dict(other, state) == ([], [])
    assert list(te_inductor.state_dict(other)) == list(state)


WRONG = {
    "not invertible": (
        {"input.scale": torch.tensor(1e-39)},
        "input.scale is .*, expected one positive number that fp32 can",
    ),
    "zero in fp32": (
        {"input.scale": torch.tensor(1e-60, dtype=torch.float64)},
        "input.scale is 1e-60, expected one positive",
    ),
    "inf in fp32": (
        {"input.scale": torch.tensor(1e60, dtype=torch.float64)},
        "input.scale is 1e.60, expected one positive",
    ),
    "complex": (
        {"input.scale": torch.tensor(1 + 2j)},
        r"input.scale is a Tensor .*, expected a tensor of real numbers",
    ),
    "negative": ({"input.amax_history": torch.tensor([0.0, -3.0])}, "input.amax_history holds -3, expected magnitudes"),
    "a path": ("state.pt", r"state is a str \('state.pt'\), expected what te_inductor.state_dict returned"),
}


@pytest.mark.parametrize("state, text", WRONG.values(), ids=WRONG.keys())
def test_wrong_entries(state, text):
    with pytest.raises(StateError, match=text):
        te_inductor.load_state_dict(nn.Linear(32, 32), state, strict=False)
