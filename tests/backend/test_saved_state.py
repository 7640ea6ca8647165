"""te_inductor.state_dict and load_state_dict: keys, copies, loading before and after the first compile, what is
refused."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor.backend import _set_aside, parse, run_passes
from te_inductor.errors import StateError
from te_inductor.passes.pre_grad.plan import Plan
from te_inductor.recipes import DelayedScaling
from te_inductor.runtime.extra_inputs import bind
from tests.support.trained import Attention, mlp, same, train
from tests.uncompiled import run_rewritten

pytestmark = pytest.mark.usefixtures("without_tracing")

SHORT = DelayedScaling(amax_history_len=4)
FIELDS = ("scale", "amax_history")


def uncompiled(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """The passes as in `te`, and eager kernels."""
    plan = Plan(gm, parse(None, {"recipe": SHORT, "weights": "each_call"}), inputs)
    _set_aside(plan.graph_modules())
    report = run_passes(plan)
    assert report.failure is None and not report.fallbacks, str(report)
    return bind(run_rewritten(gm), plan.outcome.extra_inputs)


def quantizers(model: nn.Module) -> list[str]:
    """The keys without their fields, in order; each has both."""
    keys = list(te_inductor.state_dict(model))
    assert keys[::2] == [f"{key.rpartition('.')[0]}.scale" for key in keys[1::2]]
    assert all(key.endswith(".amax_history") for key in keys[1::2])
    return [key.rpartition(".")[0] for key in keys[::2]]


class Everything(nn.Module):
    """Each way in which a parameter serves linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.packed = nn.MultiheadAttention(32, 4, batch_first=True)
        self.experts = nn.Parameter(torch.randn(2, 32, 32) / 6)
        self.halves = nn.Parameter(torch.randn(64, 32) / 6)
        self.embedding, self.head = nn.Embedding(32, 32), nn.Linear(32, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.odd = nn.Linear(32, 32)
        self.reader = Reader(self.odd)

    def forward(self, x):
        x = checkpoint(self.attention, x, use_reentrant=False)
        x = self.packed(x, x.sin(), x.sin(), need_weights=False)[0]
        x = torch.bmm(x, self.experts)
        x = F.linear(x, self.halves[:32]) + F.linear(x.cos(), self.halves[32:])
        x = self.head(x) + self.odd(x).relu()
        return x.tanh() @ self.odd.weight.T + self.reader(x)


class Reader(nn.Module):
    """Uses a parameter that is another module's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = [module]

    def forward(self, x):
        return F.linear(x.exp(), self.module[0].weight)


ALL = ("input", "weight", "grad_output")
SITES = {  # in the order of the parameters; a tied weight has one `weight` slot, under its first name
    "experts[select_0_0]": ALL,
    "experts[select_0_1]": ALL,
    "halves[getitem_32:]": ALL,
    "halves[getitem_:32]": ALL,
    "attention.q": ALL,
    "attention.k": ALL,
    "attention.v": ALL,
    "attention.o": ALL,
    "packed.in_proj_weight[chunk_3.getitem_0]": ALL,
    "packed.in_proj_weight[chunk_3.getitem_1]": ALL,
    "packed.in_proj_weight[chunk_3.getitem_2]": ALL,
    "packed.out_proj": ALL,
    "embedding": ("weight",),
    "head": ("input", "grad_output"),
    "odd": ALL,
    "odd[in (root)]": ("input", "grad_output"),
    "odd[in reader]": ("input", "grad_output"),
}
EVERYTHING = [f"{site}.{slot}" for site, slots in SITES.items() for slot in slots]


def test_every_key_is_saved_and_loaded_back():
    """Keys are loaded into a model that was never compiled: what waits there is what was saved, and the compile uses
    all of it."""
    first, second = Everything(), Everything()
    before = list(first.state_dict())
    train(torch.compile(first, backend=uncompiled, fullgraph=True), x=torch.randn(2, 5, 32))
    assert quantizers(first) == EVERYTHING
    assert list(first.state_dict()) == before
    state = te_inductor.state_dict(first)
    assert all(state[f"{name}.scale"].shape == () for name in EVERYTHING)
    assert all(state[f"{name}.amax_history"].shape == (4,) for name in EVERYTHING)
    assert te_inductor.load_state_dict(second, state) == ([], [])
    assert same(te_inductor.state_dict(second), state)
    with torch.no_grad():  # reads state and changes none
        torch.compile(second, backend=uncompiled, fullgraph=True)(torch.randn(2, 5, 32))
    assert same(te_inductor.state_dict(second), state)
    from te_inductor.runtime.state import store

    waiting = [site.slot for p in second.parameters() for site in store.loaded_of(p)]
    assert set(waiting) == {"grad_output"}  # no gradient was asked for


def test_the_model_passed_may_be_any_around_the_compiled_region():
    """Keys are relative to it: the compiled module, the one inside, a parent of either, the region's own submodule."""
    model = mlp()
    parent, plain_parent = nn.Module(), nn.Module()
    compiled = torch.compile(model, backend=uncompiled)
    parent.inner, plain_parent.inner = compiled, model
    train(compiled)
    names = [f"{layer}.{slot}" for layer in (0, 2) for slot in ("input", "weight", "grad_output")]
    assert quantizers(model) == quantizers(compiled) == names
    assert quantizers(parent) == quantizers(plain_parent) == [f"inner.{name}" for name in names]
    assert quantizers(model[2]) == ["input", "weight", "grad_output"]
    state = te_inductor.state_dict(parent)
    torch._dynamo.reset()
    other = mlp()
    holder = nn.ModuleDict({"inner": other})
    te_inductor.load_state_dict(holder, state)
    torch.compile(other, backend=uncompiled)
    assert same(te_inductor.state_dict(other), te_inductor.state_dict(model))


def test_a_compiled_submodule():
    model = mlp()
    model[2] = torch.compile(model[2], backend=uncompiled)
    train(model)
    assert quantizers(model) == ["2.input", "2.weight", "2.grad_output"]


def test_entries_are_copies():
    model = mlp()
    run = torch.compile(model, backend=uncompiled)
    train(run)
    state = te_inductor.state_dict(model)
    kept = copy.deepcopy(state)
    train(run)
    assert same(state, kept) and not same(state, te_inductor.state_dict(model))
    for tensor in state.values():
        assert not tensor.requires_grad
        tensor.zero_()
    assert all(te_inductor.state_dict(model)[key] > 0 for key in state if key.endswith("scale"))


def test_the_history_has_transformer_engines_layout():
    """Slot 0 is the amax recorded since the last update, the newest observation the last slot; loading keeps both."""
    from te_inductor.runtime.state import store

    model, other = nn.Linear(32, 32), nn.Linear(32, 32)
    run = torch.compile(model, backend=uncompiled)
    for amax in (3.0, 5.0):
        run(torch.full((4, 32), amax)).sum().backward()
    for held in store.states_of(model.weight).values():
        held.amax.fill_(7.0)  # as within a step
    state = te_inductor.state_dict(model)
    assert state["input.amax_history"].tolist() == [7.0, 0.0, 3.0, 5.0]
    te_inductor.load_state_dict(other, state)
    assert same(te_inductor.state_dict(other), state)
    torch.compile(other, backend=uncompiled)(torch.zeros(4, 32)).sum().backward()
    assert te_inductor.state_dict(other)["input.amax_history"].tolist() == [0.0, 3.0, 5.0, 7.0]


def test_another_librarys_history_may_hold_infinity():
    model = nn.Linear(32, 32)
    state = {"input.scale": torch.tensor(2.0), "input.amax_history": torch.tensor([0.0, torch.inf, torch.nan, 4.0])}
    te_inductor.load_state_dict(model, state)
    torch.compile(model, backend=uncompiled)(torch.ones(4, 32)).sum().backward()
    after = te_inductor.state_dict(model)
    assert after["input.scale"].item() == 448 / 4 and after["input.amax_history"].tolist() == [0.0, 0.0, 4.0, 1.0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_goes_on_where_it_was_saved(when):
    """Bit for bit: outputs, gradients, state. After a compile it is loaded in place: no recompile, the same tensors."""
    first = mlp()
    run = torch.compile(first, backend="te", fullgraph=True, options={"recipe": SHORT})
    train(run, 2)
    state, weights = te_inductor.state_dict(run), copy.deepcopy(first.state_dict())
    second = mlp()
    resumed = torch.compile(second, backend="te", fullgraph=True, options={"recipe": SHORT})
    if when == "after":
        train(resumed, 3)
    second.load_state_dict(weights)
    compiles = counters["stats"]["unique_graphs"]
    te_inductor.load_state_dict(resumed, state)
    assert same(te_inductor.state_dict(second), state)
    x = torch.randn(8, 32)
    results = []
    for model, call in ((first, run), (second, resumed)):
        model.zero_grad()
        y = train(call, x=x)
        results.append([y, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert same(te_inductor.state_dict(first), te_inductor.state_dict(second))
    assert counters["stats"]["unique_graphs"] == compiles


def replace_by_hand(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, value in weights.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(value.clone()))


REPLACE = {
    "load_state_dict": lambda model, weights: model.load_state_dict(copy.deepcopy(weights), assign=True),
    "by hand": replace_by_hand,
}


@pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE.keys())
def test_parameters_that_are_replaced_hand_on_their_state(replace):
    """It is as if the values had been loaded in place, bit for bit: q, k and v have one state between them before and
    after."""
    model = Attention()
    twin = copy.deepcopy(model)
    runs = [torch.compile(one, backend=uncompiled, fullgraph=True) for one in (model, twin)]
    weights, x = {name: 2 * value for name, value in model.state_dict().items()}, torch.randn(2, 4, 32)
    for run in runs:
        train(run, 2, x)
    old, before = list(model.parameters()), te_inductor.state_dict(model)
    replace(model, weights)
    twin.load_state_dict(weights)
    assert not set(map(id, old)) & set(map(id, model.parameters()))
    assert same(te_inductor.state_dict(model), before)
    results = []
    for run in runs:
        run.zero_grad()
        y = train(run, 2, x)
        results.append([y, *(parameter.grad for parameter in run.parameters()), *te_inductor.state_dict(run).values()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert not same(te_inductor.state_dict(model), before)


def test_what_waits_is_handed_on_and_what_is_there_stays():
    model, state = trained()
    other = mlp()
    te_inductor.load_state_dict(other, state)
    other.load_state_dict(model.state_dict(), assign=True)
    assert same(te_inductor.state_dict(other), state)
    first, second = model[0].weight, nn.Parameter(model[0].weight.detach().clone())
    model[0].weight = second  # as averages are swapped in, for a while
    with torch.no_grad():
        torch.compile(model, backend=uncompiled)(torch.randn(8, 32))
    te_inductor.load_state_dict(model, {key: 2 * value for key, value in state.items()})
    model[0].weight = first
    assert te_inductor.state_dict(model)["0.input.scale"] == state["0.input.scale"]


def test_loading_keeps_the_tensors():
    """What a CUDA graph has captured are addresses."""
    from te_inductor.runtime.state import store

    model = mlp()
    run = torch.compile(model, backend=uncompiled)
    train(run)

    def addresses():
        held = [state for p in model.parameters() for state in store.states_of(p).values()]
        return [state.tensor.data_ptr() for state in held]

    before = addresses()
    te_inductor.load_state_dict(model, te_inductor.state_dict(model))
    with torch.inference_mode():
        te_inductor.load_state_dict(model, te_inductor.state_dict(model))
    assert addresses() == before
    train(run)


def trained() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = mlp()
    train(torch.compile(model, backend=uncompiled))
    return model, te_inductor.state_dict(model)


WRONG = {
    "missing": (lambda s: s.pop("0.input.scale"), "state lacks 0.input.scale: expected every entry"),
    "many missing": (lambda s: s.clear(), "0.weight.scale, 0.weight.amax_history and 8 more"),
    "unknown module": (lambda s: s.update({"7.input.scale": s["0.input.scale"]}), "state has 7.input.scale: expected"),
    "unknown slot": (lambda s: s.update({"0.inptu.scale": s["0.input.scale"]}), "state has 0.inptu.scale: expected"),
    "unknown field": (lambda s: s.update({"0.input.amax": s["0.input.scale"]}), "state has 0.input.amax: expected"),
    "no key of ours": (lambda s: s.update({"0.weight": s["0.input.scale"]}), "state has 0.weight: expected"),
    "half": (lambda s: s.update({"0[mul_2].input.scale": torch.ones(())}), r"lacks 0\[mul_2\].input.amax_history"),
    "length": (
        lambda s: s.update({"2.weight.amax_history": torch.zeros(16)}),
        r"2.weight.amax_history has 16 entries, expected 4.* compile with DelayedScaling\(amax_history_len=16\)",
    ),
    "shape": (lambda s: s.update({"0.input.amax_history": torch.zeros(4, 1)}), r"has shape \(4, 1\), expected"),
    "empty": (lambda s: s.update({"0.input.amax_history": torch.zeros(0)}), r"has shape \(0,\), expected"),
    "no tensor": (lambda s: s.update({"0.input.scale": 1.0}), r"0.input.scale is a float \(1.0\), expected a tensor"),
    "zero": (lambda s: s.update({"0.input.scale": torch.zeros(())}), "0.input.scale is 0.0, expected one positive"),
    "nan": (lambda s: s.update({"0.input.scale": torch.tensor(torch.nan)}), "0.input.scale is nan, expected one"),
}


@pytest.fixture(scope="module")
def trained_on() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model that has trained on behind the state, which no test changes."""
    model, state = trained()
    train(torch.compile(model, backend=uncompiled))
    return model, state


@pytest.mark.parametrize("what", WRONG)
def test_wrong_state_is_refused_and_nothing_is_changed(what, trained_on):
    spoil, text = WRONG[what]
    model, state = trained_on
    before = te_inductor.state_dict(model)
    state = dict(state)
    spoil(state)
    with pytest.raises(StateError, match=text):
        te_inductor.load_state_dict(model, state)
    assert same(te_inductor.state_dict(model), before)


def test_not_strict_loads_what_fits_and_returns_the_rest():
    model, state = trained()
    expected = {**state, "0.weight.scale": torch.tensor(3.0)}
    given = {"0.weight.scale": torch.tensor(3.0), "9.input.scale": torch.ones(())}
    found = te_inductor.load_state_dict(model, given, strict=False)
    assert found.unexpected == ["9.input.scale"]
    assert found.missing == [key for key in state if key != "0.weight.scale"]
    assert same(te_inductor.state_dict(model), expected)


def test_a_wrong_length_is_found_at_the_first_call():
    _, state = trained()
    model = mlp()
    te_inductor.load_state_dict(model, state)
    run = torch.compile(model, backend="te", options={"recipe": DelayedScaling(amax_history_len=8)})
    with pytest.raises(StateError, match=r"history has 4 entries, expected 8.*DelayedScaling\(amax_history_len=4\)"):
        run(torch.randn(8, 32))
    train(torch.compile(model, backend="te", options={"recipe": SHORT}))  # the remedy; nothing was lost


@pytest.mark.parametrize("wrong", [F.linear, {"0.weight": 1}], ids=["a function", "a dict"])
def test_what_is_no_module_is_refused(wrong):
    with pytest.raises(StateError, match="expected the module that was compiled"):
        te_inductor.state_dict(wrong)


def test_a_model_without_delayed_scaling_has_no_state():
    model = mlp()
    train(torch.compile(model, backend="te", options={"recipe": "current"}))
    assert te_inductor.state_dict(model) == {}
    te_inductor.load_state_dict(model, {})


def test_each_recipe_has_its_own_state_and_the_last_compiled_is_saved():
    model, state = trained()
    torch._dynamo.reset()
    train(torch.compile(model, backend="te", options={"recipe": DelayedScaling(amax_history_len=2)}))
    assert {len(value) for key, value in te_inductor.state_dict(model).items() if key.endswith("history")} == {2}
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=uncompiled)(torch.randn(8, 32))
    after = te_inductor.state_dict(model)
    assert all(torch.equal(after[key], state[key]) for key in state if "grad_output" not in key)
