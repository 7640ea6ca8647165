"""`explain(…, target=…)` about a device that is not here, of models that take no memory."""

import pytest
import torch
from torch import nn

from te_inductor import explain, targets
from te_inductor.errors import OptionError
from te_inductor.targets import cpu, sm90

K, N, TOKENS = 4096, 16384, 8192


def mlp(device="meta"):
    with torch.device(device):
        return nn.Sequential(nn.Linear(K, N, dtype=torch.bfloat16), nn.GELU(), nn.Linear(N, K, dtype=torch.bfloat16))


def x(device="cpu", tokens=TOKENS):
    return torch.empty(tokens, K, device=device, dtype=torch.bfloat16, requires_grad=True)


@pytest.fixture
def without_cutlass(monkeypatch):
    monkeypatch.setattr("te_inductor.kernels.cutlass_packages.missing", lambda: "it is not installed")


@pytest.mark.usefixtures("without_cutlass")
def test_a_model_on_the_meta_device():
    report = explain(mlp(), x(), target="h100", options={"recipe": "current"})
    assert {site.kernel for site in report.sites} == {"cublaslt"} and not report.fallbacks
    [weighed], expected = report.weights, report.expected
    assert expected.device == "NVIDIA H100 80GB HBM3" and expected.rates == weighed.rates == sm90.OTHER.source
    assert expected.step_s == weighed.device_s - weighed.gain_s > weighed.host_s and not expected.by_host
    assert expected.bf16_s == weighed.device_s
    assert expected.parameters_bytes == expected.gradients_bytes == 2 * (2 * N * K + N + K)
    assert expected.peak_bytes == -2 * TOKENS * (K + N)  # Note [Memory rule]: nothing is an output layer
    text = str(report)
    assert "expected on NVIDIA H100 80GB HBM3, a prediction for which nothing ran:" in text
    assert "kernels: those without CUTLASS, as it is not installed" in text


@pytest.mark.usefixtures("without_cutlass")
def test_what_the_size_rule_would_leave():
    report = explain(mlp(), x(tokens=64), target="h200", options={"recipe": "current"})
    assert {site.kernel for site in report.sites} == {"high_precision"}
    assert all(site.reason.startswith("too small for FP8 to pay") for site in report.sites)
    assert report.expected.peak_bytes == 0 and report.expected.by_host


@pytest.mark.usefixtures("without_cutlass")
def test_a_forward_has_no_gradients():
    with torch.no_grad():
        report = explain(mlp(), x(), target="h200")
    assert report.expected.gradients_bytes == 0 and "peak" not in str(report.expected)


def test_a_device_without_rates():
    report = explain(mlp(), x(), target="b200", options={"recipe": "mxfp8"})
    assert {site.kernel for site in report.sites} == {"cublaslt"} and report.expected.step_s is None
    assert "step: unknown" in str(report)


def test_the_same_of_a_model_on_the_cpu():
    """It runs there once, and is decided about as if it were on the device."""
    small = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    given = torch.randn(64, 256, requires_grad=True)
    options = {"policy": {"*": "rowwise"}}
    here = explain(small, given, target="h100", options=options)
    meta = explain(small.to("meta"), given, target="h100", options=options)
    assert here.to_dict() == meta.to_dict() and "emulated" not in {site.kernel for site in here.sites}
    assert targets.of(torch.device("cpu")) is cpu.TARGET
    assert explain(nn.Linear(64, 64), torch.randn(16, 64)).expected is None


@pytest.mark.parametrize(
    ("target", "text"), [("h10", "did you mean 'h100'"), ("tpu", "expected one of b200, h100, h200")]
)
def test_unknown_targets(target, text):
    with pytest.raises(OptionError, match=f"unknown target '{target}'; {text}"):
        explain(mlp(), x(), target=target)


def test_a_target_that_is_the_models_own():
    def loss(x, target):
        return x @ target

    assert explain(loss, torch.randn(16, 32), target=torch.randn(32, 16)).expected is None
