"""Kept copies between a forward and its backward, after an interruption, and of weights that groups share."""

import copy

import pytest
import torch
from torch import nn

from te_inductor import state_dict
from te_inductor.errors import FallbackWarning
from te_inductor.recipes import Quantizer
from te_inductor.runtime.extra_inputs import GraphCall
from te_inductor.runtime.weights import cached_weights
from te_inductor.runtime.weights.cached_inputs import CachedInput, CachedInputs
from tests.support.cached_weights import RECIPES, te
from tests.support.trained import mlp

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")


def swapped(model: nn.Module, run, x: torch.Tensor, factor: float) -> list[torch.Tensor]:
    """Gradients where other weights are used for a forward between a forward and its backward, as averages are."""
    y, own = run(x), [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(factor)  # without a trace in version counters
    teacher = run(x).detach()
    for p, value in zip(model.parameters(), own, strict=True):
        p.data.copy_(value)
    (y - teacher).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.traced
@pytest.mark.quick("rowwise", "nvfp4")
@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8", "nvfp4"])
def test_other_weights_for_a_forward_and_back(recipe):
    model, x = mlp(), torch.randn(8, 32)
    runs = {copy.deepcopy(model): how for how in ("once", "each_call")}
    found, expected = (swapped(m, te(m, weights=how, recipe=recipe), x, 0.2) for m, how in runs.items())
    assert all(map(torch.equal, found, expected))


@pytest.mark.traced
def test_a_backward_whose_forward_was_the_last_does_not_look(monkeypatch):
    looks, refresh = [], cached_weights.refresh
    monkeypatch.setattr(cached_weights, "refresh", lambda found: (looks.append(found), refresh(found)))
    run = te(mlp(), weights="once")
    for _ in range(3):
        run(torch.randn(8, 32)).sum().backward()
    assert len(looks) == 3
    first, second = run(torch.randn(8, 32)), run(torch.randn(8, 32))
    second.sum().backward()
    assert len(looks) == 5
    first.sum().backward()
    assert len(looks) == 6


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_kernel_that_fails(recipe, monkeypatch):
    """A kernel fails behind its work, as one that does not compile: the call goes on by plain torch, with the state of
    one look."""
    refresh = cached_weights.refresh

    def failing(looks):
        refresh(looks)
        raise RuntimeError("injected")

    monkeypatch.setattr("te_inductor.passes.pre_grad.rewrite.extras.refresh_on", lambda device: failing)
    model, x = mlp(), torch.randn(8, 32)
    twin = copy.deepcopy(model)
    run, plain = te(model, recipe=recipe, weights="once", fallback="warn"), te(twin, recipe=recipe)
    with pytest.warns(FallbackWarning, match="(?s)by plain torch, because a kernel failed:.*injected"):
        found = run(x)
    for _ in range(2):
        assert torch.equal(found, plain(x))
        found = run(x)
    plain(x)
    states = state_dict(model), state_dict(twin)
    assert states[0].keys() == states[1].keys() and all(map(torch.equal, states[0].values(), states[1].values()))


@pytest.mark.quick("current-0", "rowwise-1")
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_an_interruption_leaves_no_half_of_a_weight(recipe, place, monkeypatch):
    """Ctrl-C while copies are written, and then the weights they were made of before."""
    model, x = mlp(), torch.randn(8, 32)
    run, other = te(model, recipe=recipe, weights="once"), te(copy.deepcopy(model), recipe=recipe, weights="each_call")
    expected = other(x)
    assert torch.equal(run(x), expected)
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.data.mul_(3).add_(0.1)
    made, make = [], cached_weights._make

    def interrupted(kept, *rest):
        make(kept, *rest)
        made.append(kept)
        if len(made) > place:
            raise KeyboardInterrupt

    monkeypatch.setattr(cached_weights, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(x)
    monkeypatch.setattr(cached_weights, "_make", make)
    model.load_state_dict(before)
    assert torch.equal(run(x), expected)


class Gated(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.up = gate, nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.gate(x) * self.up(x)


def test_merged_weights_that_share_their_first(casts):
    gate = nn.Linear(32, 32, bias=False)
    runs = [te(Gated(gate), weights="once") for _ in range(2)]
    for _ in range(3):
        for run in runs:
            run(torch.randn(8, 32)).sum().backward()
    assert len(casts) == 2


def test_the_same_bits_of_another_dtype():
    model, x = mlp().bfloat16(), torch.randn(8, 32)
    run = te(model, weights="once")
    run(x.bfloat16())
    for p in model.parameters():
        p.data = p.data.view(torch.float16)
    assert torch.equal(run(x.half()), te(copy.deepcopy(model), weights="each_call")(x.half()))


def test_each_device_looks_at_its_own():
    """Layers of one graph may be on several."""
    weights = [torch.randn(32, 32), torch.randn(32, 32, device="meta")]
    found = []
    spec = cached_weights.Spec(Quantizer("e4m3"), False, 1)
    inputs = CachedInputs(
        lambda device: lambda looks: found.append((device.type, [look.weights[0].device.type for look in looks])),
        weights=[CachedInput([place], spec, False) for place in range(2)],
    )
    inputs.tensors(GraphCall(weights))
    assert found == [("cpu", ["cpu"]), ("meta", ["meta"])]
