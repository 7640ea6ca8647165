"""Puts faults into copies of the package, one at a time, and reports which of them `make test` finds:

    python -m tests.mutations [NAME ...] [--list] [--first] [--jobs N]

Where none of a mutation's `first` tests fails, the whole of `make test` has to; under `--first` it counts as missed. Exits
with 1 where a fault is missed, or a mutation's text is no more to be found."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations import MUTATIONS
from tests.mutations.mutation import Mutation, place_of

ROOT = Path(__file__).parents[2]
QUICK = "not gpu and not gpu2 and not thorough"
# pytest's codes; the last with -x and several workers, or where it cannot import tests
PASSED, FAILED, STOPPED = 0, 1, 2


def check(mutation: Mutation, folder: Path, first: bool) -> tuple[bool, str]:
    """Whether the tests find it, its first ones alone if so asked, and how that went."""
    started = time.monotonic()
    ignored = shutil.ignore_patterns("__pycache__", ".git", ".venv*", ".*_cache", ".hypothesis", "out")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
    place = place_of(mutation.text, tree / "te_inductor")
    if place is None:
        return False, "its text is not once in the package"
    place.write_text(place.read_text().replace(mutation.text, mutation.becomes))
    for arguments in (mutation.first,) if first else (mutation.first, ()):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", QUICK, "-p", "no:cacheprovider", *arguments]
        command += [] if arguments else ["-n", "2"]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if failed and done.returncode in (FAILED, STOPPED):
            return True, f"{failed[0].split(' - ')[0]}, {time.monotonic() - started:.0f} s"
        if done.returncode != PASSED:
            return False, f"pytest {' '.join(arguments)} is no run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return False, f"missed, {time.monotonic() - started:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of those to check; all by default")
    parser.add_argument("--list", action="store_true", help="list them, and where each is")
    parser.add_argument("--first", action="store_true", help="run no tests but the first ones of each")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    chosen = [one for one in MUTATIONS if not given.names or any(part in one.name for part in given.names)]
    if given.list:
        places = [place_of(one.text, ROOT / "te_inductor") for one in chosen]
        for one, place in zip(chosen, places, strict=True):
            print(f"{place.relative_to(ROOT) if place else 'nowhere, or not once'}: {one.name}")
        return int(None in places)

    def checked(mutation: Mutation) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            found, how = check(mutation, Path(folder), given.first)
        print(f"{'caught' if found else 'MISSED'}  {mutation.name}: {how}", flush=True)
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(checked, chosen))
    print(f"{sum(results)} of {len(results)} caught")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
