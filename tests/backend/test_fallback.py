"""Every rung of the ladder, and what each says. Injected failures stand for bugs of ours and of the layers below."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from te_inductor import accuracy_report, compat, explain, lowerings, quantize_, targets
from te_inductor.errors import FallbackError, FallbackWarning
from te_inductor.passes import pre_grad
from te_inductor.passes.pre_grad.sites import requirements
from te_inductor.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from tests.eager import quantized
from tests.forked import PROGRAMS
from tests.passes import leave_out
from tests.support.kernels import pretend

pytestmark = pytest.mark.usefixtures("without_tracing")

X = (6, 32)


def warned(model, *inputs, **options) -> tuple[torch.Tensor, list[str]]:
    """The compiled model's output and the FallbackWarnings of its compile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = torch.compile(model, backend="te", options=options)(*inputs)
    return y, [str(entry.message) for entry in caught if entry.category is FallbackWarning]


def model_with_a_narrow_head() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1))


def test_a_refused_site_stays_in_high_precision_and_is_named_once():
    model = model_with_a_narrow_head()
    y, texts = warned(model, torch.randn(X))
    assert y.shape == (6, 1)
    [text] = texts
    assert "1 of 3 linear sites stay in high precision" in text
    assert "N=1, K=32 would be padded to multiples of 16: 16.00x the work: 2" in text


def test_silent_and_error():
    _, texts = warned(model_with_a_narrow_head(), torch.randn(X), fallback="silent")
    assert texts == []
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="would be padded") as raised:
        warned(model_with_a_narrow_head(), torch.randn(X), fallback="error")
    assert type(raised.value.inner_exception) is FallbackError


def test_nothing_is_said_where_everything_runs_as_asked():
    assert warned(nn.Linear(32, 32), torch.randn(X))[1] == []
    assert warned(nn.Linear(32, 32), torch.randn(X), recipe="none")[1] == []
    assert warned(nn.ReLU(), torch.randn(X))[1] == []
    assert warned(nn.ReLU(), torch.randn(X), policy={"lm_head": "none"})[1] == []  # a graph without layers


def test_an_emulated_site_is_named_once():
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 1)), torch.randn(X)
    y, [text] = warned(model, x, recipe="mxfp8")
    assert "2 of 3 linear sites are emulated:" in text and "1 of 3 linear sites stay in high precision:" in text
    assert (
        "no tensor cores for e4m3 with scales of 1x32 on cpu: exact values, multiplied in float32" in text
        and ": 0, 1" in text
    )
    assert not torch.equal(y, model(x))
    report = explain(model, x, options={"recipe": "mxfp8"})
    assert {(site.fqn, site.kernel) for site in report.sites} == {
        ("0", "emulated"),
        ("1", "emulated"),
        ("2", "high_precision"),
    }
    assert all("no tensor cores" in site.reason for site in report.sites if site.kernel == "emulated")
    assert "emulated" in str(report)
    torch._dynamo.reset()
    assert warned(model[0], x, recipe="mxfp8", fallback="silent")[1] == []
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no tensor cores for e4m3 with scales of 1x32"):
        warned(model[0], x, recipe="mxfp8", fallback="error")


@pytest.mark.parametrize(("device", "named"), [("cpu", "on cpu"), ("cuda", "on compute capability 9.0")])
def test_where_microscaling_is_emulated(device, named, monkeypatch):
    pretend(monkeypatch, (9, 0))
    slots, where = MXFP8BlockScaling().slots(), torch.device(device)
    assert named in str(requirements.emulated(slots, where))
    # Padding to 32 costs nothing where nothing is faster; where the operands themselves are multiplied, it does.
    weight = SimpleNamespace(device=where)
    assert requirements.blocks(slots, weight, 48, 80) is None
    assert requirements.emulated(Float8CurrentScaling().slots(), where) is None
    native = replace(targets.of(where), microscaled_mm=(("e4m3", "1x32"),))
    monkeypatch.setattr(targets, "of", lambda device: native)
    assert requirements.emulated(slots, where) is None
    assert "padded to multiples of 32" in str(requirements.blocks(slots, weight, 48, 80))


def test_an_unused_policy_entry_is_reported():
    _, [text] = warned(nn.Sequential(nn.Linear(32, 32)), torch.randn(X), policy={"0": "none", "lm_head": "none"})
    assert "policy entry 'lm_head' matches no linear site" in text and "'0' matches" not in text
    # Another graph, behind a graph break, may use the glob: not an error even where fallbacks are.
    _, [text] = warned(nn.Linear(32, 32), torch.randn(X), policy={"lm_head": "none"}, fallback="error")
    assert "policy entry 'lm_head' matches no linear site" in text
    report = explain(nn.Sequential(nn.Linear(32, 32)), torch.randn(X), options={"policy": {"lm_head": "none"}})
    assert report.unused_policy == ["lm_head"] and "lm_head" in str(report)


@pytest.mark.parametrize("report", [explain, accuracy_report])
def test_nothing_to_report_is_said(report):
    """It is so where Dynamo has given up on the model: an empty report alone would look like a model without layers."""
    with pytest.warns(FallbackWarning, match=r"gave no graph of the model.*torch\._dynamo\.reset"):
        assert not report(lambda x: x, torch.randn(X)).sites
    with pytest.raises(FallbackError, match="no graph"):
        report(lambda x: x, torch.randn(X), options={"fallback": "error"})


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (torch.randn(X, dtype=torch.float64), torch.randn(32, 32, dtype=torch.float64), "dtype float64 is not"),
        (torch.randn(0, 32), torch.randn(32, 32), "empty batch"),
        (torch.randn(6, 1), torch.randn(32, 1), "N=32, K=1 would be padded"),
        (torch.randn(6, 32), torch.randn(1, 32), "N=1, K=32 would be padded"),
        (torch.randint(9, X), torch.randint(9, (32, 32)), "dtype int64 is not"),
        (torch.randn(X, device="meta"), torch.randn(32, 32, device="meta"), "device type meta has no FP8 GEMM"),
    ],
    ids=["float64", "empty batch", "K of 1", "N of 1", "integers", "device"],
)
def test_inputs_that_cannot_run(x, weight, reason):
    def linear(x, weight):
        return nn.functional.linear(x, weight)

    y, [text] = warned(linear, x, weight)
    assert reason in text
    if x.device.type != "meta":
        torch.testing.assert_close(y, linear(x, weight))


@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4_weight_only"])
def test_operands_of_two_dtypes(recipe):
    """torch refuses them, and so does a compiled graph; autocast casts them."""
    x, layer = torch.randn(X), nn.Linear(32, 32, dtype=torch.bfloat16)

    def run(bias=None):
        torch._dynamo.reset()
        options = {"recipe": recipe, "policy": {"*": recipe}, "fallback": "error"}
        return torch.compile(lambda x: nn.functional.linear(x, layer.weight, bias), backend="te", options=options)(x)

    for bias in (None, torch.randn(32)):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="operands of float32 and bfloat16, which"):
            run(bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert run().dtype == torch.bfloat16


def test_a_weight_longer_than_kernels_count():
    """The limit holds, too, where it would be stored, and then written out or multiplied."""
    assert str(requirements.sizes(2**24, 64)) == "weight of 16777216 x 64, longer than 8388608"
    assert requirements.sizes(2**23, 64) is None
    with pytest.raises(FallbackError, match="keeps its weight: weight of 64 x 16777216, longer than 8388608"):
        quantize_(nn.Linear(2**24, 64, device="meta"), fallback="error")


def test_a_device_before_fp8(monkeypatch):
    pretend(monkeypatch, (8, 0))
    assert str(targets.of(torch.device("cuda")).refusal) == (
        "compute capability 8.0 has no FP8 tensor cores, 8.9 is the first"
    )
    pretend(monkeypatch, (8, 9))
    assert targets.of(torch.device("cuda")).refusal is None


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [
        ((9, 0), "13.0", None),
        ((9, 0), "12.9", None),
        ((9, 0), "12.8", "scales of blocks want compute capability 9.0 and CUDA 12.9, here are 9.0 and 12.8"),
        ((8, 9), "13.0", "scales of blocks want compute capability 9.0 and CUDA 12.9, here are 8.9 and 13.0"),
        ((10, 0), "13.0", "scales of blocks want compute capability 9.0 and CUDA 12.9, here are 10.0 and 13.0"),
        ((9, 0), None, "scales of blocks want compute capability 9.0 and CUDA 12.9, here are 9.0 and None"),
    ],
)
def test_devices_without_gemms_of_blocks(capability, cuda, reason, monkeypatch):
    pretend(monkeypatch, capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    weight = SimpleNamespace(device=torch.device("cuda"))
    refusal = requirements.blocks(Float8BlockScaling().slots(), weight, 256, 256)
    assert (refusal and str(refusal)) == reason
    assert requirements.blocks(Float8CurrentScaling().slots(), weight, 256, 256) is None


def test_padding_to_blocks():
    """K to 128 in fprop, N in dgrad; what 16 would have allowed may be too much."""
    _, [text] = warned(nn.Linear(80, 240), torch.randn(6, 80), recipe="block")
    assert "N=240, K=80 would be padded to multiples of 128: 1.33x the work" in text
    assert warned(nn.Linear(240, 368), torch.randn(6, 240), recipe="block")[1] == []
    assert warned(nn.Linear(80, 240), torch.randn(6, 80), recipe="rowwise")[1] == []


@pytest.mark.quick("inline_attention", "match_sites", "merge_sites", "guard_extras", "start_builds", "rewrite_sites")
@pytest.mark.parametrize("step", [step.__name__ for step in pre_grad.PASSES])
def test_a_failing_pass_leaves_the_users_program_alone(step, monkeypatch):
    real = getattr(pre_grad, step)

    def broken(plan):
        real(plan)  # fail after the work is done: a rewrite must be undone
        raise RuntimeError("injected")

    broken.__name__ = step
    leave_out(monkeypatch, pre_grad, real, broken)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(X)
    y, [text] = warned(model, x, policy={"0": "none"})
    assert "compiled without low precision" in text and "RuntimeError: injected" in text
    assert "a pass failed: 0" not in text  # "none" is what was asked for there
    torch.testing.assert_close(y, model(x))  # high precision, to rounding
    y.sum().backward()


def test_a_failing_compile_is_tried_again_without_us(monkeypatch):
    real, calls = compat.compile_fx, []

    def broken(gm, *args):
        calls.append(sum("te_inductor" in str(node.target) for node in gm.graph.nodes))
        if calls[-1]:
            raise RuntimeError("injected")
        return real(gm, *args)

    monkeypatch.setattr(compat, "compile_fx", broken)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(X)
    y, [text] = warned(model, x)
    assert calls == [2, 0]
    assert "compiled without low precision" in text and "RuntimeError: injected" in text
    torch.testing.assert_close(y, model(x))


def in_vmap(model, x):
    return torch.func.vmap(model)(x)


def in_dual_level(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).primal


@pytest.mark.traced
@pytest.mark.parametrize("transformed", [in_vmap, in_dual_level])
def test_a_compile_that_fails_inside_a_transform_leaves_none_behind(transformed, monkeypatch):
    """What is traced next, the user's own graph, would run inside it."""
    monkeypatch.setattr("te_inductor.passes.pre_grad.decide.transforms.refusal", lambda transform: None)
    model = nn.Linear(32, 32)
    x = torch.randn(4, *X)
    y, [text] = warned(lambda x: transformed(model, x), x)
    assert "compiled without low precision" in text
    torch.testing.assert_close(y, model(x))


def test_a_graph_that_fails_without_us_too_is_the_users_error(monkeypatch):
    def broken(*_):
        raise RuntimeError("not ours")

    monkeypatch.setattr(compat, "compile_fx", broken)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="not ours"):
        warned(nn.Linear(32, 32), torch.randn(X))


@pytest.mark.codegen
def test_failing_lowerings_run_in_the_eager_runtime(monkeypatch, no_caches):
    lowerings.install()

    def broken(*_):
        raise RuntimeError("injected")

    for name in ("encode_scale", "_cast"):
        monkeypatch.setattr(f"te_inductor.lowerings.casts.quantize.{name}", broken)
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(X)
    y, [text] = warned(model, x)
    assert "run in the eager runtime" in text and "RuntimeError: injected" in text
    assert "te_inductor.current_scale" in text and "te_inductor.quantize" in text
    with pytest.warns(FallbackWarning, match="run in the eager runtime"):
        y.sum().backward()  # its graph is compiled here, and says so for itself
    assert model[0].weight.grad is not None
    torch.testing.assert_close(y, quantized(model, x, options={})(x))
    with torch.no_grad():
        torch._dynamo.reset()
        assert warned(model, x, fallback="silent")[1] == []
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="run in the eager runtime"):
            warned(model, x, fallback="error")


@pytest.mark.codegen
@pytest.mark.parametrize(
    "recipe", ["current", *(pytest.param(recipe, marks=pytest.mark.thorough) for recipe in ("rowwise", "block"))]
)
def test_no_lowering_fails_in_a_gated_mlp(recipe, no_caches, without_cpp):
    """gate's and up's gradients are computed from the same tensors, and stand side by side in one copy."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(128, 384), nn.Linear(128, 384), nn.Linear(384, 128)

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    model, x = Mlp().bfloat16(), torch.randn(80, 128).bfloat16().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        torch.compile(model, backend="te", options={"recipe": recipe})(x).sum().backward()
    assert x.grad is not None


def test_a_cache_that_cannot_be_written(tmp_path):
    """The graph runs uncompiled, rewritten as it is, forward and backward."""
    done = PROGRAMS.run("tests.backend.nowhere_to_write", str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("recipe", ["none", "rowwise", "delayed"])
def test_a_view_that_negates_keeps_its_sign(recipe):
    """Its memory is that of the values before the sign, which is all that Inductor's code sees."""
    z, layer = torch.randn(16, 32, dtype=torch.complex64, requires_grad=True), nn.Linear(32, 32)

    def run(x, kept):
        return layer(x), kept.add_(1.0)

    def outcome(run):
        memory = torch.ones(16, dtype=torch.complex64)
        y, kept = run(z.conj().imag, memory.conj().imag)
        return memory.imag, kept, y, *torch.autograd.grad(y.square().sum(), [layer.weight, layer.bias, z])

    with pytest.warns(FallbackWarning, match=r"a graph runs uncompiled, as one of its inputs is a view that negates"):
        found = outcome(torch.compile(run, backend="te", options={"recipe": recipe}))
    for one, expected in zip(found, outcome(run), strict=True):
        assert (one - expected).norm() <= (0 if recipe == "none" else 0.15) * expected.norm()


def test_a_rule_that_raises(monkeypatch):
    """An exception in a pattern: the program runs as the user wrote it."""

    def broken(self, node):
        raise ZeroDivisionError("injected")

    monkeypatch.setattr("te_inductor.passes.pre_grad.sites.linear.LinearCall.match", broken)
    model, x = nn.Linear(32, 32), torch.randn(X)
    y, [text] = warned(model, x)
    assert "because a pass of ours failed" in text and "ZeroDivisionError: injected" in text
    torch.testing.assert_close(y, model(x))
