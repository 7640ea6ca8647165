"""The policy: globs and functions, the first that matches, unused entries, the size rule; every graph of a model has
it."""

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor import autocast, explain
from te_inductor.errors import FallbackWarning, OptionError
from te_inductor.ops.stored_weight import StoredWeight
from te_inductor.presentation.paths import plain
from tests.rates import rated

pytestmark = pytest.mark.usefixtures("without_tracing")

X = (6, 32)


def layers(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(k, n) for n, k in sizes))


def chosen(model, policy, *, x=None, **options) -> dict[str, str]:
    x = torch.randn(X) if x is None else x
    return {site.fqn: site.recipe for site in explain(model, x, options={"policy": policy, **options}).sites}


def wide(path, shape):
    return shape[1] >= 96


def test_the_first_entry_that_matches_wins():
    model = layers((96, 32), (32, 96), (96, 32))
    everything = {"*": "none"}
    assert chosen(model, {"1": "rowwise", **everything}) == {"0": "none", "1": "rowwise", "2": "none"}
    assert chosen(model, {**everything, "1": "rowwise"}) == dict.fromkeys("012", "none")
    assert chosen(model, {wide: "rowwise", "[12]": "block"}) == {"0": "rowwise", "1": "block", "2": "rowwise"}
    assert chosen(model, {"[12]": "block", wide: "rowwise"}) == {"0": "rowwise", "1": "block", "2": "block"}


class Borrowing(nn.Module):
    """Its forward takes the weights of modules inside, as Mamba's does."""

    def __init__(self, product):
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(32, 64, bias=False), "mid": nn.Linear(64, 64)})
        nn.utils.parametrizations.weight_norm(self.inner["mid"])
        self.own = nn.Parameter(torch.randn(32, 64))
        self.product = product

    def forward(self, x):
        y = self.product(self.inner["up"].weight, x)
        return self.inner["mid"](y) @ self.own.t()


BORROWED = {
    "p @ x": lambda weight, x: (weight @ x.t()).t(),
    "linear": lambda weight, x: nn.functional.linear(x, weight),
    "of a slice": lambda weight, x: torch.cat([nn.functional.linear(x, part) for part in weight.chunk(2)], -1),
    "no rule": lambda weight, x: torch.mv(weight, x[0]).expand(6, 64),
}


@pytest.mark.parametrize("form", BORROWED)
def test_a_weight_that_the_module_around_multiplies_by(form):
    """A layer has the name of the module that holds its weight; globs may say that of the module around, too."""
    model = Borrowing(BORROWED[form])
    assert chosen(model, {}) == {"inner.up": "current", "inner.mid": "current", "": "current"}
    assert chosen(model, {"*.up": "none", "": "rowwise"}) == {"inner.up": "none", "inner.mid": "current", "": "rowwise"}
    outer = nn.ModuleDict({"mixer": model})
    outer.forward = lambda x: outer["mixer"](x)
    for policy, up in (({"mixer.inner.up": "rowwise"}, "rowwise"), ({"mixer": "block"}, "block")):
        found = chosen(outer, policy)
        assert found["mixer.inner.up"] == up and found["mixer.inner.mid"] == "current"


def test_what_a_function_is_given():
    seen = []

    def spy(path, shape):
        seen.append((path, shape))
        return False

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})

        def forward(self, x):
            return self.mlp["down"](self.mlp["up"](x))

    assert set(chosen(Model(), {spy: "none"}, x=torch.randn(2, 3, 32)).values()) == {"current"}
    assert seen == [("mlp.up", (6, 64, 32)), ("mlp.down", (6, 32, 64))]
    seen.clear()
    run = torch.compile(Model(), backend="te", dynamic=True, options={"policy": {spy: "none"}, "fallback": "silent"})
    run(torch.randn(X))
    assert [shape for _, shape in seen] == [(None, 64, 32), (None, 32, 64)]  # weights are never symbolic


def test_a_module_that_a_function_closes_over():
    """Its paths are those inside it."""
    model = layers((32, 32), (32, 32))

    def step(x):
        return model(x)

    def train(x):
        return step(x)

    for function in (step, train, lambda x: train(x)):
        assert chosen(function, {"1": "rowwise"}) == {"0": "current", "1": "rowwise"}


def test_unused_entries_are_reported():
    model = layers((32, 32))
    policy = {"0": "none", "lm_head": "none", wide: "none"}
    report = explain(model, torch.randn(X), options={"policy": policy})
    assert report.unused_policy == ["lm_head", "wide"]
    assert "policy entry 'wide' matches no linear site" in str(report)
    with pytest.warns(FallbackWarning) as caught:
        torch.compile(model, backend="te", options={"policy": policy})(torch.randn(X))
    [text] = [str(entry.message) for entry in caught if entry.category is FallbackWarning]
    assert (
        "policy entry 'wide' matches no linear site of this graph, or earlier entries match the same (sites: 0)" in text
        and "'0' matches" not in text
    )


@pytest.mark.parametrize(
    ("entry", "nearest"),
    [
        ("layers.3.mlp.up", "'mlp.up', which 'mlp.up' matches, as paths start at the module whose code was compiled"),
        ("layers.*.mlp.*", "'mlp.up', which 'mlp.*' matches, as paths start at the module whose code was compiled"),
        ("up", "'mlp.up', which '*.up' matches, as paths start at the module whose code was compiled"),
        ("mlp.ub", "'mlp.up'"),
    ],
)
def test_an_unused_entry_names_the_nearest_path(entry, nearest):
    """The policy is written from the root, and the layers are compiled one by one."""
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(32, 32)})})
    layer.forward = lambda x: layer["mlp"]["up"](x)
    with pytest.warns(FallbackWarning) as caught:
        torch.compile(layer, backend="te", options={"policy": {entry: "none"}})(torch.randn(X))
    [text] = [str(one.message) for one in caught if one.category is FallbackWarning]
    assert text.endswith(f"(sites: mlp.up); nearest: {nearest}")


def test_an_entry_behind_another_is_unused_too():
    assert explain(
        layers((32, 32)), torch.randn(X), options={"policy": {"*": "none", "0": "current"}}
    ).unused_policy == ["0"]


def test_behind_graph_breaks():
    """Each graph has the policy; an entry is unused in explain's report where no graph uses it."""

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 96), nn.Linear(96, 32)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    policy = {wide: "rowwise", "second": "block", "third": "none"}
    report = explain(Broken(), torch.randn(X), options={"policy": policy})
    assert {site.fqn: site.recipe for site in report.sites} == {"first": "rowwise", "second": "block"}
    assert report.unused_policy == ["third"]


@pytest.mark.parametrize("name", [wide, "0"], ids=["function", "glob"])
def test_an_entry_overrides_the_size_rule(name, monkeypatch):
    """It does so for the layers that it names alone."""
    rated(monkeypatch)
    report = explain(layers((96, 32), (32, 96)), torch.randn(X), options={"policy": {name: "current"}})
    assert {site.fqn: site.kernel for site in report.sites} == {"0": "inductor", "1": "high_precision"}


def raises(path, shape):
    return shape[0] > "many"


def says_nothing(path, shape):
    return None


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises, "policy function raises raised TypeError for 0 of M=6, N=32, K=32"),
        (says_nothing, "what policy function says_nothing returned for 0 is a NoneType (None), expected a bool"),
    ],
)
def test_a_wrong_function_is_named(function, text):
    with pytest.raises(OptionError) as raised:
        explain(layers((32, 32)), torch.randn(X), options={"policy": {function: "none"}})
    assert text in str(raised.value)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        torch.compile(layers((32, 32)), backend="te", options={"policy": {function: "none"}})(torch.randn(X))
    assert type(raised.value.inner_exception) is OptionError


def behind(decorator):
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(32, 32)

        forward = decorator(lambda self, x: self.lin(x))

    return Decorated()


def passed_on(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


@pytest.mark.parametrize(
    "decorator", [autocast(recipe="rowwise"), torch.no_grad(), passed_on], ids=["autocast", "no_grad", "args"]
)
def test_a_decorated_forward_has_the_same_paths(decorator):
    model, x = behind(decorator), torch.randn(32, 32)
    options = {"policy": {"lin": "none"}, "fallback": "error"}
    report = explain(model, x, options=options)
    assert {site.fqn for site in report.sites} == {"lin"} and not report.unused_policy
    assert torch.equal(torch.compile(model, backend="te", options=options)(x), model(x))


def test_a_model_in_a_list():
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(32, 32)
    assert {site.fqn for site in explain(lambda models, x: models[0](x), [model], x).sites} == {"0"}
    layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    sites = explain(lambda layers, x: layers[1](layers[0](x)), layers, x).sites
    assert {site.fqn for site in sites} == {"0", "1"}


class Inside(nn.Module):
    """A model in an attribute."""

    def __init__(self, name, model):
        super().__init__()
        self.name = name
        self.add_module(name, model)

    def forward(self, x):
        return getattr(self, self.name)(x)


def with_adapters():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(layers((64, 32), (32, 64)), peft.LoraConfig(r=16, target_modules=["0"]))


WRAPPERS = {
    "compile": lambda: torch.compile(layers((64, 32), (32, 64))),
    "forward_module": lambda: Inside("_forward_module", layers((64, 32), (32, 64))),
    "module": lambda: Inside("module", layers((64, 32), (32, 64))),
    "peft": with_adapters,
    "compiled peft in a wrapper": lambda: Inside("_forward_module", torch.compile(with_adapters())),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("glob", ["0", "[0-0]"])
def test_a_glob_for_the_plain_model_matches_the_wrapped_one(wrapper, glob):
    """Reports show plain names; their data has those of `named_modules()`."""
    model = WRAPPERS[wrapper]()
    report = explain(model, torch.randn(X), options={"policy": {glob: "rowwise"}})
    prefix = "module." if wrapper == "module" else ""  # a module that happens to be called as DDP's is
    found = {plain(site.fqn): site.recipe for site in report.sites if "lora" not in site.fqn}
    assert found == {f"{prefix}0": "rowwise", f"{prefix}1": "current"} and not report.unused_policy
    assert "base_" not in str(report) and "_mod" not in str(report)
    assert {site.recipe for site in report.sites if "lora" in site.fqn} <= {"current"}


def test_a_glob_for_the_wrapped_model_matches_it_too():
    for glob in (
        "base_model.model.0.base_layer",
        "base_model.model.0*",
        "0.lora_A.*",
        "base_model.model.0.lora_A.default",
    ):
        report = explain(with_adapters(), torch.randn(X), options={"policy": {glob: "rowwise"}})
        assert not report.unused_policy and "rowwise" in {site.recipe for site in report.sites}


def test_asserting_by_plain_names():
    model = with_adapters()
    compiled = torch.compile(model, backend="te", options={"recipe": "current", "policy": {"1": "none"}})
    for glob in ("1", "base_model.model.1"):
        te_inductor.assert_low_precision(compiled, torch.randn(X), high_precision=[glob])


def test_quantizing_by_plain_names():
    model = with_adapters()
    te_inductor.quantize_(model, "rowwise", policy={"0": "rowwise", "*": "none"}, fallback="error")
    stored = [name for name, parameter in model.named_parameters() if isinstance(parameter, StoredWeight)]
    assert stored == ["base_model.model.0.base_layer.weight"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_module_whose_forward_is_wrapped_keeps_its_path(times):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(x)

    def closed(module):
        inner = module.forward

        def forward(*args):
            return inner(*args)

        module.forward = forward

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    model = Outer()
    for _ in range(times):
        closed(model.inner)
    report = te_inductor.explain(model, torch.randn(4, 32), options={"recipe": "current"})
    assert {site.fqn for site in report.sites} == {"inner.linear"}
