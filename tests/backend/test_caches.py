"""Compile caches across processes: an equal program hits both, an edited package or another recipe misses both."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import te_inductor

ROOT = Path(te_inductor.__file__).parents[1]


def run(folder: Path, options: dict, package: Path = ROOT, artifacts: tuple[str, ...] = (), **environment: str) -> dict:
    """The program's own account of itself, in a new process with its caches in `folder`."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": f"{package}{os.pathsep}{ROOT}",
        **environment,
    }
    command = [sys.executable, "-m", "tests.backend.program", json.dumps(options), *artifacts]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("caches")
    return folder, run(folder, {"recipe": "current"})


def test_the_first_process_misses_and_none_bypasses(first):
    _, account = first
    caches = account["caches"]
    assert caches["miss"] > 0 and caches["autograd_miss"] > 0
    assert caches["hit"] == caches["autograd_hit"] == caches["bypass"] == caches["autograd_bypass"] == 0


def test_a_second_process_hits_both_caches(first):
    folder, before = first
    after = run(folder, {"recipe": "current"})
    assert after["caches"]["autograd_hit"] == before["caches"]["autograd_miss"]
    assert after["caches"]["miss"] == after["caches"]["autograd_miss"] == 0
    assert after["loss"] == before["loss"]


def test_delayed_scaling_hits_both_caches_with_its_state_intact(tmp_path):
    """The state is no part of the key, nor of what is cached: the second process finds its own, and ends with the
    same."""
    before, after = (
        run(tmp_path, {"recipe": "delayed"}, PYTHONHASHSEED=seed) for seed in "12"
    )  # sets of another order
    assert before["caches"]["bypass"] == before["caches"]["autograd_bypass"] == 0
    assert (
        after["caches"]["autograd_hit"] == before["caches"]["autograd_miss"] == 2
    )  # one graph is that of a first step
    assert after["caches"]["miss"] == after["caches"]["autograd_miss"] == 0
    assert after["loss"] == before["loss"] and after["state"] == before["state"]
    assert len(before["state"]) == 6
    assert all(value != [1.0] and min(value) > 0 for value in before["state"].values())  # two steps, both recorded


def test_artifacts_carried_to_another_machine(tmp_path):
    """torch.compiler.save_cache_artifacts, loaded where there are no caches."""
    file = str(tmp_path / "artifacts")
    before = run(tmp_path / "here", {"recipe": "current"}, artifacts=("save", file))
    after = run(tmp_path / "there", {"recipe": "current"}, artifacts=("load", file))
    assert after["caches"]["autograd_hit"] == before["caches"]["autograd_miss"] > 0
    assert after["caches"]["miss"] == after["caches"]["autograd_miss"] == 0
    assert after["loss"] == before["loss"]


def test_emulation_and_random_rounding_hit_both_caches(tmp_path):
    before, after = (run(tmp_path, {"recipe": "nvfp4", "fallback": "silent"}) for _ in range(2))
    assert before["caches"]["bypass"] == before["caches"]["autograd_bypass"] == 0
    assert after["caches"]["autograd_hit"] == before["caches"]["autograd_miss"] > 0
    assert after["caches"]["miss"] == after["caches"]["autograd_miss"] == 0
    assert after["loss"] == before["loss"]


def test_another_recipe_misses(first):
    folder, before = first
    after = run(folder, {"recipe": "none"})
    assert after["caches"]["autograd_hit"] == 0 and after["caches"]["autograd_miss"] > 0
    assert after["loss"] != before["loss"]


def test_an_edited_package_misses(first, tmp_path):
    """One byte of a comment in one source file is enough: the lowerings' sources are in the key."""
    folder, before = first
    package = tmp_path / "edited"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "te_inductor", package / "te_inductor", ignore=ignored)
    shutil.copytree(ROOT / "tests", package / "tests", ignore=ignored)
    with (package / "te_inductor" / "lowerings" / "quantize.py").open("a") as source:
        source.write("# edited\n")
    after = run(folder, {"recipe": "current"}, package)
    assert after["caches"]["hit"] == after["caches"]["autograd_hit"] == 0
    assert after["loss"] == before["loss"]


@pytest.mark.parametrize("how", ["cut off", "garbage", "empty"])
def test_corrupted_entries_are_compiled_anew(first, how, tmp_path):
    """Every entry of both caches, as a full disk or a killed process leaves them."""
    folder, before = first
    shutil.copytree(folder, tmp_path / "caches")
    entries = [
        file
        for kind in ("fxgraph", "aotautograd")
        for file in (tmp_path / "caches" / kind).rglob("*")
        if file.is_file()
    ]
    assert len(entries) > 2
    for entry in entries:
        content = entry.read_bytes()
        entry.write_bytes({"cut off": content[: len(content) // 2], "garbage": b"\xff" * 64, "empty": b""}[how])
    after = run(tmp_path / "caches", {"recipe": "current"})
    assert after["loss"] == before["loss"] and after["caches"]["autograd_hit"] == 0


def test_keys_hold_whether_cutlass_is_there_and_which(monkeypatch):
    """Code that calls its kernels is not found where they cannot be built, and the other way round."""
    from te_inductor.passes.graph.custom_pass import GraphPass
    from te_inductor.templates import cutlass

    keys = []
    for version in ("4.8.1", "4.8.2", None):
        reason = None if version else "nvidia-cutlass-dsl is not installed"
        monkeypatch.setattr(cutlass, "missing", lambda reason=reason: reason)
        monkeypatch.setattr(cutlass.metadata, "version", lambda name, version=version: version)
        keys.append(GraphPass(None, ()).uuid())
    assert len(set(keys)) == 3
