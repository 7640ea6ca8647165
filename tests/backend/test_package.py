"""What a wheel and an sdist hold, and whether the wheel runs in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import te_inductor
from tests.forked import ROOT

pytest.importorskip("setuptools", "77")
# What lies in a checkout and belongs to nobody else; at its root alone, as lowerings/ has folders of these names.
LITTER = {".git", ".venv", ".venv-matrix", ".whl", ".site", "build", "dist", "out"}
litter = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, to: Path) -> Path:
    """The file that PEP 517's hook makes of a source folder."""
    command = [sys.executable, "-c", BUILD, kind, str(to)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "SetuptoolsWarning" not in said and "would be ignored" not in said, said[-4000:]
    return to / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built in a copy, as a build writes into its source."""
    folder = tmp_path_factory.mktemp("sdist")

    def ignored(where: str, names: list[str]) -> set[str]:
        return set(litter(where, names)) | (LITTER if Path(where) == ROOT else set())

    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=ignored)
    return build("sdist", folder / "source", folder)


@pytest.fixture(scope="module")
def unpacked(sdist) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return sdist.parent / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked) -> Path:
    """Built from the sdist, as pip does where it finds no wheel."""
    return build("wheel", unpacked, unpacked.parent)


def files(folder: Path, *below: str) -> set[str]:
    found = (path for name in below for path in [*(folder / name).rglob("*"), folder / name])
    return {str(path.relative_to(folder)) for path in found if path.is_file() and "__pycache__" not in path.parts}


def test_an_sdist_holds_what_a_checkout_does(unpacked):
    kept = ["te_inductor", "tests", "docs", "examples", "benchmarks", "requirements", ".ci", "Makefile", "README.md"]
    kept += ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", ".github", "Dockerfile"]
    kept += [".dockerignore", ".pre-commit-config.yaml", "pyproject.toml", "setup.cfg", "setup.py"]
    assert files(unpacked, *kept) == files(ROOT, *kept)
    links = ("lowerings", "runtime", "templates")
    assert not [name for name in links if (unpacked / name).exists()]


def test_a_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        of_wheel = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(of_wheel["METADATA"]))
        entry_points = archive.read(of_wheel["entry_points.txt"]).decode()
        license = archive.read(of_wheel["LICENSE"]).decode()
    assert names == files(ROOT, "te_inductor") and "te_inductor/py.typed" in names
    assert {name for name in names if name.endswith(".json")}  # tuned tables
    assert metadata["Version"] == te_inductor.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in license and metadata["Summary"] and metadata["Keywords"]
    [repository] = [url.split(", ")[1] for url in metadata.get_all("Project-URL") if url.startswith("Repository, ")]
    links = set(re.findall(r"\]\(([^)]+)\)", metadata.get_payload()))
    files_of_the_version = f"{repository}/blob/v{te_inductor.__version__}/"
    assert len(links) > 20 and all(link.startswith(files_of_the_version) for link in links), links
    assert "te = te_inductor.backend:te" in entry_points and "te-inductor = te_inductor.command:main" in entry_points


@pytest.mark.thorough
def test_a_wheel_runs_in_an_environment_of_its_own(wheel, tmp_path):
    """The wheel runs without the checkout: the command, and three lines that import no te_inductor. Dependencies are
    this environment's."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", "env")
    python = str(tmp_path / "env/bin/python")
    [packages] = (tmp_path / "env/lib").glob("python*/site-packages")
    here = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(here) + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    where = run(python, "-c", "import te_inductor; print(te_inductor.__file__)").strip()
    assert Path(where) == packages / "te_inductor/__init__.py"
    assert run(str(tmp_path / "env/bin/te-inductor"), "doctor").endswith("nothing is broken\n")
    program = (
        "import torch; f = torch.compile(torch.nn.Linear(32, 32), backend='te'); print(f(torch.ones(4, 32)).shape)"
    )
    assert "[4, 32]" in run(python, "-c", program)
