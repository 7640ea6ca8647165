"""Models that are moved and cast once they have run, where torch exchanges the contents of their parameters: Note
[References to tensors]. And the tables by tensor that make it possible."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import te_inductor
from te_inductor import backward_dw, quantize_, tensor_tables
from te_inductor.tensor_tables import TensorGroups, TensorReference, TensorTable
from tests.support.main_grads import te
from tests.support.trained import mlp

pytestmark = pytest.mark.usefixtures("without_tracing")
CASTS = {
    "half": nn.Module.half,
    "to": lambda module: module.to(torch.bfloat16),
    "cpu": nn.Module.cpu,
    "loaded": lambda module: module.load_state_dict({n: p * 2 for n, p in module.state_dict().items()}),
    "assigned": lambda module: module.load_state_dict({n: p * 2 for n, p in module.state_dict().items()}, assign=True),
}


@pytest.fixture
def swapping(monkeypatch):
    """torch exchanges contents everywhere."""
    yield lambda on: torch.__future__.set_swap_module_params_on_conversion(on)
    torch.__future__.set_swap_module_params_on_conversion(False)


def step(model, run, x):
    model.zero_grad()
    y = run(x)
    y.square().sum().backward()
    backward_dw(model)
    return [y, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "cast, options",
    [
        ("half", {"recipe": "delayed", "weights": "once"}),
        ("half", {"recipe": "current", "wgrad": "deferred"}),
        ("loaded", {"recipe": "delayed"}),
    ],
)
def test_as_where_torch_sets_the_data(cast, options, swapping):
    """Step by step, to and fro; and what is kept with parameters stays with them."""
    models = [mlp(), None]
    models[1] = copy.deepcopy(models[0])
    runs = [te(model, **options) for model in models]
    xs = [torch.randn(8, 32) for _ in range(3)]
    for again in range(2):
        results = []
        for swaps, model, run in zip((True, False), models, runs, strict=True):
            first = step(model, run, xs[0])
            step(model, run, xs[1])
            del first
            model.zero_grad()
            swapping(swaps)
            CASTS[cast](model)
            state = te_inductor.state_dict(model)
            dtype = model[0].weight.dtype
            results.append([*step(model, run, xs[2].to(dtype)), *state.values()])
            model.zero_grad()
            model.float()
            swapping(False)
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), again


@pytest.mark.sample(1)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4_weight_only"])
def test_stored_weights(recipe, cast):
    plain = nn.Sequential(nn.Linear(96, 160), nn.SiLU(), nn.Linear(160, 48))
    moved, model = quantize_(copy.deepcopy(plain), recipe), quantize_(plain, recipe)
    CASTS[cast](moved)
    run, x = torch.compile(model, backend=te_inductor.te, fullgraph=True), torch.randn(5, 96)
    with torch.no_grad():
        before = run(x)
        CASTS[cast](model)
        x = x.to(model[0].bias.dtype)
        assert torch.equal(run(x), torch.compile(moved, backend=te_inductor.te)(x))
        if cast == "half":
            assert torch.allclose(run(x).float(), before, atol=0.05) and run(x).dtype == torch.float16


def test_dtensors(one_rank):
    """The scales that delayed scaling has found stay with the parameters."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    parallelize_module(model, one_rank, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run = te(model, recipe="delayed")
    for _ in range(2):
        run(torch.randn(8, 32)).sum().backward()
    model.zero_grad()
    before = te_inductor.state_dict(model)
    assert before and isinstance(model[0].weight, DTensor)
    model.bfloat16()
    after = te_inductor.state_dict(model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert run(torch.randn(8, 32, dtype=torch.bfloat16)).isfinite().all()
    assert any(not torch.equal(before[name], value) for name, value in te_inductor.state_dict(model).items())


def test_a_table_forgets_what_is_gone():
    gc.collect()
    table, groups = TensorTable(), TensorGroups()
    tensors = [torch.zeros(1) for _ in range(3)]
    table[tensors[0]] = "first"
    groups.set(tensors, "all")
    groups.set(tensors[:2], "two")
    references, known = [TensorReference(t) for t in tensors], len(tensor_tables._keys)
    assert table[tensors[0]] == "first" and tensors[1] not in table and table.get(tensors[1], None) is None
    assert (groups.get(tensors), groups.get(tensors[:2]), groups.get(tensors[::-1])) == ("all", "two", None)
    assert [ref() for ref in references] == tensors
    del tensors[2]
    assert references[2]() is None and len(tensor_tables._keys) == known - 1
    assert groups.get([*tensors, torch.zeros(1)]) is None  # perhaps at the same address
    groups.set(tensors[:1], "one")
    assert groups.values(tensors[0]) == ["two", "one"]
    kept = weakref.ref(kind := type("Value", (), {})())
    table[tensors[0]] = kind
    tensors[0].cycle = tensors  # only the collector ends it
    del kind, tensors
    gc.collect()
    assert kept() is None and not len(table) and not groups and len(tensor_tables._keys) == known - 3


def test_a_swap_keeps_what_belongs_to_each():
    one, other = torch.zeros(1), torch.ones(1)
    table, reference = TensorTable(), TensorReference(one)
    table[one] = "one"
    torch.utils.swap_tensors(one, other)
    assert one.item() == 1 and reference() is one and table[one] == "one" and other not in table
    theirs = weakref.ref(one)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(one, other)
    assert theirs() is reference() is one and table[one] == "one"
    del one, theirs
    assert reference() is None and not len(table)
