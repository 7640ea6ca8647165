"""Frameworks that compile by themselves, given the backend's name."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import te_inductor
from tests.forked import ROOT


@pytest.fixture
def registered():
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    from te_inductor.integrations.accelerate import register

    AcceleratorState._reset_state(reset_partial_state=True)  # the first Accelerator of a process decides for all
    register()
    register()


def test_accelerate_takes_the_name(registered, monkeypatch):
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="te", options={"recipe": "current"})
    assert plugin.backend is DynamoBackend("TE") and DynamoBackend.list().count("TE") == 1
    assert plugin.to_kwargs()["backend"] == "te"
    with pytest.raises(ValueError, match="TEE"):
        TorchDynamoPlugin(backend="tee")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "TE")
    assert TorchDynamoPlugin().backend is plugin.backend


def test_accelerate_compiles(registered, without_codegen):
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)), torch.randn(8, 64)
    expected = model(x)
    plugin = TorchDynamoPlugin(backend="te", options={"recipe": "current"})
    prepared = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(model)
    te_inductor.assert_low_precision(prepared, x)
    y = prepared(x)
    assert not torch.equal(y, expected) and (y - expected).norm() < 0.1 * expected.norm()


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["argument", "file"])
def test_accelerate_launch(source, tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(
        "from te_inductor.integrations.accelerate import register\nregister()\n"
        "from accelerate import Accelerator\nprint('backend', Accelerator(cpu=True).state.dynamo_plugin.backend.value)\n"
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n"
        "dynamo_config:\n  dynamo_backend: TE\n"
    )
    arguments = ["--cpu", "--dynamo_backend", "te"] if source == "argument" else ["--config_file", str(config)]
    command = [sys.executable, "-m", "te_inductor.integrations.accelerate", "launch", *arguments, str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0 and "backend TE" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.thorough
def test_a_trainer_resumes_with_its_scales(tmp_path, monkeypatch):
    """Compiled, with gradient accumulation: the run that was cut ends where the whole one does."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from examples.trainer import trainer
    from te_inductor.integrations.statistics_log import StatisticsLog
    from te_inductor.integrations.transformers import StatisticsCallback

    monkeypatch.setenv("TE_INDUCTOR_RECIPE", "delayed")

    def trained(resume: bool):
        torch._dynamo.reset()
        run = trainer(tmp_path, 4)
        run.add_callback(StatisticsCallback(StatisticsLog(tmp_path / f"{resume}.jsonl", every=2)))
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
        return run

    whole = trained(False)
    scales = te_inductor.state_dict(whole.model)
    assert scales and (tmp_path / "checkpoint-2" / "te_inductor_state.pt").exists()
    cut = trained(True)
    found = te_inductor.state_dict(cut.model)
    assert found.keys() == scales.keys() and all(torch.equal(found[key], scales[key]) for key in scales)
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
    noted = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in (False, True)}
    assert [json.loads(line)["step"] for line in noted[False]] == [2, 4]
    assert [json.loads(line)["step"] for line in noted[True]] == [4] and json.loads(noted[True][0])["slots"]
    assert cut.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"], rel=1e-5)


def test_an_old_framework_is_refused(monkeypatch):
    from te_inductor.integrations import versions

    monkeypatch.setattr(versions.metadata, "version", lambda package: "1.0.9.dev1")
    with pytest.raises(ImportError, match=r"accelerate is 1\.0\.9\.dev1, expected 1\..* or later; upgrade it"):
        versions.require("accelerate")
    monkeypatch.setitem(versions.MINIMUM, "accelerate", "1.0.0")
    versions.require("accelerate")


def test_a_framework_that_has_changed_is_refused(monkeypatch):
    from te_inductor.integrations import versions

    monkeypatch.setattr(versions.metadata, "version", lambda package: "9.1.0")
    with (
        pytest.raises(
            ImportError, match=r"torchtitan 9\.1\.0 lacks a part that version 0\.3\.0 has \(cannot import.*compile"
        ),
        versions.parts_of("torchtitan"),
    ):
        from torch import nothing  # noqa: F401


def test_scales_lie_in_a_distributed_checkpoint(tmp_path, without_codegen):
    """A distributed checkpoint asks an object that has not run yet for the keys to read; so does Accelerate's
    `load_state`."""
    from torch.distributed import checkpoint

    from te_inductor.errors import StateError
    from te_inductor.integrations.stateful import ScalingState

    def made(calls: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64))
        compiled = torch.compile(model, backend="te", options={"recipe": "delayed"})
        for _ in range(calls):
            compiled(torch.randn(8, 64)).square().mean().backward()
        return model

    model, fresh = made(2), made(0)
    checkpoint.save({"scales": ScalingState(model)}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint.load({"scales": ScalingState(fresh)}, checkpoint_id=tmp_path, no_dist=True)
    scales, found = te_inductor.state_dict(model), te_inductor.state_dict(fresh)
    assert scales and found.keys() == scales.keys() and all(torch.equal(found[key], scales[key]) for key in scales)
    with pytest.raises(StateError, match="scales of 1 models, expected 2"):
        ScalingState(fresh, model).load_state_dict(ScalingState(model).state_dict())
    ScalingState(fresh).load_state_dict(
        ScalingState(nn.Linear(2, 2)).state_dict()
    )  # of high precision: nothing to load
