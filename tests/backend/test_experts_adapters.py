"""Experts with adapters: weights that are computed in the graph, peft's `target_parameters`, and adapters beside experts
that are modules. Against eager references, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize

from te_inductor import explain
from te_inductor.presentation import paths as names
from tests.eager import quantized
from tests.experts import EACH, EXPERTS, HIDDEN, INNER, MoE, reference
from tests.support import autograd
from tests.support.autograd import same
from tests.support.expert_layers import PATHS, ROUTER, results, te, tokens

pytestmark = pytest.mark.usefixtures("without_tracing", "one_seed")
pytest.importorskip("transformers")
thorough = pytest.mark.thorough


class Adapter(nn.Module):
    def __init__(self, shape, rank=4) -> None:
        super().__init__()
        experts, n, k = shape
        self.a = nn.Parameter(torch.randn(experts, rank, k) / k**0.5)
        self.b = nn.Parameter(torch.randn(experts, n, rank))

    def forward(self, w):
        return w + self.b @ self.a


def adapted(model):
    """The adapters of each call alike."""
    torch.manual_seed(1)
    model.experts.requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(model.experts, name, Adapter(getattr(model.experts, name).shape))
    return model


@pytest.mark.parametrize(
    "name", ["current", pytest.param("delayed", marks=thorough), pytest.param("rowwise", marks=thorough)]
)
def test_adapters(name):
    """A weight that is computed in the graph is cast there; the site has the parameter's name."""
    plain, x = MoE(), tokens()
    model, twin = adapted(copy.deepcopy(plain)), adapted(reference(plain, name))
    report = explain(model, x, options={"recipe": name, "policy": ROUTER, "weights": "once", "wgrad": "main_grad"})
    found = {(site.fqn, site.gemm): site.kernel for site in report.sites if "experts" in site.fqn}
    assert sorted(found) == sorted((path, gemm) for path in PATHS for gemm in ("fprop", "dgrad", "wgrad"))
    assert "high_precision" not in found.values()
    assert {one.reason for one in report.unmet if one.fqn in PATHS} == {
        "the weight is computed in the graph, or one of several in a parameter"
    }
    expected = results(twin, twin, x)
    assert same(results(te(model, name), model, x), expected)


def with_peft(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_parameters=PATHS, target_modules=[], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.fixture
def unregistered(monkeypatch):
    pytest.importorskip("peft")
    from te_inductor.integrations import peft

    monkeypatch.setattr(peft.ParamWrapper, "forward", peft._in_eager)
    return peft


@pytest.fixture
def registered(unregistered):
    unregistered.register()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "name", ["delayed", pytest.param("current", marks=thorough), pytest.param("mxfp8", marks=thorough)]
)
def test_peft(name):
    """Adapters of peft on experts' parameters train in low precision, in one graph, and by the parameters' names."""
    plain, x = MoE(), tokens()
    model, twin = with_peft(copy.deepcopy(plain)), with_peft(reference(plain, name))
    expected = results(twin, twin, x)
    run = te(model, name)
    before = counters["stats"]["unique_graphs"]
    assert same(results(run, model, x), expected)
    for _ in range(2):
        run(x).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == before + 1
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora" in name)
    report = explain(model, x, options={"policy": {"experts.down_proj": "rowwise", **ROUTER}})
    low = {names.plain(site.fqn): site.recipe for site in report.sites if "experts" in site.fqn}
    assert low == {PATHS[0]: "current", PATHS[1]: "rowwise"} and not report.unused_policy


@thorough
@pytest.mark.usefixtures("registered")
def test_peft_switched_off_and_merged():
    """The base's own values; and those of the adapters, in the base."""
    model, x = with_peft(MoE()), tokens()
    with model.disable_adapter():
        base = model(x)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), base)
    torch._dynamo.reset()
    high = model(x)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), high)
    assert not torch.equal(high, base)
    model.merge_adapter()
    torch._dynamo.reset()
    merged = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(merged, model(x)) and (merged - high).norm() < 1e-5 * high.norm()


@pytest.mark.usefixtures("unregistered")
def test_peft_that_was_not_registered():
    """Each call would be a compile of its own: the sites say so, and what to do."""
    run = torch.compile(with_peft(MoE()), backend="te", options={"fallback": "error", "policy": ROUTER})
    said = r"FallbackError(.|\n)*each call compiles anew(.|\n)*integrations.peft.register\(\) first: gate_up_proj, down_proj"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=said):
        run(tokens())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Modules(nn.Module):
    """An expert is a module, and sees the rows that chose it, of which only a run knows how many there are; or all."""

    def __init__(self, all_rows: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))
        self.all_rows = all_rows

    def forward(self, x):
        scores, ids = self.gate(x).softmax(-1).topk(EACH, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.all_rows:
                y = y + (scores * (ids == number)).sum(-1, keepdim=True) * expert(x)
            else:
                rows, choice = torch.where(ids == number)
                y = y.index_add(0, rows, expert(x[rows]) * scores[rows, choice][:, None])
        return y


@thorough
@pytest.mark.parametrize("all_rows", [True, False])
def test_experts_that_are_modules(all_rows):
    """peft's adapters stand beside each expert's layers, as beside any."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["w1", "w2", "w3"], init_lora_weights=False)
    model, x = peft.get_peft_model(Modules(all_rows), config), tokens()
    options = {"recipe": "current", "policy": ROUTER}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 3 * EXPERTS
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        twin = quantized(model, x, options=options)
        expected = autograd.results(twin, [p for p in twin.parameters() if p.requires_grad], x)
        assert same(autograd.results(te(model, "current"), trained, x), expected)
