"""Note [A first step] in passes/pre_grad/rewrite/first_step.py: a quantizer without history scales by its own amax."""

import copy
import math

import pytest
import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor import compat
from te_inductor.errors import FallbackWarning
from te_inductor.passes.pre_grad.rewrite import first_step
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.state import state_inputs
from te_inductor.runtime.state.store import has_history
from tests.backend.delayed_programs import state, te
from tests.support.first_steps import Residual, errors

pytestmark = pytest.mark.usefixtures("without_tracing")


def gradients(run, model, x, scale=2.0**-20):
    model.zero_grad()
    (run(x).float().square().mean() * scale).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.traced
@pytest.mark.quick("dtype0-plain", "dtype0-own algorithm", "dtype1-checkpointed")
@pytest.mark.parametrize("how", ["plain", "checkpointed", "once", "margin", "own algorithm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_gradients_are_as_good_as_those_of_current_scaling(how, dtype):
    """The gradients are below 2**-24, and were all lost."""
    wrap = (lambda block, x: checkpoint(block, x, use_reentrant=False)) if how == "checkpointed" else None
    model, x = Residual(wrap=wrap).to(dtype), torch.randn(512, 64, dtype=dtype)
    fields = {"margin": 2} if how == "margin" else {}
    if how == "own algorithm":
        fields = {"scaling_factor_compute_algo": half_of_the_range}
    options = {"weights": "once"} if how == "once" else {}
    exact = gradients(model, model, x)
    current = errors(gradients(te(model, recipe="current"), model, x), exact)
    torch._dynamo.reset()
    run = te(model, recipe=DelayedScaling(**fields), **options)
    steps = [errors(gradients(run, model, x), exact) for _ in range(3)]
    for step in steps:
        assert max(step) <= 1.5 * max(current) + 0.01


def half_of_the_range(amax, scale, fp8_max, recipe):
    return fp8_max / 2 / amax


def test_later_steps_run_by_their_history_and_ask_nobody(monkeypatch):
    asked = []
    note_history = state_inputs.note_history
    monkeypatch.setattr(state_inputs, "note_history", lambda states: (asked.append(len(states)), note_history(states)))
    model, x = Residual(layers=1), torch.randn(64, 64)
    run = te(model)
    for _ in range(2):
        gradients(run, model, x, 1.0)
    asked.clear()
    for _ in range(3):
        gradients(run, model, x, 1.0)
    assert not any(asked)
    y = run(1000 * x)  # saturates, as delayed scaling does
    assert (y - 1000 * x).norm() < 0.1 * (model(1000 * x) - 1000 * x).norm()


@pytest.mark.thorough
@pytest.mark.codegen
def test_forwards_before_the_first_backward():
    """Microbatches are in flight: no gradient's scale is known before a backward."""
    model, x = Residual(), torch.randn(512, 64)
    exact, run = gradients(model, model, x), te(model)
    model.zero_grad()
    losses = [run(x).square().mean() * 2.0**-20 for _ in range(24)]
    for loss in losses:
        loss.backward()
    assert max(errors([p.grad / 24 for p in model.parameters()], exact)) < 0.2


@pytest.mark.thorough
@pytest.mark.codegen
def test_what_a_checkpoint_computes_again_is_the_graph_that_it_ran():
    """Two microbatches are in flight, where the one between them was the first to have history."""
    model = Residual(layers=1)
    run = te(model, fallback="silent")

    def forward():
        x = torch.randn(512, 64, requires_grad=True)
        return x, checkpoint(run, x, use_reentrant=False)

    def check(x, y):
        found = gradients(lambda _: y, model, x)
        assert max(errors(found, gradients(model, model, x))) < 0.2

    first, second = forward(), forward()
    check(*first)
    third = forward()
    check(*second)
    check(*third)


def test_a_gradient_that_is_zero_at_first():
    """It is an adapter's, whose second factor starts at zero."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x):
            return x + self.b(self.a(x))

    model, x = Adapter(), torch.randn(128, 64)
    run = te(model)
    assert not gradients(run, model, x)[0].any()
    with torch.no_grad():
        model.b.weight.normal_(std=0.1)
    found = gradients(run, model, x)
    assert max(errors(found, gradients(model, model, x))) < 0.2


class Heads(nn.Module):
    """Two heads, of which the loss may leave one out."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = Residual(layers=1), nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        x = self.body(x)
        return torch.stack([head(x) for head in self.heads])


def forwards_alone(run, x):
    run(x)


def zero_loss(run, x):
    (run(x) * 0).sum().backward()


def one_head(run, x):
    (run(x)[0].float().square().mean() * 2.0**-20).backward()


def test_gradients_that_come_late():
    """The first gradient that a layer sees is cast by its own amax, however many calls are behind, and so are those of
    the layers below."""
    model, x = Heads(), torch.randn(256, 64)
    exact = gradients(model, model, x)
    current = errors(gradients(te(model, recipe="current"), model, x), exact)
    torch._dynamo.reset()
    for before in (forwards_alone, zero_loss, one_head):
        other = copy.deepcopy(model)  # which runs the same graph
        run = te(other)
        for _ in range(40):
            before(run, x)
        for _ in range(3):
            assert max(errors(gradients(run, other, x), exact)) <= 1.5 * max(current) + 0.01, before


def test_what_never_has_a_gradient_is_asked_for_ever_more_seldom(monkeypatch):
    """It is said, once, that own amaxes are slow."""
    asked = []
    note_history = state_inputs.note_history
    monkeypatch.setattr(state_inputs, "note_history", lambda states: (asked.append(len(states)), note_history(states)))
    model, x = nn.Linear(64, 64), torch.randn(16, 64)
    run = te(model, fallback="warn")
    with pytest.warns(FallbackWarning, match="no amax of some tensors of these sites") as said:
        for _ in range(state_inputs.MANY_CALLS + 10):
            run(x)
    assert len(asked) < 8 + 8 * math.log2(state_inputs.MANY_CALLS / 8)
    assert len([one for one in said if "no amax of some tensors" in str(one.message)]) == 1


def test_a_copy_of_a_model_has_a_first_step_of_its_own():
    """It runs in a graph that was compiled when all had history: by the eager runtime, once."""
    model, x = Residual(layers=2), torch.randn(512, 64)
    run = te(model)
    for _ in range(2):
        gradients(run, model, x)
    torch._dynamo.reset()
    gradients(te(model), model, x)
    twin = copy.deepcopy(model)
    found = gradients(te(twin), twin, x)
    assert max(errors(found, gradients(twin, twin, x))) < 0.2
    assert state(twin).keys() == state(model).keys()


def test_a_copy_that_stays_without_history_is_compiled_for(monkeypatch):
    """The compile comes after a few calls by the eager runtime, and once."""
    compiled = []
    compile_fx = compat.compile_fx
    monkeypatch.setattr(compat, "compile_fx", lambda *args: (compiled.append(True), compile_fx(*args))[1])
    monkeypatch.setattr(state_inputs, "_first_steps_recur", False)
    model, x = Residual(layers=1), torch.randn(64, 64)
    run = te(model)
    for _ in range(2):
        gradients(run, model, x)
    torch._dynamo.reset()
    compiled.clear()
    run, other = te(model), te(copy.deepcopy(model))
    counts = []
    for _ in range(3 * state_inputs.FEW_CALLS):
        run(x), other(x)
        counts.append(len(compiled))
    assert counts[state_inputs.FEW_CALLS - 1] == 1
    assert set(counts[state_inputs.FEW_CALLS :]) == {3}


def test_blocks_that_share_a_graph():
    blocks = nn.Sequential(*(Residual(layers=1) for _ in range(3)))
    x = torch.randn(512, 64)
    exact = gradients(blocks, blocks, x)
    for block in blocks:
        block.compile(backend="te", fullgraph=True, options={"recipe": "delayed", "fallback": "error"})
    assert max(errors(gradients(blocks, blocks, x), exact)) < 0.2


def test_inference_without_history():
    model, x = Residual(), 1000 * torch.randn(64, 64)
    with torch.no_grad():
        y = te(model, fallback="silent")(x)
        assert (y - model(x)).norm() < 0.1 * (model(x) - x).norm()


def test_losses_of_the_first_steps_are_those_of_current_scaling():
    def losses(recipe):
        torch.manual_seed(3)
        torch._dynamo.reset()
        model, x = Residual(layers=3), torch.randn(256, 64)
        target, run = torch.randn(256, 64), te(model, recipe=recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (run(x) - target).square().mean()
            (loss * 2.0**-16).backward()
            optimizer.step()
            found.append(loss.item())
        return found

    current, delayed = losses("current"), losses(DelayedScaling())
    assert current[-1] < 0.7 * current[0]
    assert abs(delayed[-1] - current[-1]) < 0.05 * (current[0] - current[-1])


def test_loaded_state_is_history():
    model, x = Residual(layers=1), torch.randn(64, 64)
    gradients(te(model), model, x, 1.0)
    twin = copy.deepcopy(model)
    te_inductor.load_state_dict(twin, state(model))
    y = te(twin)(1000 * x)
    assert (y - 1000 * x).norm() < 0.1 * (model(1000 * x) - 1000 * x).norm()


def test_code_of_its_graph_is_written_when_it_is_read():
    """A plain module writes its code whenever its graph changes, and Dynamo's own, as which it is copied, does not."""
    graph = fx.symbolic_trace(nn.Linear(64, 64)).graph
    lazy, plain = (first_step.of(kind(nn.Linear(64, 64), graph)) for kind in (_LazyGraphModule, fx.GraphModule))
    assert isinstance(lazy, _LazyGraphModule) and lazy._needs_recompile()
    assert lazy.graph is not graph and lazy.code == plain.code


@pytest.mark.thorough
@pytest.mark.codegen
def test_loaded_state_without_history_gets_a_graph_of_a_first_step():
    """Saved of a model that has only run without gradients: the copy runs what the model runs, bit for bit."""
    model, x = nn.Sequential(nn.Linear(64, 32, bias=False)), torch.randn(7, 64)
    options = {"recipe": DelayedScaling(amax_history_len=4), "fallback": "silent"}
    with torch.inference_mode():
        expected = torch.compile(model, backend="te", options=options)(x)
    other = copy.deepcopy(model)
    te_inductor.load_state_dict(other, te_inductor.state_dict(model))
    assert not has_history(other[0].weight, options["recipe"])
    torch._dynamo.reset()
    with torch.inference_mode():
        assert torch.equal(torch.compile(other, backend="te", options=options)(x), expected)
