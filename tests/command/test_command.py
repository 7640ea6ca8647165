"""The command, in forks of a process that has imported torch, and once as it is started; what a factory may return."""

import json
import os
import re
import statistics
import subprocess
import sys

import pytest
import torch

from te_inductor.api.peaks import KEEPERS, peak_of
from te_inductor.command import bench, doctor, factory, main
from te_inductor.errors import OptionError
from tests.command.models import gated
from tests.forked import PROGRAMS, ROOT

MODELS = "tests.command.models"


def command(*arguments: str, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess:
    return PROGRAMS.run("te_inductor", *arguments, cwd=cwd, **environment)


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("COLUMNS", "TE_INDUCTOR_"))}
    return subprocess.run(
        [sys.executable, "-m", "te_inductor", *arguments],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_doctor_says_what_runs_and_that_nothing_is_broken():
    done = command("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    for recipe in ("current", "delayed", "rowwise", "block", "mxfp8", "mxfp4", "nvfp4", "nvfp4_weight_only"):
        assert "emulated" in lines[recipe], lines[recipe]
    assert torch.__version__ in lines["torch"] and done.stdout.endswith("nothing is broken\n")
    assert "\x1b" not in done.stdout and not done.stderr


def test_doctor_prints_json_and_nothing_else(monkeypatch, capsys):
    """The forms for issues ask for it."""
    good, bad = doctor.Check("torch", doctor.OK, "2.13"), doctor.Check("a table", doctor.BROKEN, "no JSON")
    monkeypatch.setattr(doctor, "_checks", lambda: [good, bad])
    monkeypatch.setattr(doctor, "_recipe", lambda name, device: ("emulated", f"{name} on a {device.type}"))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["checks"][0] == {"name": "torch", "state": "ok", "found": "2.13"} and found["broken"] == ["a table"]
    assert {"recipe": "delayed", "runs": "emulated", "why": "delayed on a cpu"} in found["recipes"]


@pytest.mark.thorough
def test_doctor_finds_what_is_broken(tmp_path):
    file = tmp_path / "file"
    file.touch()
    broken = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(file), "TE_INDUCTOR_RECIPE": "curent"}
    done = started("doctor", "--json", **broken)  # torch reads CXX when it is imported
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {"cache folder", "C++ compiler", "environment"} <= set(found["broken"])
    texts = {check["name"]: check["found"] for check in found["checks"]}
    assert "TE_INDUCTOR_RECIPE: 'curent'; did you mean 'current'?" in texts["environment"]


def test_explain_as_text_and_as_a_page(tmp_path):
    page = tmp_path / "page.html"
    policy = '{"1.*": "none"}'
    done = command("explain", f"{MODELS}:pair", "--set", "layers=3", "--policy", policy, "--html", str(page))
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["1.0", "1"] in [row[:2] for row in rows] and ["{0,2}.2", "2"] in [row[:2] for row in rows]
    assert page.read_text().startswith("<!DOCTYPE html>") and "high_precision" in page.read_text()


def test_explain_and_bench_about_another_device():
    arguments = (f"{MODELS}:wide", "--set", "device=meta")
    done = command("explain", *arguments, "--target", "h200", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["expected"]["device"] == "NVIDIA H200" and report["expected"]["step_s"] < report["expected"]["bf16_s"]
    done = command("bench", *arguments, "--predict", "h200", "--recipes", "current", "block", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["predicted"]
    assert [*found] == ["inductor", "current", "block"]
    assert found["current"]["step_ms"] == pytest.approx(1e3 * report["expected"]["step_s"])
    assert sum(found["current"]["ms"].values()) == pytest.approx(found["current"]["step_ms"])
    assert found["inductor"]["step_ms"] == pytest.approx(1e3 * report["expected"]["bf16_s"])


def test_memory_at_the_peak_of_a_step():
    """The backward of three layers in fp32 begins with gate, up and their product in memory."""
    arguments = ("memory", f"{MODELS}:gated", "--keep-dtype", "--json")
    done = command(*arguments, "--recipe", "none", "--saved", "high_precision")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    peak, mib = found["this"], 2**20
    assert found["bf16"] == peak and peak["when"] == "backward"
    kept = {keeper: [one["bytes"] for one in peak["held"] if one["keeper"] == keeper] for keeper in KEEPERS}
    assert kept["saved for backward"] == [8 * mib] * 3  # 4096 x 512
    assert kept["parameter"] == [mib // 4] * 3 and kept["optimizer"] == [mib // 4] * 6
    assert kept["gradient"] == [mib // 4] and kept["temporary"] == [2 * mib]  # the output's gradient, 4096 x 128
    assert peak["bytes"] == sum(map(sum, kept.values())) == 32.5 * mib
    done = command(*arguments, "--recipe", "delayed", "--policy", '{"*": "delayed"}', "--saved", "low_precision")
    low = json.loads(done.stdout)
    assert low["bf16"] == peak
    saved = [one["bytes"] for one in low["this"]["held"] if one["keeper"] == "saved for backward"]
    codes = 4096 * 1024 * (1 + 4 / 128) + 4096 * 128  # of gate and up with their scales, and x's copy
    assert sum(saved) - codes == 6 * 2 * 16, saved  # scales of six quantizers, and their reciprocals


def test_what_is_saved_in_two_views_is_counted_once():
    """gate and up are the two halves of one product, and are read apart in the backward."""
    model, inputs = gated()
    peak = peak_of(model, (inputs,), {}, {"policy": {"*": "delayed"}}, "adamw")
    assert peak.when == "backward"
    saved = [one.shape for one in peak.held if one.keeper == "saved for backward" and one.bytes >= 2**20]
    assert saved == [(4096, 1024)]


def test_explain_as_data_from_a_file_in_another_folder(tmp_path):
    (tmp_path / "mine.py").write_text((ROOT / "tests/command/models.py").read_text())
    done = command("explain", "mine.py:keywords", "--recipe", "rowwise", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sites = json.loads(done.stdout)["sites"]
    assert [(site["fqn"], site["recipe"]) for site in sites if site["gemm"] == "fprop"] == [("layer", "rowwise")]


def test_report_draws(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    done = command("report", f"{MODELS}:with_loss", "--recipe", "mxfp8", "--png", str(picture))
    assert done.returncode == 0, done.stderr
    assert "1 layers in low precision" in done.stdout and picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.thorough
def test_bench_measures_both_arms(tmp_path):
    picture = tmp_path / "picture.png"
    done = command("bench", f"{MODELS}:with_loss", "--steps", "2", "--warmup", "1", "--json", "--png", str(picture))
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["inductor", "…", "current", "…"]  # no bar in a pipe
    base, current = json.loads(done.stdout)["arms"]
    assert (base["arm"], current["arm"]) == ("inductor", "current") and len(current["steps_ms"]) == 2
    assert 0 < abs(current["loss"] / base["loss"] - 1) < 0.02  # the same weights and inputs, in FP8
    assert abs(current["gradient_norm"] / base["gradient_norm"] - 1) < 0.1
    assert base["dtype"] == "autocast to bfloat16" and picture.exists()


def test_bench_tells_what_is_within_the_spread():
    def arm(name, *steps):
        return {"arm": name, "steps_ms": steps, "step_ms": statistics.median(steps)}

    base = arm("inductor", 10.0, 10.1, 10.2, 10.3, 19.0)  # an outlier says nothing of the spread
    assert bench.quartiles(base["steps_ms"]) == (10.1, 10.3)
    assert bench.doubt(base, arm("current", 9.0, 9.1, 9.2, 9.0, 9.1)) is None
    assert bench.doubt(base, arm("current", 11.0, 11.1, 11.2, 11.0, 11.1)) is None  # slower, as clearly
    text = bench.doubt(base, arm("current", 8.0, 9.0, 10.0, 11.0, 12.0))
    assert text.startswith("current: 0.2 ms from inductor, which is within the spread: quartiles are 2 ms apart")
    assert "say nothing of their spread; pass --steps" in bench.doubt(base, arm("current", 5.0, 5.0, 5.0))


def test_bench_sets_what_the_makefile_sets():
    text = (ROOT / "Makefile").read_text()
    assert dict(re.findall(r"^export (\w+) \?= (\w+)$", text, re.MULTILINE)) == bench._ENVIRONMENT
    assert tuple(re.findall(r"^unexport (\w+)$", text, re.MULTILINE)) == bench._UNSET


@pytest.mark.thorough
def test_bench_tells_why_an_arm_failed():
    done = command("bench", f"{MODELS}:fails_on_its_way", "--steps", "1")
    assert done.returncode == 1 and "arm 'inductor' failed" in done.stderr and "no data today" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("explain", f"{MODELS}:pear"), 2, "unknown function of tests.command.models 'pear'; did you mean 'pair'?"),
        (("explain", "tests/command/models.py:zzz"), 2, "'zzz'; expected one of Gated, Keywords, fails_on_its_way"),
        (("explain", f"{MODELS}:pair", "--policy", "head"), 2, "--policy: no JSON"),
        ((), 2, ""),
        (("explain", f"{MODELS}:pair", "--html", "no/such/page.html"), 2, "'no/such/page.html' cannot be written"),
        (("report", f"{MODELS}:pair", "--png", "."), 2, "'.' cannot be written; expected a file in a folder"),
        (("bench", f"{MODELS}:pair", "--recipes", "current", "curent"), 2, "did you mean 'current'?"),
        (("explain", f"{MODELS}:pair", "--recipe", "rowvise"), 2, "did you mean 'rowwise'?"),
        (("explain", f"{MODELS}:pair", "--target", "h10"), 2, "unknown target 'h10'; did you mean 'h100'?"),
        (("bench", f"{MODELS}:pair", "--predict", "tpu"), 2, "unknown target 'tpu'; expected one of b200, h100, h200"),
        (
            ("memory", f"{MODELS}:wide", "--set", "device=meta"),
            2,
            "is on the meta device, expected one on a GPU or a CPU",
        ),
        (("bench-arms",), 2, "(choose from 'doctor', 'explain', 'bench', 'memory', 'report', 'tune')"),
    ],
)
def test_wrong_uses(arguments, code, text):
    done = command(*arguments)
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr
    assert "inductor …" not in done.stderr  # no arm of a bench has begun


def test_a_picture_is_refused_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("te_inductor.command.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        main(["report", f"{MODELS}:pair", "--png", str(tmp_path / "picture.png")])
    assert left.value.code == 2 and "needs matplotlib; pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("tests.command.models", (), "has no factory; expected module:factory"),
        ("tests.command.modles:pair", (), "module 'tests.command.modles' is not found"),
        ("no/such/file.py:pair", (), "is not there"),
        (
            f"{MODELS}:nothing",
            (),
            "models:nothing returned is an int (7), expected (model, inputs)",
        ),
        (f"{MODELS}:model", (), "is a Linear"),
        (f"{MODELS}:pair", ("depth=3",), "its arguments, for --set: layers, width"),
        (f"{MODELS}:pair", ("layers",), "--set 'layers' is no NAME=VALUE"),
    ],
)
def test_wrong_factories_are_named(name, settings, text, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(OptionError) as raised:
        factory.made(name, settings)
    assert text in str(raised.value)


def test_a_factory_has_the_same_weights_each_time():
    one, other = factory.made(f"{MODELS}:pair"), factory.made(f"{MODELS}:pair", ["width=64"])
    assert torch.equal(one.model[0][0].weight, other.model[0][0].weight) and torch.equal(one.inputs[0], other.inputs[0])
    case = factory.made(f"{MODELS}:keywords")
    assert case.inputs == () and set(case.kwargs) == {"x", "scale"} and case.loss is None


def test_the_command_is_declared():
    """The installed script calls it so."""
    from te_inductor.command import main

    assert 'te-inductor = "te_inductor.command:main"' in (ROOT / "pyproject.toml").read_text() and callable(main)


def test_help_imports_little():
    program = (
        "import sys; from te_inductor.command import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('rich', 'matplotlib', 'torch._inductor', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout[-300:] + done.stderr[-500:]
