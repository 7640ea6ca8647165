"""te_inductor.statistics: what delayed scaling counts, read when it is asked for, and what a sample loses."""

import json
import math
from dataclasses import astuple

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor import explain, statistics
from te_inductor.errors import OptionError, StateError
from te_inductor.integrations.statistics_log import StatisticsLog
from te_inductor.recipes import DelayedScaling
from tests.backend.delayed_programs import te
from tests.oracle import casts

pytestmark = pytest.mark.usefixtures("without_tracing")


def trained(recipe="delayed", steps=3, outlier=None, **options):
    """A model of two layers after some steps, its compiled form, and the last batch."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    run = te(model, recipe=recipe, fallback="silent", **options)
    for step in range(steps):
        x = torch.randn(32, 64)
        if outlier is not None and step == steps - 1:
            x[0, 0] = outlier
        run(x).square().mean().backward()
    return model, run, x


def of(found, name):
    return next(one for one in found.slots if f"{one.fqn}.{one.slot}" == name)


def test_what_is_counted():
    model, run, _ = trained(DelayedScaling(), outlier=1e4)
    found = statistics(run)
    assert [f"{one.fqn}.{one.slot}" for one in found.slots] == [
        f"{layer}.{slot}" for layer in "01" for slot in ("input", "weight", "grad_output")
    ]
    state = te_inductor.state_dict(model)
    for one in found.slots:
        name = f"{one.fqn}.{one.slot}"
        assert (one.amax, one.scale) == (state[f"{name}.amax_history"][-1].item(), state[f"{name}.scale"].item())
        largest = 57344.0 if one.slot == "grad_output" else 448.0
        assert one.element == ("e5m2" if largest > 448 else "e4m3")
        assert one.headroom == pytest.approx(math.log2(largest / (one.amax * one.scale)), abs=1e-5)
        assert one.counts.steps == 3 and one.sample is None
    hit = of(found, "0.input")
    assert (hit.amax, *astuple(hit.counts)[1:6]) == (1e4, 1, 0, 3, 0, 1)
    assert of(found, "0.weight").misfits == 0


def test_infinities_are_counted_and_move_no_scale():
    model = trained(outlier=math.inf)[0]
    found = of(statistics(model), "0.input")
    assert found.counts.nonfinite == 1 and found.misfits == 0 and found.headroom is not None


def test_a_model_that_has_not_run_and_one_without_state():
    assert statistics(nn.Linear(64, 64)).slots == []
    assert statistics(trained("current")[1]).slots == []
    with pytest.raises(StateError):
        statistics(lambda x: x)


def test_outliers_that_flush_the_rest_are_named():
    """A channel of 100 times costs E4M3 nothing, one of 1e5 most of the other values."""
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    for factor, said in ((100.0, False), (1e5, True)):
        batch = x * torch.where(torch.arange(64) == 7, factor, 1.0)
        found = statistics(te(layer, recipe="current", fallback="silent"), batch)
        one = of(found, ".input")
        assert (one.sample.flushed > 0.2) == said and ("(root).input" in str(found)) == said, (factor, str(found))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_sample(recipe):
    """The scales of delayed scaling are those that the next step would cast with, so that a batch of ten times the
    magnitude saturates; finer scales are the batch's own."""
    model, run, x = trained(recipe)
    state, grad = te_inductor.state_dict(model), model[0].weight.grad.clone()
    batch = 10 * x
    found = of(statistics(run, batch), "0.input")
    if recipe == "delayed":
        quantizer, scale = DelayedScaling().slots().input, state["0.input.scale"].item()
        low = casts.dequantize(*casts.quantize_known(batch, scale, quantizer), quantizer.scope)
        error = (low - batch).norm() / batch.norm()
        assert found.sample.relative_error == pytest.approx(error.item(), rel=1e-3)
        assert found.sample.saturated == pytest.approx((batch.abs() * scale > 448).double().mean().item(), abs=1e-3)
        assert found.counts.steps == 3
    else:
        assert 0 < found.sample.relative_error < 0.05 and found.sample.saturated == 0 and found.counts is None
    after = te_inductor.state_dict(model)
    assert all(torch.equal(state[key], after[key]) for key in state) and torch.equal(model[0].weight.grad, grad)


def test_how_it_is_shown():
    _, run, x = trained(outlier=1e4)
    found = statistics(run, x)
    assert json.loads(json.dumps(found.to_dict()))["slots"][0]["counts"]["cut"] == 1
    assert found.scalars()["0/input/cut"] == 1.0
    assert "0.input (1 of 3)" in str(found) and "te_inductor: 6 tensors" in repr(found)
    assert [line.split()[0] for line in found.table(details=True).splitlines() if line.startswith(("0", "1"))] == [
        "0",
        "1",
    ]
    assert "<table>" in found._repr_html_()
    report = explain(run, x, live=run)
    assert report.statistics.slots[0].counts.cut == 1 and "0.input (1 of 3)" in str(report)
    assert explain(run, x).statistics is None
    with pytest.raises(OptionError):
        statistics(run, x, loss=1)


def test_a_log(tmp_path):
    """Lines of JSON and scalars, in steps that it is for, once a step."""
    _, run, x = trained()
    seen = []

    class Board:
        def add_scalar(self, name, value, step):
            seen.append((name, step))

    log = StatisticsLog(tmp_path / "run.jsonl", Board(), every=2)
    assert [log.note(run, step) is not None for step in (1, 2, 2, 3, 4)] == [False, True, False, False, True]
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4] and lines[0]["slots"][0]["counts"]["steps"] == 3
    assert ("te_inductor/0/input/headroom", 4) in seen and not [name for name, _ in seen if "relative_error" in name]
    assert log.note(run, 6, writes=False) is None and len(seen) == len(set(seen))
    sampled = StatisticsLog(board=Board(), every=1, batch=(x,)).note(run, 1, writes=False)
    assert sampled.slots[0].sample is not None
    for wrong in ({}, {"path": "x", "every": 0}):
        with pytest.raises(OptionError):
            StatisticsLog(**wrong)
