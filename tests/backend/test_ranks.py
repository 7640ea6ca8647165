"""Delayed scaling on several ranks: real processes, gloo, CPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import te_inductor

ROOT = Path(te_inductor.__file__).parents[1]
WORLD = 2


def run(folder: Path, fields: dict, kind: str = "plain") -> list[list[dict]]:
    """What each rank tells of its steps."""
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    commands = [
        [
            sys.executable,
            "-m",
            "tests.backend.ranks",
            str(rank),
            str(WORLD),
            str(folder / "store"),
            json.dumps(fields),
            kind,
        ]
        for rank in range(WORLD)
    ]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    told = []
    for process in processes:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error[-4000:]
        told.append(json.loads(out.splitlines()[-1]))
    return told


def history(steps: list[dict], slot: str) -> list[float]:
    return steps[-1]["state"][f"{slot}.amax_history"]


@pytest.mark.parametrize("kind", ["plain", "ddp", "split ddp"])
def test_amaxes_are_the_largest_of_all_ranks(kind, tmp_path):
    """Every rank ends each step with the same state. A rank's NaN hides no other rank's observation."""
    first, second = run(tmp_path, {}, kind)
    for a, b in zip(first, second, strict=True):
        assert a["state"] == b["state"]
    assert history(first, "input") == [0.0, 2.0, 11.0, 22.0]  # of rank 1, in the second step of rank 0 alone
    assert history(first, "grad_output") == [0.0, 1.0, 2.0, 3.0]  # of rank 0


def test_without_reduction_ranks_keep_their_own(tmp_path):
    first, second = run(tmp_path, {"reduce_amax": False})
    assert history(first, "input") == [0.0, 1.0, 11.0, 21.0]
    assert history(second, "input") == [0.0, 0.0, 2.0, 22.0]  # its NaN was no observation
    assert history(second, "grad_output")[-1] == 1.5
    assert all(math.isfinite(value) for step in second for value in step["state"]["input.amax_history"])
