"""CUTLASS's GEMMs without a GPU: the tuned table, real builds in a process of their own, and what happens without
them."""

import contextlib
import dataclasses
import multiprocessing
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from te_inductor.errors import FallbackWarning
from te_inductor.kernels import cutlass_packages as cutlass
from te_inductor.kernels import cutlass_tables as tables
from te_inductor.kernels import cutlass_tiles as template
from te_inductor.kernels.cutlass_tiles import (
    BLOCK_TILES,
    FAST_TILES,
    OUTPUT,
    SM100_TILES,
    SPLIT_TILES,
    Tile,
    kernel_of,
)
from te_inductor.numerics.activation import Activation
from te_inductor.recipes import Gemm
from te_inductor.templates.cutlass import build, launch
from tests.support.cutlass_builds import BF16, E4M3, E5M2, KERNEL, broken_compiler
from tests.support.kernels import B200, H200, RTX5090, dense

E2M1 = torch.float4_e2m1fn_x2
installed = pytest.mark.skipif(cutlass.missing() is not None, reason="te-inductor[cutlass] is not installed")


@pytest.mark.parametrize(
    "unsuitable",
    [
        {"k": 4104},  # rows of 8 bytes more than the copy engine can step over
        {"n": 4100},
        {"m": 64},  # less than a tile
        {"out": torch.float32},
        {"added": OUTPUT},  # in bf16
        {"out": E4M3},  # of no activation
        {"activation": Activation()},  # in bf16
        {"out": E4M3, "activation": Activation(), "scope": "row"},
    ],
    ids=str,
)
def test_what_the_kernels_do_not_take(unsuitable):
    tile = FAST_TILES[0]
    sizes = {"m": 4096, "n": 4096, "k": 4096}
    assert template.supports(tile, dense(**sizes))
    assert not template.supports(tile, dense(**{**sizes, **unsuitable}))


def test_a_second_accumulator_must_fit_the_registers():
    split = dense(16384, 4096, 4096, fast_accum=False)
    assert template.tiles(split) == list(SPLIT_TILES)
    assert not template.supports(Tile(256, 160, 2, 1, False, 8), split)
    assert not template.supports(Tile(128, 192, 2, 1, True, 8), split)


def test_scales_of_blocks_have_a_tile_of_their_own():
    """Nothing is added there; what no tile divides is left to cuBLASLt."""
    for scope in ("1x128", "128x128"):
        asked = {"m": 4096, "n": 6144, "k": 16384, "scope": scope, "fast_accum": False}
        assert template.tiles(dense(**asked)) == list(BLOCK_TILES)
        for odd in ({"m": 4097}, {"n": 6160}, {"k": 16400}, {"bias": True}, {"added": OUTPUT}, {"fast_accum": True}):
            assert not template.tiles(dense(**{**asked, **odd}))
    assert not template.supports(BLOCK_TILES[0], dense(4096, 4096, 4096, scope="1x32", fast_accum=False))


@pytest.mark.parametrize("arch", ["100", "120"])
def test_what_was_never_measured_is_a_candidate_and_no_choice(arch):
    """Blackwell: max-autotune may measure the tiles; without it cuBLASLt multiplies."""
    sizes = {"m": 4096, "n": 4096, "k": 4096, "target": {"100": B200, "120": RTX5090}[arch], "fast_accum": False}
    for scope, element, other in (("1x32", "e4m3", "e3m2"), ("1x16", "e2m1", None)):
        asked = {**sizes, "scope": scope, "elements": (element, element)}
        assert template.tiles(dense(**asked)) == list(template.CANDIDATES[arch, False])
        of_h200 = dataclasses.replace(asked["target"], product=H200.product)
        assert tables.choose(dense(**{**asked, "target": of_h200})) is None
        unlike = [{"elements": (other, other)}] if other else []
        for odd in (*unlike, {"k": 4104}, {"n": 4104}, {"out": torch.float32}, {"fast_accum": True}, {"m": 64}):
            assert not template.tiles(dense(**{**asked, **odd}))
    assert not template.tiles(dense(**sizes))  # one scale a tensor: cuBLASLt's


def test_nothing_is_chosen_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(cutlass, "missing", lambda: "quack-kernels is not installed")
    assert template.architecture(dense(4096, 4096, 4096)) is None


def test_a_wrong_version_is_named(monkeypatch):
    cutlass.missing.cache_clear()
    monkeypatch.setattr(cutlass.metadata, "version", lambda name: "0.3.1" if name == "quack-kernels" else "4.8.1")
    monkeypatch.setitem(cutlass.REQUIRED, "apache-tvm-ffi", ">=4, <5")
    try:
        text = cutlass.missing()
    finally:
        cutlass.missing.cache_clear()
    assert text is not None and "quack-kernels 0.3.1 is installed, expected >=0.6.5, <0.7" in text


def test_a_kernel_that_cannot_be_built_is_replaced_by_cublaslt_and_named_once(monkeypatch):
    def fail(kernel):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(build, "library", fail)
    a, b = torch.randn(64, 32).to(E4M3), torch.randn(48, 32).to(E4M3)
    scale, out = torch.ones(()), torch.full((64, 48), float("nan"), dtype=BF16)
    shape = dataclasses.astuple(Tile(192, 128, 2, 2, True, 4))  # nobody else's: what failed is remembered
    given = {"tile": shape, "arch": "90", "scope": "tensor", "fast_accum": True, "out": out}
    with pytest.warns(FallbackWarning, match="no compiler here"):
        launch.scaled_mm(a, b.t(), scale, scale, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.scaled_mm(a, b.t(), scale, scale, **given)
    torch.testing.assert_close(out, torch._scaled_mm(a, b.t(), scale, scale, out_dtype=BF16))
    bias, c = torch.randn(48, dtype=BF16), torch.randn(64, 48, dtype=BF16)
    for rest in ((c,), (bias, c)):
        expected = torch._scaled_mm(a, b.t(), scale, scale, *rest[:-1], out_dtype=BF16) + c
        with pytest.warns(FallbackWarning, match="no compiler here"):
            launch.scaled_mm(a, b.t(), scale, scale, *rest, **given, added=template.ANOTHER)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("scope", ["tensor", "row"])
@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "misaligned"])
def test_a_total_that_no_kernel_can_add_to_is_added_to_all_the_same(scope, start, monkeypatch):
    """A view of a buffer that begins anywhere asks for no kernel; an aligned one whose kernel cannot be built says
    so."""

    def fail(kernel):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(build, "library", fail)
    gemm, tile = Gemm("wgrad", False, (scope, scope)), Tile(192, 128, 2, 2, False, 4)  # nobody else's
    a, b = torch.randint(-8, 8, (64, 32)).to(E5M2), torch.randint(-8, 8, (48, 32)).to(E4M3)
    scales = [torch.full((rows, 1) if scope == "row" else (), 2.0) for rows in (64, 48)]
    total = torch.ones(64 * 48 + start)[start:].view(64, 48)
    aligned = total.data_ptr() % template.ALIGNED == 0
    with pytest.warns(FallbackWarning, match="no compiler here") if aligned else contextlib.nullcontext():
        launch.add_scaled_mm(total, a, scales[0], b, scales[1], gemm, tile, "90")
    assert torch.equal(total, 1 + 4 * (a.float() @ b.float().t()))


# Both kinds of scales and of accumulation, and Blackwell's. A builder a target imports CUTLASS, four seconds.
BUILT = {
    "100": [kernel_of(SM100_TILES[0], "100", E2M1, E2M1, BF16, "1x16", True, False)],
    "90": [
        kernel_of(FAST_TILES[0], "90", E4M3, E4M3, BF16, "tensor", True, True),
        kernel_of(SPLIT_TILES[0], "90", E5M2, E4M3, torch.float32, "row", False, False, OUTPUT),
    ],
}


@installed
@pytest.mark.parametrize("targets", [["100"], pytest.param(["100", "90"], marks=pytest.mark.thorough)], ids="".join)
def test_kernels_are_built_without_a_gpu_and_loaded_without_cutlass(targets, tmp_path, monkeypatch):
    """A second process loads them without CUTLASS. Hopper's are compiled in tests/offline/test_cutlass.py, too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    kernels = [kernel for target in targets for kernel in BUILT[target]]
    build.start(kernels)
    paths = [build.library(kernel) for kernel in kernels]
    assert len(set(paths)) == len(kernels) and all(path.is_relative_to(tmp_path) for path in paths)
    program = f"""
import sys, tvm_ffi
assert all(tvm_ffi.load_module(path)["{build.FUNCTION}"] is not None for path in {[str(path) for path in paths]})
print([name for name in sys.modules if name.split(".")[0] in ("cutlass", "quack")])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.thorough
@installed
def test_what_the_compiler_says_reaches_the_user(tmp_path, monkeypatch):
    """What it says of one kernel keeps no other from being built."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    good = kernel_of(FAST_TILES[0], "90", E4M3, E4M3, BF16, "tensor", False, True)
    odd = dataclasses.replace(good, tile_m=100)
    build.start([odd, good])
    with pytest.raises(RuntimeError, match="CTA tile shape M"):
        build.library(odd)
    assert build.library(good).exists()


@pytest.mark.thorough
@installed
def test_one_builder_takes_what_is_begun_later(tmp_path, monkeypatch):
    """It takes nothing after somebody has waited for a kernel: then it ends, also where that one fails, and while a
    process forked meanwhile lives."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first = kernel_of(FAST_TILES[0], "90", E4M3, E4M3, BF16, "tensor", False, True)
    odd, third = dataclasses.replace(first, tile_m=100), dataclasses.replace(first, bias=True)
    with build.kept_open():
        build.start([first])
        build.start([odd])
        assert build._builders[build._path(first)] is build._builders[build._path(odd)]
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        forked.start()
        with pytest.raises(RuntimeError, match="CTA tile shape M"):
            build.library(odd)
        assert forked.is_alive()
        forked.kill()
        build.start([third])
        assert build._builders[build._path(first)] is not build._builders[build._path(third)]
    assert build.library(first).exists() and build.library(third).exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [("raise OSError('no shared object')", "no shared object"), ("import os; os._exit(7)", "with 7")],
)
def test_what_a_builder_says_that_comes_to_no_kernel(source, said, tmp_path, monkeypatch):
    broken_compiler(tmp_path, monkeypatch, source)
    with pytest.raises(RuntimeError, match=said):
        build.library(KERNEL)
    build._sources.cache_clear()


@pytest.mark.thorough
def test_builds_end_with_who_asked_for_them(tmp_path):
    """No process is left behind, though the builds would have taken long."""
    program = f"""
import pathlib, pytest
from te_inductor.templates.cutlass import build
from tests.support.cutlass_builds import KERNEL, broken_compiler
forks = "import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(60)"
broken_compiler(pathlib.Path({str(tmp_path)!r}), pytest.MonkeyPatch(), forks)
build.start([KERNEL])
[builder] = build._builders.values()
while len(pids := builder.log.read_text().split()) < 2:
    assert not builder.ended()
print(*pids)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for pid in done.stdout.split():
        for _ in range(100):
            if not running(pid):
                break
            time.sleep(0.05)
        assert not running(pid)


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
