"""Training that resumes without delayed scaling's state says so once; nothing else does."""

import copy
import gc

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor.errors import FallbackWarning
from te_inductor.runtime.state import resumed
from tests.backend.delayed_programs import Blocks, te
from tests.support.trained import mlp

pytestmark = pytest.mark.usefixtures("without_tracing")

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),  # makes its state before the first step
    "rmsprop": lambda p: torch.optim.RMSprop(p),
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def train(run, optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        run(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()


def said(recwarn) -> list[str]:
    """What is said, without what is said of scales, which a new optimizer's first steps may outgrow."""
    texts = [str(one.message) for one in recwarn.list if issubclass(one.category, FallbackWarning)]
    recwarn.clear()
    return [text for text in texts if "did not suit" not in text]


def checkpoint(model, optimizer) -> tuple:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), te_inductor.state_dict(model)))


@each_optimizer
def test_a_resumed_run_says_once_that_its_state_is_lost(make, recwarn):
    model = mlp()
    optimizer = make(model.parameters())
    train(te(model), optimizer)
    assert said(recwarn) == []  # newly initialised
    weights, of_optimizer, state = checkpoint(model, optimizer)
    for loads in (False, True):
        model = mlp()
        optimizer = make(model.parameters())
        model.load_state_dict(weights)
        optimizer.load_state_dict(of_optimizer)
        if loads:
            te_inductor.load_state_dict(model, state)
        train(te(model), optimizer)
        texts = said(recwarn)
        assert len(texts) == (not loads)
    for text in texts:
        assert "trained before" in text and ": 0, 2; save te_inductor.state_dict(model)" in text
        assert "te_inductor.load_state_dict(model, state)" in text


def test_part_of_the_state_is_not_all(recwarn):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(te(model), optimizer)
    weights, of_optimizer, state = checkpoint(model, optimizer)
    other = mlp()
    again = torch.optim.AdamW(other.parameters())
    other.load_state_dict(weights)
    again.load_state_dict(of_optimizer)
    te_inductor.load_state_dict(other, {key: v for key, v in state.items() if key.startswith("0.")}, strict=False)
    train(te(other), again)
    (text,) = said(recwarn)
    assert "tells: 2; save" in text


def test_training_in_high_precision_and_then_here(recwarn):
    """A user who trained for long in bf16 has no state to load, and reads once that scales are new."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    train(te(model), optimizer, 3)
    assert len(said(recwarn)) == 1


def test_weights_alone_are_fine_tuned_in_silence(recwarn):
    model = mlp()
    model.load_state_dict(mlp().state_dict())
    train(te(model), torch.optim.AdamW(model.parameters()))
    assert said(recwarn) == []


def test_another_optimizer_of_the_same_run_is_no_resumption(recwarn):
    """A compile that is done again and a layer that was frozen are none either."""
    model = Blocks()
    model.blocks[0][0].weight.requires_grad_(False)
    run = te(model)
    first = torch.optim.AdamW(model.parameters())
    train(run, first)
    second = torch.optim.AdamW(model.parameters())
    second.load_state_dict(first.state_dict())
    train(run, second)
    torch._dynamo.reset()
    train(te(model), second)
    model.blocks[0][0].weight.requires_grad_(True)
    train(te(model), second)
    assert said(recwarn) == []


def test_silent_is_silent(recwarn):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    train(te(model, fallback="silent"), optimizer)
    assert said(recwarn) == []


def test_nothing_waits_once_steps_have_had_their_parameters():
    gc.collect()
    resumed._new.clear()
    model, other = mlp(), nn.Linear(32, 32)
    train(te(model), torch.optim.AdamW([*model.parameters(), *other.parameters()]))
    assert not len(resumed._new)


def test_a_compiled_step_is_left_alone(recwarn):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    te(model)(torch.randn(8, 32)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    assert [text for text in said(recwarn) if "trained before" in text] == []


@pytest.mark.usefixtures("without_tracing")
@pytest.mark.parametrize("trained", [False, True])
def test_a_forward_inside_of_the_step(trained):
    """The forward is in the step's closure, as Lightning runs it: a new model has nothing to lose, one that was trained
    has."""
    import copy
    import warnings

    from te_inductor.errors import FallbackWarning

    def step(model, optimizer, times):
        compiled = torch.compile(model, backend="te", options={"recipe": "delayed"})

        def closure():
            optimizer.zero_grad()
            loss = compiled(torch.ones(16, 32)).square().mean()
            loss.backward()
            return loss

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                optimizer.step(closure)
        return [one for one in caught if one.category is FallbackWarning and "without history" in str(one.message)]

    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    assert not step(model, optimizer, 3)
    if trained:
        torch._dynamo.reset()
        other = torch.nn.Linear(32, 32)
        resumed = torch.optim.AdamW(other.parameters())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert len(step(other, resumed, 3)) == 1
