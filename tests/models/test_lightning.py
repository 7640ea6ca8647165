"""Lightning's Trainer and Fabric, given the backend's name."""

import json
from types import SimpleNamespace

import pytest
import torch

import te_inductor

pytest.importorskip("lightning")


@pytest.fixture
def run(without_codegen):
    from examples import lightning_run

    return lightning_run


def fresh():
    torch._dynamo.reset()


def test_a_trainer_resumes_with_its_scales(run, tmp_path):
    """The run that was cut ends where the whole one does: weights, scales and losses."""
    whole = run.trained(tmp_path, 4)
    checkpoint = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    assert checkpoint["te_inductor_state"] and not [key for key in checkpoint["state_dict"] if "_orig_mod" in key]
    fresh()
    cut = run.trained(tmp_path, 4, tmp_path / "step=2.ckpt")
    assert len(whole.losses) == 4 and cut.losses == whole.losses[2:]
    scales, found = te_inductor.state_dict(whole), te_inductor.state_dict(cut)
    assert found.keys() == scales.keys() and all(torch.equal(found[key], scales[key]) for key in scales)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), cut.parameters(), strict=True))


def test_a_checkpoint_without_scales_is_loaded(run, tmp_path):
    run.trained(tmp_path, 2, recipe="none")
    assert "te_inductor_state" not in torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    fresh()
    assert len(run.trained(tmp_path, 4, tmp_path / "step=2.ckpt").losses) == 2


def test_fabric_runs_in_low_precision(run):
    model, low = run.trained_by_fabric(3)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    te_inductor.assert_low_precision(model, tokens, high_precision=[])
    fresh()
    _, high = run.trained_by_fabric(3, recipe="none")
    assert low != high and low == pytest.approx(high, rel=0.05)


def test_statistics_are_written(run, tmp_path):
    """A trainer calls the callback behind each batch with what it reads: the step, and whether it is the first rank."""
    from te_inductor.integrations.lightning import StatisticsCallback
    from te_inductor.integrations.statistics_log import StatisticsLog

    model = run.trained(tmp_path, 2)
    callback = StatisticsCallback(StatisticsLog(tmp_path / "statistics.jsonl", every=2))
    for step in (1, 2, 2):
        trainer = SimpleNamespace(global_step=step, is_global_zero=True)
        callback.on_train_batch_end(trainer, model, None, None, step)
    [line] = (tmp_path / "statistics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2 and json.loads(line)["slots"]
