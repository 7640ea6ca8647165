"""What shares the state of delayed scaling, and what does not: models, compiles, readers of one tensor, layers that are
one GEMM, uses of one parameter."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from tests import uncompiled
from tests.backend.delayed_programs import RECIPE, Blocks, Steps, amax_scale, state, te
from tests.delayed import OracleLayer, check_entry, quantizers
from tests.support.trained import Attention, mlp, same, train

pytestmark = pytest.mark.usefixtures("without_tracing")


def test_two_models_share_no_state_though_they_run_the_same_code():
    """Dynamo compiles a class once: the graph must find the state of the module that it is called for."""
    counters.clear()
    layers = [nn.Linear(32, 48) for _ in range(3)]
    runs = [Steps(layer, te(layer)) for layer in layers]
    for run in [*runs, *reversed(runs)]:
        run.backward(*run.forward(torch.randn(8, 32) * torch.rand(()) * 9))
    assert counters["stats"]["unique_graphs"] == 1
    for run in runs:
        run.check_state()


def test_blocks_compiled_one_by_one():
    """`for block in model: block.compile(...)`: one graph serves all, each with its own state, as if compiled whole."""
    counters.clear()
    whole = nn.Sequential(*(Blocks(number=1) for _ in range(5)))
    blocks = copy.deepcopy(whole)
    for block in blocks:
        block.compile(backend="te", fullgraph=True, options={"recipe": RECIPE, "fallback": "error"})
    for _ in range(2):
        train(blocks, x=torch.full((8, 32), 3.0))
    assert counters["stats"]["unique_graphs"] <= 3  # the first one's input needs no gradient, the loss asks for others'
    torch._dynamo.reset()
    run = te(whole)
    for _ in range(2):
        train(run, x=torch.full((8, 32), 3.0))
    assert same(state(blocks), state(whole))


def test_a_copy_of_a_model_starts_anew():
    model = mlp()
    train(te(model))
    other = copy.deepcopy(model)
    assert state(other) == {} and state(model)


def test_one_model_compiled_twice_has_one_state():
    layer = nn.Linear(32, 48)
    first = Steps(layer, te(layer))
    second = Steps(layer, te(layer, epilogue_fusion=False))
    second.oracle = first.oracle
    for run in (first, second, first):
        run.backward(*run.forward(torch.randn(8, 32)))


def test_two_compiles_of_one_model_in_flight():
    """The backward of one writes state that the other's forward has kept, as generated code does, without a word to
    autograd."""
    layer = nn.Linear(32, 48)
    with uncompiled.patched():
        first, second = Steps(layer, te(layer)), Steps(layer, te(lambda x: layer(x)))
        second.oracle = first.oracle
        for _ in range(2):
            forwards = [run.forward(torch.randn(8, 32)) for run in (first, second)]
            for run, forward in zip((first, second), forwards, strict=True):
                run.backward(*forward)


def test_state_dies_with_its_model():
    from te_inductor.runtime.state import store

    def held() -> int:
        gc.collect()
        return len(store._states)

    before = held()
    model = mlp()
    run = te(model)
    train(run)
    assert held() == before + 2
    del run, model
    torch._dynamo.reset()
    assert held() == before


def test_readers_of_one_tensor_share_its_quantizer():
    """q, k and v: one cast of x, one record of it, one scale under three keys."""
    model, x = Attention(), torch.randn(2, 8, 32)
    train(te(model), x=x)
    entries = state(model)
    assert {entries[f"{name}.input.scale"].item() for name in "qkv"} == {amax_scale(x.abs())}
    assert entries["o.input.scale"] != entries["q.input.scale"]


class Parallel(nn.Module):
    """Two layers of one input; `together` decides whether they may be one GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x, together):
        a, b = self.a(x), self.b(x)
        return (a.relu() + b.relu()) if together else (a.relu() + b.relu(), a, b)


def test_layers_that_are_one_gemm_in_one_graph_and_two_in_another():
    """Training and generation with a cache, whose outputs are returned, are such graphs: the second finds the first
    one's scales."""
    model, x = Parallel(), torch.randn(8, 32)
    with torch.no_grad():
        model.b.weight *= 8
    run = te(model)
    run(x, True).sum().backward()
    entries = state(model)
    scales = {entries[f"{name}.weight.scale"].item() for name in "ab"}
    assert scales == {amax_scale(model.b.weight.detach().abs())}  # both, as one GEMM has one scale
    with torch.no_grad():
        _, a, b = run(x, False)
    for name, y in (("a", a), ("b", b)):
        assert (y - F.linear(x, getattr(model, name).weight)).norm() < 0.1 * y.norm(), name
    assert same(state(model), entries)


@pytest.mark.thorough
@pytest.mark.codegen
def test_layers_that_were_apart_are_joined():
    """Both saw something: the larger amaxes and the smaller scale hold."""
    model, x = Parallel(), torch.randn(8, 32)
    with torch.no_grad():
        model.b.weight *= 8
    run = te(model)
    sum(y.sum() for y in run(x, False)).backward()
    apart = state(model)
    assert apart["a.weight.scale"] != apart["b.weight.scale"]
    with torch.no_grad():
        run(x, True)
    joined = state(model)
    for field in ("scale", "amax_history"):
        assert torch.equal(joined[f"a.weight.{field}"], apart[f"b.weight.{field}"])
        assert torch.equal(joined[f"b.weight.{field}"], apart[f"b.weight.{field}"])
    sum(y.sum() for y in run(x, False)).backward()  # the other graph goes on with the joined state
    after = state(model)
    assert after["a.weight.amax_history"][-2:].tolist() == [joined["b.weight.amax_history"][-1].item()] * 2
    assert torch.equal(after["a.weight.amax_history"], after["b.weight.amax_history"])


def test_a_module_called_twice_has_one_quantizer():
    """One update a step, of the larger amax."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return self.layer(x) + self.layer(4 * x)

    model, oracle = Twice(), quantizers(RECIPE)
    run = te(model)
    for _ in range(2):
        x = torch.randn(8, 32)
        y = run(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        for tensor in (x, 4 * x):
            oracle["input"].record(tensor)
        oracle["weight"].record(model.layer.weight.detach())
        oracle["grad_output"].record(dy)
        for slot, history in oracle.items():
            history.update()
            check_entry(state(model), f"layer.{slot}", history)


def test_tied_weights():
    """One state of the weight, an input and a gradient each."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).relu())

    model, x = Tied(), torch.randn(8, 32)
    train(te(model), x=x)
    entries = state(model)
    assert [key for key in entries if ".weight." in key] == ["first.weight.scale", "first.weight.amax_history"]
    assert entries["first.input.scale"].item() == amax_scale(x.abs())
    assert entries["second.input.scale"] != entries["first.input.scale"]
    assert entries["second.grad_output.scale"] != entries["first.grad_output.scale"]


def test_slices_of_a_batched_product():
    """Experts: each slice is a layer of its own, as the oracle's."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 32, 48) * torch.tensor([1.0, 100.0, 0.01])[:, None, None])

        def forward(self, x):
            return torch.bmm(x, self.w)

    model = Experts()
    run, oracles = te(model), [OracleLayer(RECIPE) for _ in range(3)]
    for _ in range(2):
        x = torch.randn(3, 8, 32, requires_grad=True)
        model.w.grad = None
        y = run(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        for i, oracle in enumerate(oracles):
            grads = [x.grad[i], model.w.grad[i].t(), None]
            oracle.check(x[i].detach(), model.w[i].detach().t(), None, dy[i], y[i].detach(), grads)
            oracle.check_state(state(model), f"w[select_0_{i}].")


def _normed_in_place(m, x):
    y = m.a(x)
    x.sub_(x.mean(-1, keepdim=True)).div_(100 * x.std(-1, keepdim=True))
    return y, m.b(x)


def _set(m, x):
    y = m.a(x)
    x[:] = x * 0.01
    return y, m.b(x)


def _of_a_view(m, x):
    view = x.view(2, -1, 64)
    y = m.a(view)
    x.mul_(0.01)
    return y, m.b(view)


def _weight(m, x):
    y = m.a(x)
    m.a.weight.mul_(0.01)
    return y, m.a(x)


WRITTEN = {
    "itself": (lambda m, x: (m.a(x), m.b(x.mul_(0.01))), 2),
    "set": (_set, 2),
    "a view": (_of_a_view, 2),
    "a norm": (_normed_in_place, 2),
    "called twice": (lambda m, x: (m.a(x), m.a(x.mul_(0.01))), 1),
    "weight": (_weight, 1),
    "behind": (lambda m, x: (m.a(x), m.b(x), x.mul_(0.01)), 1),
}


@pytest.mark.parametrize("program", WRITTEN)
def test_what_is_written_between_two_readers(program):
    """Each version of a tensor is recorded, and layers that read two have a quantizer each: none saturates."""
    run, inputs = WRITTEN[program]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(64, 64, bias=False) for _ in range(2))
            self.requires_grad_(False)

        def forward(self, x):
            return run(self, x * 1.0)

    model, x = Model(), torch.randn(64, 64)
    compiled, kept = te(model), model.a.weight.clone()
    for _ in range(3):
        model.a.weight.data.copy_(kept)
        expected = [y.clone() for y in model(x)]
        model.a.weight.data.copy_(kept)
        for low, high in zip(compiled(x), expected, strict=True):
            assert (low - high).norm() < 0.1 * high.norm()
    scales = {scale.item() for name, scale in state(model).items() if name.endswith("input.scale")}
    assert len(scales) == inputs
