"""Casts of a concatenation as casts of its pieces (passes/joint/concatenations.py): where it is done, and that it
computes the same. Generated code: tests/offline/test_concatenations.py."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_inductor import ops
from te_inductor.passes import joint
from te_inductor.passes.joint import concatenations
from tests.experts import MoE
from tests.passes import leave_out
from tests.support.autograd import same

pytestmark = pytest.mark.usefixtures("without_codegen", "no_caches")
CAT, PIECES = torch.ops.aten.cat.default, (ops.quantize_pieces, ops.quantize_pieces_delayed)
SIZE = 128


class Gated(nn.Module):
    """gate and up of one parameter; `pick` cuts the product, and `use` makes the result of both parts."""

    def __init__(self, pick=lambda y: y.chunk(2, -1), use=None, inner=SIZE, bias=False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(SIZE, 2 * inner, bias)
        self.down, self.other = (nn.Linear(inner, SIZE, bias=False) for _ in range(2))
        self.pick, self.use = pick, use or (lambda model, gate, up: model.down(F.silu(gate) * up))

    def forward(self, x):
        return self.use(self, *self.pick(self.gate_up(x)))


def apart(model, gate, up):
    """Nothing computes with both."""
    return model.down(F.silu(gate)) + model.other(F.silu(up))


def unequal(y):
    gate, up = y.split([SIZE // 2, 3 * SIZE // 2], -1)
    return gate.repeat(1, 3), up


def other_order(y):
    """Heads beside each other: no piece is a block of columns."""
    return y.unflatten(-1, (4, 2, -1)).unbind(-2)


def spy(monkeypatch, off=False) -> list[Counter]:
    """What the joint graph calls behind the pass."""
    seen: list[Counter] = []

    def run(graph):
        if not off:
            concatenations.cast_pieces(graph)
            graph.lint()
        seen.append(Counter(node.target for node in graph.nodes))

    leave_out(monkeypatch, joint, concatenations.cast_pieces, run)
    return seen


def step(model, x, recipe) -> list[torch.Tensor]:
    """Two of them: in the first one delayed scaling has no scales yet."""
    torch.compiler.reset()
    run = torch.compile(model, backend="te", fullgraph=True, options={"recipe": recipe, "policy": {"*": recipe}})
    found: list[torch.Tensor] = []
    for _ in range(2):
        made = run(x)
        gradients = torch.autograd.grad(made.square().sum(), [x, *model.parameters()], materialize_grads=True)
        found += [made.detach(), *gradients]
    return found


def both(model, x, recipe, monkeypatch) -> Counter:
    """What the graph of a step with known scales calls; results are the same, bit for bit, without the pass."""
    with monkeypatch.context() as patch:
        spy(patch, off=True)
        expected = step(model, x, recipe)
    seen = spy(monkeypatch)
    assert same(step(model, x, recipe), expected)
    return seen[-1]


@pytest.mark.quick("delayed", "block")
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
def test_a_layer_that_is_cut_in_two(recipe, monkeypatch):
    """The input has three dimensions, so that a view stands between the concatenation and the cast."""
    called = both(Gated(), torch.randn(2, 64, SIZE, requires_grad=True), recipe, monkeypatch)
    assert called[CAT] == 0 and sum(called[op] for op in PIECES) == 1


def masked(y):
    """Masks rows behind the 17th, as Inductor has it where transformers fills rows of no expert."""
    return torch.where(torch.arange(len(y))[:, None] > 17, 0.0, y).chunk(2, -1)


def test_rows_that_are_masked(monkeypatch):
    called = both(Gated(masked), torch.randn(64, SIZE, requires_grad=True), "delayed", monkeypatch)
    assert called[CAT] == 0 and sum(called[op] for op in PIECES) == 1


OTHERS = {
    "pieces of other widths": lambda: Gated(unequal, lambda model, gate, up: (F.silu(gate) * up).sum(-1), inner=SIZE),
    "no tensor in common": lambda: Gated(use=apart),
    "a bias, whose gradient reads it": lambda: Gated(bias=True),
    "columns that need padding": lambda: Gated(inner=72),
    "no columns": lambda: Gated(other_order, lambda model, gate, up: model.down((F.silu(gate) * up).flatten(-2))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left(name, monkeypatch):
    called = both(OTHERS[name](), torch.randn(64, SIZE, requires_grad=True), "current", monkeypatch)
    assert not any(called[op] for op in PIECES)


def test_formats_without_casts_of_pieces(monkeypatch):
    called = both(Gated(), torch.randn(64, SIZE, requires_grad=True), "mxfp8", monkeypatch)
    assert called[CAT] == 1 and not any(called[op] for op in PIECES)


@pytest.mark.quick("delayed-one parameter", "current-two calls")
@pytest.mark.parametrize("split", [False, True], ids=["one parameter", "two calls"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_experts(recipe, split, monkeypatch):
    """Each piece has zeros for rows of no expert: their gradients change nothing, whatever they are."""
    torch.manual_seed(0)
    model = MoE(split=split)
    model.dropped = 17
    called = both(model, torch.randn(24, 32, requires_grad=True), recipe, monkeypatch)
    assert called[ops.quantize_pieces_delayed] == 1
    assert called[CAT] == (2 if split else 0)  # of both parameters' copies, either way
