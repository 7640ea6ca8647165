"""What the driver is given of a launch, without a GPU: as by Triton's own launch, byte for byte."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.forked import PROGRAMS

triton = pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """The folder of a driver that has no device."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    built = folder / "libcuda.so.1"
    options = ["-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", f"-I{include}", "-o", str(built)]
    subprocess.run([compiler, str(HERE / "fake_driver.c"), *options], check=True)
    return folder


def test_launches_are_those_of_triton(driver):
    """Kernels with tensor maps and without are launched from what was kept, also with other addresses."""
    done = PROGRAMS.run("tests.offline.driver_launches", str(driver))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(set(done.stdout.split())) >= 5
