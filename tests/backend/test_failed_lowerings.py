"""Lowerings that fail: Note [Lowerings that fail]. Nothing is written twice, and no cache keeps the graph."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.lowering import lowerings

import te_inductor
from te_inductor import backward_dw, compat
from te_inductor.errors import FallbackWarning
from te_inductor.lowerings import install
from tests.support.main_grads import with_totals


class TwoLayers(nn.Module):
    """Two layers of one input, hence one GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32, bias=False), nn.Linear(32, 48, bias=False)

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x)], -1)


def step(model: nn.Module, **options) -> tuple[list[torch.Tensor], list[str]]:
    """What a step leaves, gradients and scaling state, and what was said."""
    torch.manual_seed(0)
    x = torch.randn(8, 32, requires_grad=True)
    if options.get("wgrad") == "main_grad":
        with_totals(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(model, backend="te", options=options)(x).square().sum().backward()
        backward_dw()
    gradients = [getattr(p, "main_grad", p.grad) for p in model.parameters()]
    texts = [str(entry.message) for entry in caught if entry.category is FallbackWarning]
    return [x.grad, *gradients, *te_inductor.state_dict(model).values()], texts


@pytest.mark.parametrize(
    "place", ["te_inductor.compat.compile_fx", "te_inductor.passes.pre_grad.rewrite.sites.take_gradients"]
)
def test_a_graph_without_us_says_that_main_grad_stays_empty(place, without_codegen, monkeypatch):
    """A compile that fails, or a pass: autograd has the gradients, once."""
    compile_fx, tried = compat.compile_fx, []

    def failing(gm, *args):
        tried.append(gm)
        if place.endswith("take_gradients") or len(tried) == 1:
            raise RuntimeError("injected")
        return compile_fx(gm, *args)

    monkeypatch.setattr(place, failing)
    model, twin = TwoLayers(), TwoLayers()
    _, [text] = step(model, wgrad="main_grad")
    assert "compiled without low precision" in text and "injected" in text
    assert "option 'wgrad' does not reach" in text and "go to autograd: q, k" in text
    torch.manual_seed(0)
    twin.load_state_dict(model.state_dict())
    twin(torch.randn(8, 32)).square().sum().backward()
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad)
        assert not p.main_grad.any() and not p.grad_added_to_main_grad


def test_layers_in_high_precision_are_told_of_main_grad(without_codegen):
    model = with_totals(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1)))
    unmet = te_inductor.explain(model, torch.randn(8, 32), options={"recipe": "current", "wgrad": "main_grad"}).unmet
    assert unmet == [("wgrad", "1", "the layer stays in high precision, so that its weight gradient goes to autograd")]


def broken(op, count: int):
    """Inductor's lowerings, of which that of `op` fails behind its work, from its `count`-th call on."""
    calls = []

    def lower(*args):
        result = lowerings[op](*args)
        calls.append(op)
        if len(calls) >= count:
            raise RuntimeError("injected")
        return result

    return {**lowerings, op: lower}


aten, COMPILE_FX = torch.ops.aten, compat.compile_fx
CASES = {
    "accumulate_wgrad": (
        "gemm.weight_grads.lowerings",
        broken(aten.add_, 2),
        {"recipe": "current", "wgrad": "main_grad"},
    ),
    "defer_wgrad": (
        "gemm.weight_grads.ir",
        SimpleNamespace(FallbackKernel="injected"),
        {"recipe": "current", "wgrad": "deferred"},
    ),
    "record_amax": ("casts.quantize.lowerings", broken(aten.copy_, 1), {"recipe": "delayed"}),
}


@pytest.mark.parametrize("op", CASES)
def test_nothing_is_written_twice(op, without_codegen, monkeypatch, no_caches):
    install()
    place, failing, options = CASES[op]
    model, twin = TwoLayers(), TwoLayers()
    twin.load_state_dict(model.state_dict())
    expected, texts = step(twin, **options)
    assert not texts
    torch._dynamo.reset()
    monkeypatch.setattr(compat, "compile_fx", COMPILE_FX)
    monkeypatch.setattr(f"te_inductor.lowerings.{place}", failing)
    left, texts = step(model, **options)
    assert len(texts) == 1
    assert all("run in the eager runtime" in text and f"te_inductor.{op}" in text for text in texts)
    for one, other in zip(left, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-20, atol=0.0)


def test_no_cache_keeps_a_graph_whose_lowering_failed(monkeypatch, tmp_path):
    """What finds it would be told nothing."""
    install()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *tensors: None)
    monkeypatch.setattr("te_inductor.lowerings.casts.quantize.encode_scale", None)
    for _ in range(2):
        torch._dynamo.reset()
        model = torch.compile(
            nn.Linear(32, 32), backend="te", options={"policy": {"*": "current"}, "fallback": "error"}
        )
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="run in the eager runtime"):
            model(torch.randn(16, 32))
