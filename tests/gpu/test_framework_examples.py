"""The examples of frameworks as a user starts them: a fresh process, generated code, a GPU."""

import ast
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "TE_INDUCTOR_RECIPE": "delayed",
    "TE_INDUCTOR_POLICY": '{"*": "delayed"}',
}  # of those that pass no options
EXAMPLES = {  # name: packages that it needs, its arguments, and those of a second run that goes on, if it can
    "trainer": (("accelerate",), ("--folder", "{folder}"), ("--resume", "{folder}/checkpoint-4")),
    "accelerate_run": (("accelerate",), ("--folder", "{folder}"), ("--steps", "2", "--resume")),
    "lightning_run": (("lightning",), ("--folder", "{folder}"), ("--fabric",)),
    "sentence_transformers_run": (("sentence_transformers", "datasets"), ("--folder", "{folder}"), None),
    "timm_run": (("timm",), ("--folder", "{folder}"), None),
    "diffusers_run": (("diffusers",), (), None),
    "sft": (("trl", "peft", "datasets"), ("--folder", "{folder}"), ("--steps", "8", "--resume")),
}


def started(name, arguments, folder):
    """What it printed, and the lists of losses among it."""
    command = [sys.executable, "-m", f"examples.{name}", *(one.format(folder=folder) for one in arguments)]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    lists = [ast.literal_eval(line) for line in run.stdout.splitlines() if line.startswith("[") and line.endswith("]")]
    return run.stdout + run.stderr, [one for one in lists if all(isinstance(value, float) for value in one)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_and_resumes(name, tmp_path):
    packages, arguments, again = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package, exc_type=ImportError)
    said, losses = started(name, arguments, tmp_path)
    assert "stay in high precision" not in said or name == "sentence_transformers_run", said
    for run in losses:
        assert all(map(math.isfinite, run)) and run[-1] < run[0], run
    if name in ("trainer", "sft"):
        assert [*tmp_path.glob("checkpoint-*/te_inductor_state.pt")]
    if again is not None:
        _, losses = started(name, (*arguments, *again), tmp_path)
        assert all(math.isfinite(value) for run in losses for value in run)
