"""Runs the suite on several versions of Python and torch, each in a virtual environment of its own: `make test-matrix`.

    python -m tests.matrix [--cell 3.12:2.13.0 …] [--label ''] [arguments of pytest]

Environments are kept in .venv-matrix. torch is its CPU build, whose versions end in "+cpu" where pip is told of an
index that has them (PIP_EXTRA_INDEX_URL); `--label ''` takes whatever build the index has, on Linux gigabytes of CUDA.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-matrix"
PYTHONS = ("3.11", "3.12", "3.13")  # why not 3.10: docs/compatibility.md
TORCHES = {"2.11.0": "3.6.0", "2.13.0": "3.7.1", "2.15.0": "3.9.0"}  # and the triton that its CUDA build asks for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = [f"{python}:{torch}" for torch in TORCHES for python in PYTHONS]
    parser.add_argument("--cell", action="append", choices=cells, metavar="PYTHON:TORCH", help="may be given again")
    parser.add_argument("--label", default="+cpu" if sys.platform == "linux" else "")
    given, pytest = parser.parse_known_args()
    print("| Python | torch | result |\n|---|---|---|", flush=True)
    failed = False
    for cell in given.cell or cells:
        python, torch = cell.split(":")
        found = environment(python, torch, given.label)
        result = found if isinstance(found, str) else run(found, pytest)
        failed |= isinstance(found, Path) and not result.startswith("0 failed")
        print(f"| {python} | {torch} | {result} |", flush=True)
    return failed


def environment(python: str, torch: str, label: str) -> Path | str:
    """The folder of an environment with everything that the tests need, or why there is none."""
    folder = FOLDER / f"{python}-{torch}"
    if (folder / "done").exists():
        return folder
    interpreter = interpreter_of(python)
    if interpreter is None:
        return "no such Python here"
    subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    install = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*install, f"torch=={torch}{label}"], stderr=subprocess.DEVNULL).returncode:
        return f"no wheel of torch {torch}{label}"
    development = [f"triton=={TORCHES[torch]}", "-r", "requirements/dev.txt"]
    subprocess.run([*install, *development], cwd=ROOT, check=True)
    subprocess.run([*install, "--no-deps", "--no-build-isolation", "--editable", "."], cwd=ROOT, check=True)
    (folder / "done").touch()
    return folder


def interpreter_of(version: str) -> str | None:
    """Finds an interpreter on the path, or under pyenv."""
    candidates = [shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
        candidates += [str(path) for path in Path(listed, "versions").glob(f"{version}.*/bin/python")]
    for path in candidates:
        if path and subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:  # no empty shim
            return path
    return None


def run(folder: Path, pytest: list[str]) -> str:
    """What the suite says."""
    report, began = folder / "report.xml", time.monotonic()
    report.unlink(missing_ok=True)
    command = [
        folder / "bin/python",
        "-m",
        "pytest",
        "-m",
        "not gpu",
        "--whole",
        "-n",
        "2",
        f"--junit-xml={report}",
        *pytest,
    ]
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    if not report.exists():
        return f"did not start: {folder.relative_to(ROOT)}/log.txt"
    [suite] = xml.parse(report).getroot().iter("testsuite")
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    passed = int(suite.get("tests", 0)) - failed - skipped
    return f"{failed} failed, {passed} passed, {skipped} skipped in {(time.monotonic() - began) / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main())
