"""What a user sees at work: reports in notebooks, logs and traces of decisions, stored weights in `print(model)`, and how
far a task of minutes is."""

import copy
import gc
import io
import json
import logging
import pickle
import sys
import time
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import te_inductor
from te_inductor.presentation import progress

pytestmark = pytest.mark.usefixtures("without_tracing")

X = torch.randn(16, 32)
OPTIONS = {"recipe": "current", "policy": {"1": "none"}, "fallback": "silent"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_reports_in_notebooks():
    reports = te_inductor.explain(model(), X, options=OPTIONS), te_inductor.accuracy_report(model(), X, options=OPTIONS)
    assert repr(reports[0]) == "<Report: 2 of 5 GEMMs in low precision, 0 fell back>"
    for report in reports:
        assert "\n" not in repr(report) and len(repr(report)) < 200
        shown = report._repr_html_()
        assert shown.startswith("<div>") and "<table>" in shown and "<html" not in shown


def test_decisions_are_logged_and_traced():
    """This is what TORCH_LOGS and TORCH_TRACE ask for."""
    log, out, traced = logging.getLogger("te_inductor"), io.StringIO(), {}

    def trace(kind, metadata_fn=dict, *, payload_fn=lambda: "", **_):
        if kind == "artifact" and metadata_fn()["name"] == "te_inductor_report":
            traced.update(json.loads(payload_fn()))

    handler = logging.StreamHandler(out)
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        with mock.patch("torch._logging.trace_structured", trace):
            torch.compile(model(), backend="te", options=OPTIONS)(X)
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
    assert "2 of 5 GEMMs in low precision, 0 fell back" in out.getvalue() and "match_sites" not in out.getvalue()
    assert [site["fqn"] for site in traced["sites"]] == ["0", "0", "1", "1", "1"]


def test_profiles_name_first_steps():
    """A later step adds nothing."""
    layer, x = model(), X.clone().requires_grad_()
    run = torch.compile(layer, backend="te", options={"recipe": "delayed"})
    for first in (True, False):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(x).sum().backward()
        assert any(event.key == "te_inductor: first step" for event in profile.key_averages()) == first


def test_stored_weights_are_shown():
    stored = te_inductor.quantize_(model(), policy={"1": "none"})
    lines = str(stored).splitlines()
    assert "in_features=32, out_features=48, bias=True, weight=nvfp4_weight_only" in lines[1]
    assert "nvfp4" not in lines[2]
    for other in (copy.deepcopy(stored), pickle.loads(pickle.dumps(stored))):
        assert str(other) == str(stored)
    gc.disable()
    try:  # and nothing holds its memory
        gone = weakref.ref(stored)
        del stored
        assert gone() is None
    finally:
        gc.enable()


def test_a_module_of_a_programs_own_text_keeps_it():
    given = model()
    given[0].extra_repr = lambda: "mine"
    assert "mine" in str(te_inductor.quantize_(given)) and "nvfp4_weight_only" in str(given)


def test_progress_is_for_terminals(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_SOON", 0.0)
    with progress.progress(3, "store") as advance:
        advance()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", seen := Terminal())
    with progress.progress(3, "store") as advance:
        time.sleep(0.1)
        advance("the first")
    assert "store" in seen.getvalue() or "the first" in seen.getvalue()


def test_a_task_of_no_time_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", seen := Terminal())
    te_inductor.quantize_(model())
    torch.compile(model(), backend="te", options=OPTIONS)(X)
    assert seen.getvalue() == ""


def test_a_compile_that_takes_long_says_so(monkeypatch):
    monkeypatch.setattr(progress, "_LONG", 0.0)
    monkeypatch.setattr(sys, "stderr", seen := Terminal())
    with progress.patience("compiling"):
        time.sleep(0.1)
    assert seen.getvalue() == "te_inductor: compiling …\n"
