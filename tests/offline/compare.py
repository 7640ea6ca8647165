"""Compare the code of all offline cases with that of another commit, but for names and comments::

    python -m tests.offline.compare BASE [--arch 90] [--cases 'mlp_*' 'experts_*'] [--out FOLDER]

Prints which cases differ, by how many lines, and fails if one does. BASE is a commit that has `tests/offline/harness.py`.
In FOLDER are the code of both as it was compared, `before` and `after`, for `diff -r`.
"""

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.forked import ROOT
from tests.offline import written

# What is a name in generated code: graphs' inputs, what Inductor numbers or calls by its operators, classes of constants.
_NAMED = re.compile(
    r"\b(?:te_\w+_\d+|(?:primals|tangents|arg|buf|tmp|getitem)_?\d+(?:_\d+)?|triton_[a-z]+_fused_\w+|te_inductor_\w+)\b"
)
# What a wrapper and a kernel say of where they are from.
_SAID = re.compile(r"^\s*#.*\n|^\s*\n|, '(?:optimize_mem|no_x_dim)': \w+", re.MULTILINE)


def normal(source: str) -> str:
    """The code without comments, whose names are numbered as they come."""
    names: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        return names.setdefault(found.group(), f"name_{len(names)}")

    return _NAMED.sub(named, _SAID.sub("", source))


def write(tree: Path, out: Path, arguments: list[str]) -> None:
    """Writes the cases of a tree into a folder, as they are compared."""
    command = [sys.executable, "-m", "tests.offline.written", str(out), *arguments]
    subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
    for path in out.rglob("*.py"):
        path.write_text(normal(path.read_text()))


def differences(before: Path, after: Path) -> dict[str, int]:
    """How many lines each case that is in both has in one of them alone."""
    found = {}
    for case in sorted({folder.name for folder in before.iterdir()} & {folder.name for folder in after.iterdir()}):
        files = {path.name for side in (before, after) for path in (side / case).iterdir()}
        sides = [[(side / case / name) for name in sorted(files)] for side in (before, after)]
        lines = [[line for path in side if path.exists() for line in path.read_text().splitlines()] for side in sides]
        changed = difflib.unified_diff(*lines, n=0, lineterm="")
        found[case] = sum(not line.startswith(("---", "+++", "@@")) for line in changed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--arch", nargs="+", default=["90", "100"])
    parser.add_argument("--cases", nargs="+", default=["*"], help="globs of names")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arguments = ["--arch", *options.arch, "--cases", *options.cases]
    with tempfile.TemporaryDirectory() as folder:
        tree, out = Path(folder, "tree"), options.out or Path(folder, "out")
        archive, before, after = Path(folder, "base.tar"), out.resolve() / "before", out.resolve() / "after"
        subprocess.run(["git", "archive", "-o", str(archive), options.base], cwd=ROOT, check=True)
        shutil.unpack_archive(archive, tree)
        shutil.copy(written.__file__, tree / "tests/offline/written.py")
        for side, place in ((before, tree), (after, ROOT)):
            shutil.rmtree(side, ignore_errors=True)
            write(place, side, arguments)
        found = differences(before, after)
        names = [{path.name for path in side.iterdir()} for side in (before, after)]
    for text, cases in (("gone", names[0] - names[1]), ("new", names[1] - names[0])):
        print(f"{text}: {', '.join(sorted(cases)) or 'none'}")
    differ = {case: lines for case, lines in found.items() if lines}
    for case, lines in differ.items():
        print(f"{case}: {lines} lines")
    print(f"{len(found) - len(differ)} of {len(found)} are equal")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
