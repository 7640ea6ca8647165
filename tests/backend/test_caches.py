"""Compile caches across processes: an equal program hits both, an edited package or another recipe misses both."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.cache_dir_utils import cache_dir

import te_inductor
from te_inductor.errors import TEInductorError
from tests.forked import ONE_THREAD, PROGRAMS, TORCH, Server
from tests.support.once import made_once

ROOT = Path(te_inductor.__file__).parents[1]


def run(
    folder: Path, options: dict, artifacts: tuple[str, ...] = (), package: Path = ROOT, seed: str | None = None
) -> dict:
    """The program's own account of itself, in a new process with its caches in `folder`; with a seed of hashes in
    a fork of a process that has started with it, with an edited package in one that is not forked."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    program = ("tests.backend.program", json.dumps(options), *artifacts)
    if package == ROOT:
        server = PROGRAMS if seed is None else Server(TORCH, PYTHONHASHSEED=seed)
        done = server.run(*program, **environment)
    else:
        environment |= {**ONE_THREAD, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", *program]
        whole = {**os.environ, **environment}
        done = subprocess.run(command, cwd=package, env=whole, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


CACHES = ("fxgraph", "aotautograd")  # under test; what stands beside them is what compilers made of C++


def copied(folder: Path, to: Path, caches: bool) -> Path:
    """The folder of a process with or without its caches, so that C++ is not compiled once more."""
    shutil.copytree(folder, to, symlinks=True, ignore=None if caches else shutil.ignore_patterns(*CACHES))
    return to


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, dict]:
    """The caches and the account of the first process, which leaves the artifacts of its caches beside them."""

    def make(folder: Path) -> None:
        headers = Path(cache_dir(), "precompiled_headers")  # which are no cache under test, and cost seven seconds
        headers.mkdir(parents=True, exist_ok=True)
        (folder / "precompiled_headers").symlink_to(headers)
        account = run(folder, {"recipe": "current"}, ("save", str(folder / "artifacts")))
        (folder / "account.json").write_text(json.dumps(account))

    folder = made_once(tmp_path_factory, "caches", make)
    return folder, json.loads((folder / "account.json").read_text())


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


def test_delayed_scaling_hits_both_caches_with_its_state_intact(first, tmp_path):
    """The state is no part of the key, nor of what is cached: the second process, where caches were carried to, finds its
    own, and ends with the same. The first finds nothing of another recipe's."""
    folder, artifacts = copied(first[0], tmp_path / "caches", caches=True), str(tmp_path / "artifacts")
    before = run(folder, {"recipe": "delayed"}, ("save", artifacts))
    there = copied(folder, tmp_path / "there", caches=False)
    after = run(there, {"recipe": "delayed"}, ("load", artifacts), seed="2")  # sets of another order
    assert before["caches"]["bypass"] == before["caches"]["autograd_bypass"] == before["caches"]["autograd_hit"] == 0
    assert after["caches"]["autograd_hit"] == before["caches"]["autograd_miss"] == 2  # of them a first step's
    assert after["caches"]["miss"] == after["caches"]["autograd_miss"] == 0
    assert after["loss"] == before["loss"] and after["state"] == before["state"]
    assert len(before["state"]) == 6
    assert all(value != [1.0] and min(value) > 0 for value in before["state"].values())  # two steps, both recorded


def test_artifacts_carried_to_another_machine(first, tmp_path):
    """torch.compiler.save_cache_artifacts, loaded where there are no caches."""
    folder, before = first
    there = copied(folder, tmp_path / "there", caches=False)
    after = run(there, {"recipe": "current"}, ("load", str(folder / "artifacts")))
    assert after["caches"]["autograd_hit"] == before["caches"]["autograd_miss"] > 0
    assert after["caches"]["miss"] == after["caches"]["autograd_miss"] == 0
    assert after["loss"] == before["loss"]


@pytest.mark.thorough
def test_emulation_and_random_rounding_hit_both_caches(first, tmp_path):
    folder = copied(first[0], tmp_path / "caches", caches=False)
    before, after = (run(folder, {"recipe": "nvfp4", "fallback": "silent"}) for _ in range(2))
    assert before["caches"]["bypass"] == before["caches"]["autograd_bypass"] == 0
    assert after["caches"]["autograd_hit"] == before["caches"]["autograd_miss"] > 0
    assert after["caches"]["miss"] == after["caches"]["autograd_miss"] == 0
    assert after["loss"] == before["loss"]


def test_keys_hold_each_source_and_table():
    """One byte of any of them makes another key."""
    from te_inductor.passes.graph import custom_pass

    digest = custom_pass.package_hash.__wrapped__
    keys = {digest()}
    for edited in ("lowerings/casts/quantize.py", "templates/triton/grouped_mm.py"):
        changed = lambda path, _, edited=edited: io.BytesIO(Path(path).read_bytes() + b"#" * path.endswith(edited))  # noqa: E731
        with mock.patch.object(custom_pass, "open", changed, create=True):
            keys.add(digest())
    assert len(keys) == 3


class Named(nn.Module):
    """A layer whose activation has a name of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.name = nn.Linear(64, 128), name
        setattr(self, name, nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(self.up(x))


def test_keys_hold_which_modules_save_in_low_precision(tmp_path, monkeypatch):
    """The graphs of these models differ in nothing else."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *tensors: None)
    options, saves, hits = {"recipe": "none", "saved": {"*mlp*": "low_precision"}}, [], []
    for name in ("mlp_act", "act", "mlp_act"):
        torch._dynamo.reset()
        counters.clear()
        y = torch.compile(Named(name).bfloat16(), backend="te", options={**options, "fallback": "silent"})(
            torch.randn(64, 64).bfloat16()
        )
        saves.append(any(one.dtype == torch.float8_e4m3fn for one in y.grad_fn.saved_tensors))
        y.sum().backward()
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert saves == [True, False, True] and hits == [0, 0, 1]


@pytest.mark.parametrize("saved", ["low_precision", {"*.nrom": "low_precision"}])
def test_a_second_process_tells_that_nothing_is_saved_in_low_precision(tmp_path, saved):
    """It does so where the first one, whose options differ in that alone, kept silent; it finds the code in a cache."""
    told = []
    for fallback in ("silent", "warn", "error"):
        program = ("tests.backend.saving_program", json.dumps({"saved": saved, "fallback": fallback}))
        done = PROGRAMS.run(*program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr[-4000:]
        told.append(json.loads(done.stdout.splitlines()[-1]))
    silent, warns, raises = told
    assert not silent["told"] and silent["hits"] == [0, 0]
    assert len(warns["told"]) == 1 and "option 'saved'" in warns["told"][0] and warns["hits"] == [0, 2]
    assert raises["error"] == warns["told"][0] if saved == "low_precision" else raises["told"] == warns["told"]


def test_aot_compile_is_an_error_that_names_what_to_do():
    """What it would save has state beside it."""
    with torch._dynamo.config.patch(enable_aot_compile=True):
        model = torch.compile(nn.Linear(32, 32), backend="te", fullgraph=True)
        with pytest.raises(TEInductorError, match="save_cache_artifacts"):
            model.forward.aot_compile(((torch.randn(4, 32),), {}))


def test_dynamos_cache_of_functions_is_an_error():
    """It would run what another backend has compiled of the same function."""
    with (
        torch._dynamo.config.patch(caching_precompile=True),
        pytest.raises(Exception, match="caching_precompile is True"),
    ):
        torch.compile(nn.Linear(32, 32), backend="te")(torch.randn(4, 32))


@pytest.mark.thorough
def test_a_process_whose_dynamo_caches_functions_gets_no_backend():
    """Dynamo looks for a function before it calls the backend."""
    environment = {**os.environ, "TORCH_CACHING_PRECOMPILE": "1", "PYTHONPATH": str(ROOT)}
    program = "import te_inductor.backend"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "TEInductorError: torch._dynamo.config.caching_precompile is True" in done.stderr


@pytest.mark.thorough
def test_an_edited_package_misses(first, tmp_path):
    """One byte of a comment in one source file is enough: the lowerings' sources are in the key."""
    folder, before = first
    package = tmp_path / "edited"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "te_inductor", package / "te_inductor", ignore=ignored)
    shutil.copytree(ROOT / "tests", package / "tests", ignore=ignored)
    with (package / "te_inductor" / "lowerings" / "casts" / "quantize.py").open("a") as source:
        source.write("# edited\n")
    after = run(folder, {"recipe": "current"}, package=package)
    assert after["caches"]["hit"] == after["caches"]["autograd_hit"] == 0
    assert after["loss"] == before["loss"]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["cut off", "garbage", "empty"])
def test_corrupted_entries_are_compiled_anew(first, how, tmp_path):
    """Every entry of both caches, as a full disk or a killed process leaves them."""
    folder, before = first
    caches = copied(folder, tmp_path / "caches", caches=True)
    entries = [file for kind in CACHES for file in (caches / kind).rglob("*") if file.is_file()]
    assert len(entries) > 2
    for entry in entries:
        content = entry.read_bytes()
        entry.write_bytes({"cut off": content[: len(content) // 2], "garbage": b"\xff" * 64, "empty": b""}[how])
    after = run(caches, {"recipe": "current"})
    assert after["loss"] == before["loss"] and after["caches"]["autograd_hit"] == 0


def test_keys_hold_whether_cutlass_is_there_and_which(monkeypatch):
    """Code that calls its kernels is not found where they cannot be built, and the other way round."""
    from te_inductor.kernels import cutlass_packages as cutlass
    from te_inductor.passes.graph.custom_pass import GraphPass

    monkeypatch.setattr(cutlass, "identity", cutlass.identity.__wrapped__)  # which a process asks for once
    keys = []
    for version in ("4.8.1", "4.8.2", None):
        reason = None if version else "nvidia-cutlass-dsl is not installed"
        monkeypatch.setattr(cutlass, "missing", lambda reason=reason: reason)
        monkeypatch.setattr(cutlass.metadata, "version", lambda name, version=version: version)
        keys.append(GraphPass(None, ()).uuid())
    assert len(set(keys)) == 3
