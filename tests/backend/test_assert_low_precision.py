"""Layers that no compiled graph reached: `assert_low_precision` sees what ran, and `explain` counts them."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import te_inductor
from te_inductor import assert_low_precision, explain
from te_inductor.api.eager_products import UNREACHED
from te_inductor.errors import FallbackError, FallbackWarning, OptionError, TEInductorError

pytestmark = pytest.mark.usefixtures("without_tracing")

QUIET = {"fallback": "silent"}


class Broken(nn.Module):
    """A break in a loop, which Dynamo gives the whole frame up for, or behind a layer."""

    def __init__(self, in_loop: bool) -> None:
        super().__init__()
        self.in_loop = in_loop
        self.body, self.head = nn.ModuleList(nn.Linear(32, 32) for _ in range(2)), nn.Linear(32, 48)

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
            if self.in_loop:
                torch._dynamo.graph_break()
        return skipped(self.head, x)


@torch._dynamo.disable
def skipped(layer, x):
    return layer(x)


def compiled(model, **options):
    return torch.compile(model, backend="te", options={**QUIET, **options})


class Block(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


def blocks(kind):
    """Each compiled by itself."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(kind(nn.Linear(32, 32), nn.Linear(32, 10)) for _ in range(2))})
    for block in model["blocks"]:
        block.compile(backend="te", options=QUIET)
    model.forward = lambda x: [block(x) for block in model["blocks"]]
    return model


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(k, n) for n, k in sizes))


X = torch.randn(16, 32)


@pytest.mark.traced
def test_what_runs_in_low_precision_passes():
    model = compiled(layers((48, 32), (32, 48)))
    for _ in range(2):  # compiled in the call, and found in Dynamo's cache
        report = assert_low_precision(model, X)
        assert {(site.fqn, site.kernel) for site in report.sites} == {("0", "inductor"), ("1", "inductor")}
    with torch.no_grad():
        assert len(assert_low_precision(model, X).sites) == 2  # fprop of each, of another graph


@pytest.mark.parametrize("grad", [True, False])
def test_what_no_graph_reached_is_named(grad):
    model = compiled(Broken(in_loop=False))
    for _ in range(2):
        with pytest.raises(FallbackError) as raised, torch.set_grad_enabled(grad):
            assert_low_precision(model, X)
        assert f"1 of 3 layers ran in high precision:\n  {UNREACHED}: head\n" in str(raised.value)
    report = assert_low_precision(model, X, high_precision=["head"])
    assert report.sites[-1].shapes == (16, 48, 32) and report.flops.low * 7 == report.flops.total * 4


def test_a_model_of_which_nothing_is_compiled():
    with pytest.raises(FallbackError, match=r"body\.0, body\.1, head"):
        assert_low_precision(compiled(Broken(in_loop=True)), X)
    with pytest.raises(FallbackError, match="no layer ran in low precision"):
        assert_low_precision(compiled(nn.ReLU()), X)
    with pytest.raises(FallbackError, match=f"{UNREACHED[:20]}.*: 0"), torch.autocast("cpu", torch.bfloat16):
        assert_low_precision(layers((32, 32)), X)


def test_reasons_and_what_is_meant_to_be_in_high_precision(monkeypatch):
    model = compiled(layers((96, 32), (32, 96), (10, 32)), policy={"0": "none"})
    with pytest.raises(FallbackError) as raised:
        assert_low_precision(model, X)
    assert "  recipe 'none', by the options, the policy or autocast: 0\n" in str(raised.value)
    assert "N=10, K=32 would be padded to multiples of 16: 1.60x the work: 2\n" in str(raised.value)
    assert_low_precision(model, X, high_precision=["0", "2"])
    with pytest.raises(FallbackError, match=r"match no layer that ran in high precision: lm_head$"):
        assert_low_precision(model, X, high_precision=["[02]", "lm_head"])
    with pytest.raises(OptionError, match="expected a list"):
        assert_low_precision(model, X, high_precision="0")


@pytest.mark.traced
def test_layers_compiled_one_by_one_are_named_from_the_root():
    """One graph serves both."""
    model = blocks(Block)
    with pytest.raises(FallbackError, match=r"1 of 2 .*\n.*: blocks\.0\.1\n"):
        assert_low_precision(model, X)
    paths = {site.fqn for site in assert_low_precision(model, X, high_precision=["blocks.*.1"]).sites}
    assert paths == {"blocks.0.0", "blocks.0.1"}
    with pytest.raises(FallbackError, match=r"blocks\.0\.0, blocks\.0\.1, blocks\.1\.0, blocks\.1\.1"):
        assert_low_precision(
            blocks(nn.Sequential), X
        )  # Dynamo skips the frame that `compile` of a module of torch's wraps


def test_a_function_and_a_failed_compile(monkeypatch):
    model = layers((32, 32))
    step = torch.compile(lambda x: model(x).sum(), backend="te", options=QUIET)
    assert {site.fqn for site in assert_low_precision(step, x=X).sites} == {"0"}

    def fails(*_):
        raise ValueError("no")

    monkeypatch.setattr("te_inductor.backend.bind", fails)
    with pytest.raises(FallbackError, match="its compile failed: 0"):
        assert_low_precision(compiled(layers((32, 32))), X)


def test_a_profiler_in_use_is_left_alone():
    with torch.profiler.profile() as profiler, pytest.raises(TEInductorError, match="expected a call outside of it"):
        assert_low_precision(compiled(layers((32, 32))), X)
    assert profiler.events() is not None


def test_reports_go_with_dynamos_reset():
    model = compiled(layers((32, 32)))
    assert_low_precision(model, X)
    torch._dynamo.reset()
    assert not te_inductor.runtime.compiled_graphs._graphs


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("grad", [True, False])
def test_explain_counts_what_no_graph_has(in_loop, grad):
    with torch.set_grad_enabled(grad), pytest.warns(FallbackWarning) if in_loop else pytest.MonkeyPatch.context():
        report = explain(Broken(in_loop), X)
    high = [site.fqn for site in report.fallbacks if site.reason == UNREACHED and site.recipe == "current"]
    assert high == (["body.0", "body.1", "head"] if in_loop else ["head"])
    low = 0 if in_loop else 5 if grad else 2
    assert f"te_inductor: {low} of {low + len(high)} GEMMs" in str(report)
    assert report.flops.total == 2 * 16 * 32 * (32 + 32 + 48)
    assert report.flops.low == (0 if in_loop else 2 * 16 * 32 * 64)


def test_explain_gives_them_the_policy_and_the_region():
    report = explain(Broken(False), X, options={"policy": {"head": "none", "tail": "none"}})
    assert [site.recipe for site in report.sites if site.fqn == "head"] == ["none"] and not report.fallbacks
    assert report.unused_policy == ["tail"]
    with te_inductor.autocast(recipe="rowwise"):
        assert {site.recipe for site in explain(Broken(False), X).sites} == {"rowwise"}
    with te_inductor.autocast(enabled=False):
        assert not explain(Broken(False), X).fallbacks


def forms():
    weight, wide = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.randn(2, 32, 48))
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 48))
    yield "product", lambda x: x @ weight, (16, 48, 32), "a parameter of shape (32, 48)"
    yield "einsum", lambda x: torch.einsum("mk,kn->mn", x, weight), (16, 48, 32), "a parameter of shape (32, 48)"
    yield "batched", lambda x: torch.bmm(x.expand(2, -1, -1), wide), (32, 48, 32), "a parameter of shape (2, 32, 48)"
    yield "first", lambda x: weight.T @ x.T, (48, 16, 32), "a parameter of shape (32, 48)"
    yield "computed", lambda x: normed(x), (16, 48, 32), ""


@pytest.mark.parametrize(("function", "sizes", "fqn"), [form[1:] for form in forms()], ids=[f[0] for f in forms()])
@pytest.mark.parametrize("cast", [False, True])
def test_forms_of_an_eager_product(function, sizes, fqn, cast):
    with torch.autocast("cpu", torch.bfloat16, enabled=cast), pytest.warns(FallbackWarning):
        report = explain(torch._dynamo.disable(function), X)
    assert [(site.shapes, site.fqn) for site in report.sites] == [(sizes, fqn)]


def test_products_of_activations_and_checkpointed_graphs_are_no_eager_layers():
    lin = nn.Linear(32, 32)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = lin

        def forward(self, x):
            x = checkpoint(self.lin, x, use_reentrant=False)
            return skipped(lambda x: x @ x.T, x)

    assert {site.kernel for site in explain(Model(), X).sites} == {"inductor"}
    assert {site.kernel for site in assert_low_precision(compiled(Model()), X).sites} == {"inductor"}


def test_what_fsdps_hooks_keep_from_dynamo(one_rank):
    """Dynamo traces no hook of FSDP2, and so compiles the frames between: none of the head, a module of torch's own."""
    model = Broken(in_loop=False)
    model.forward = lambda x: model.head(model.body(x))
    model.body = Block(*model.body)
    for part in (model.body, model.head):
        fully_shard(part, mesh=one_rank)
    report = explain(model, X)
    assert [site.fqn for site in report.fallbacks] == ["head"] and report.flops.low * 7 == report.flops.total * 4
    with pytest.raises(FallbackError, match=f"{UNREACHED[:20]}.*: head\n"):
        assert_low_precision(compiled(model), X)


def test_a_module_with_a_backward_hook():
    model = layers((32, 32), (48, 32))
    model[1].register_full_backward_hook(lambda *_: None)
    with pytest.warns(FallbackWarning, match="gave no graph"):
        assert [site.fqn for site in explain(model, X).fallbacks] == ["0", "1"]  # a break in the loop of nn.Sequential
    with pytest.raises(FallbackError, match=f"{UNREACHED[:20]}.*: 0, 1\n"):
        assert_low_precision(compiled(model), X)
