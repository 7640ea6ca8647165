"""AOTInductor's packages of lowered programs, on CPU."""

import subprocess
import sys

import pytest
import torch

from tests.package import make, run

thorough = pytest.mark.thorough


@thorough
def test_a_package_runs_without_te_inductor(tmp_path):
    """Made in a process in which nothing was compiled before, so that lowerings are there all the same; bit for bit,
    but for the order of sums."""
    command = [sys.executable, "-m", "tests.package", str(tmp_path), "cpu", "float32", "stored:nvfp4_weight_only"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run([tmp_path / "stored_nvfp4_weight_only"], 2.0**-6)


@thorough
@pytest.mark.parametrize(
    "recipe",
    ["current", "rowwise", "block", "mxfp8", "mxfp4", "nvfp4", "stored:current", "stored:rowwise", "stored:block"],
)
def test_each_recipe(recipe, tmp_path):
    make(tmp_path, "cpu", torch.float32, recipe)
    run([tmp_path], 2.0**-6)
