"""Graphs that run by the eager kernels of their operators, which those of a first step do: passes/graph/interpreted.py."""

import copy
import gc
import itertools
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, FXGraphCacheMiss
from torch._inductor.output_code import CompiledFxGraph, OutputCode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from te_inductor import compat, ops
from te_inductor.passes.graph import interpreted
from te_inductor.recipes import DelayedScaling
from te_inductor.recipes.delayed import ScaleUpdate
from te_inductor.runtime.state import state_inputs
from tests.backend.delayed_programs import te
from tests.support.first_steps import Residual, errors


@pytest.fixture
def graphs(monkeypatch, no_caches):
    """The graphs that were interpreted, and those whose code was generated, each by its number of nodes."""
    from te_inductor import lowerings

    found = {"interpreted": [], "compiled": []}
    run, install = interpreted.Interpreted, lowerings.install

    def installed(*args, **kwargs):
        wrap = install(*args, **kwargs)

        def noted(inner):
            return wrap(lambda gm, *args, **more: (found["compiled"].append(gm), inner(gm, *args, **more))[1])

        return noted

    monkeypatch.setattr(
        interpreted, "Interpreted", lambda gm, most: (found["interpreted"].append(gm), run(gm, most))[1]
    )
    monkeypatch.setattr(lowerings, "install", installed)
    monkeypatch.setattr(state_inputs, "_first_steps_recur", False)
    torch._dynamo.reset()
    return found


def gradients(run, model, x):
    model.zero_grad()
    (run(x).float().square().mean() * 2.0**-20).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_code_is_generated_for_later_steps_alone(graphs):
    model, x = Residual(layers=1).bfloat16(), torch.randn(64, 64, dtype=torch.bfloat16)
    exact, run = gradients(model, model, x), te(model)
    for _ in range(3):
        assert max(errors(gradients(run, model, x), exact)) < 0.2
    assert {kind: len(found) for kind, found in graphs.items()} == {"interpreted": 2, "compiled": 2}


def test_microbatches_in_flight(graphs):
    """The backward of the first writes state that the second's forward has kept."""
    model, x = Residual(layers=1), torch.randn(64, 64)
    exact, run = gradients(model, model, x), te(model)
    model.zero_grad()
    for loss in [run(x).square().mean() * 2.0**-20 for _ in range(2)]:
        loss.backward()
    assert len(graphs["interpreted"]) == 2
    assert max(errors([p.grad / 2 for p in model.parameters()], exact)) < 0.2


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return nn.functional.dropout(self.first(x), 0.5), self.last(x)


def test_a_first_step_with_dropout_is_compiled(graphs):
    """Inductor writes random numbers that follow from a seed, which the backward computes again."""
    model, x = Dropped(), torch.randn(64, 64)
    dropped, _ = te(model)(x)
    dropped.sum().backward()
    kept = (dropped != 0).double()
    assert 0.4 < kept.mean() < 0.6
    torch.testing.assert_close(model.first.bias.grad.double(), 2 * kept.sum(0), rtol=0.1, atol=1.0)
    assert not graphs["interpreted"] and len(graphs["compiled"]) == 3  # of later steps the forward


def test_a_backward_goes_the_way_of_its_forward(monkeypatch):
    ways = []
    monkeypatch.setattr(interpreted, "most_written_of_gpus", lambda gm: gm.answer)
    monkeypatch.setattr(interpreted, "fits", bool)
    for answers in ((True, True), (True, False), (False, True)):
        compile, seen = interpreted.interpreting(lambda gm, inputs, **_: "compiled"), []
        for answer in answers:
            gm = make_fx(lambda x: x + 1)(torch.ones(2))
            gm.answer = answer
            seen.append(compile(gm, [], is_backward=bool(seen)))
        ways.append([way == "compiled" for way in seen])
    assert ways == [[False, False], [False, True], [True, True]]


@pytest.mark.parametrize("deterministic", (False, True))
def test_deterministic_algorithms_are_compiled(deterministic):
    """Eager kernels raise there that generated code replaces."""
    code = OutputCode()
    compile = interpreted.interpreting(lambda gm, inputs, **_: code)
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = compile(make_fx(lambda x: x + 1)(torch.ones(2)), [])
    finally:
        torch.use_deterministic_algorithms(False)
    assert (found is code) == deterministic
    if deterministic:  # nothing of it is written, as kernels that have run cannot be, of which torch would warn
        with pytest.raises(BypassAOTAutogradCache):
            copy.copy(found).prepare_for_serialization()


def test_code_that_is_kept_out_of_a_cache_still_runs():
    """A copy is made to be written, whose end deletes the parts of a runner that it still has: those of the code."""
    code = CompiledFxGraph.__new__(CompiledFxGraph)
    code.compiled_fn_runner = runner = SimpleNamespace(partitions=[print])
    compat.keep_out_of_graph_cache(code, "a test says so")
    written = copy.copy(code)
    with pytest.raises(BypassAOTAutogradCache, match="a test says so"):
        written.prepare_for_serialization()
    del written
    gc.collect()
    assert runner.partitions == [print]
    assert isinstance(code, CompiledFxGraph)


def updates(update):
    def program(state):
        ops.update_scales([state], update)
        return torch.cat([state[-1:], state[1:3]]).to(torch.bfloat16), state[:-1].amax(0, True)[0]

    return make_fx(program, tracing_mode="fake")(torch.rand(5))


def test_a_graph_that_a_cache_keeps(monkeypatch):
    """It computes the same, and is found only where it may run as it is."""
    gm = updates(ScaleUpdate(DelayedScaling(amax_history_len=4), "e5m2"))
    kept, own = interpreted.Interpreted(gm, {"cuda": 8}), interpreted.Interpreted(gm)
    kept.prepare_for_serialization()
    kept = pickle.loads(pickle.dumps(kept))
    for room, deterministic, cudagraphs, wanted in itertools.product((True, False), repeat=4):
        monkeypatch.setattr(interpreted, "fits", lambda most, room=room: room and most == {"cuda": 8})
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda asked=deterministic: asked)
        may = room and wanted and not (deterministic or cudagraphs)
        found = copy.copy(kept)
        with interpreted.kept() if wanted else nullcontext(), nullcontext() if may else pytest.raises(FXGraphCacheMiss):
            found.post_compile([], None, {"cudagraphs": cudagraphs})
        if may:
            loaded = found
    state, other = (torch.tensor([5.0, 1.0, 2.0, 0.5, 3.0]) for _ in range(2))
    for a, b in zip(loaded([state]), own([other]), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(state, other) and state._version == 0


def test_graphs_that_no_cache_keeps():
    """A function of the program's own may be another one, of the same name, in another process."""
    held = torch.ones(2)
    for gm in (
        updates(ScaleUpdate(DelayedScaling(scaling_factor_compute_algo=scale_of, amax_history_len=4), "e5m2")),
        make_fx(lambda x: x + held)(torch.ones(2)),
        make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(3)),  # nor does its memory follow from it
    ):
        with pytest.raises(BypassAOTAutogradCache):
            interpreted.Interpreted(gm, {"cuda": 8}).prepare_for_serialization()


def scale_of(amax, scale, fp8_max, recipe):
    return fp8_max / amax


def test_operators_that_eager_kernels_compute_otherwise():
    from torch._inductor import inductor_prims

    x = torch.randn(1, 1, 128, 16)
    assert interpreted.means_the_same(make_fx(lambda x: x.softmax(-1) @ x.mT)(x))
    drawn = make_fx(lambda x: x * inductor_prims.random([128, 16], inductor_prims.seed(x.device), "rand"))(x)
    assert not interpreted.means_the_same(drawn)
    attention = make_fx(lambda x: flex_attention(x, x, x))(x)
    assert not interpreted.means_the_same(attention)


def test_the_memory_that_a_graph_writes():
    """Two results live at once, a view takes nothing, and neither does what nobody reads, once it is written."""

    def program(x):
        a = x + 1
        (a * 5).view(-1)
        b = a.view(2, -1) * 2
        return (b.view(-1) * 3)[:1].clone()

    x = torch.randn(1000)
    gm = make_fx(program, tracing_mode="fake")(x)
    assert interpreted.most_written(gm, x.device) == 2 * 4000


def test_amaxes_of_several_groups_are_reduced_by_generated_code():
    """One reduction has one order on all ranks: Note [Ranks that interpret]."""

    def steps(*groups):
        def program(state):
            for names in groups:
                update = ScaleUpdate(DelayedScaling(), "e4m3", names)
                ops.update_scales([state], update)
            return state + 1

        return make_fx(program, tracing_mode="fake")(torch.ones(1025))

    assert [
        interpreted.means_the_same(steps(*groups)) for groups in ([()] * 2, [(), ("0", "1")], [("0",), ("1",)])
    ] == [
        True,
        True,
        False,
    ]
