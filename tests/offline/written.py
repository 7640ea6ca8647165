"""Write the code of all offline cases into a folder, so that a change of structure can be shown to change none of it::

    python -m tests.offline.written BEFORE [--arch 90] [--cases 'mlp_*' 'experts_*']
    python -m tests.offline.written AFTER
    diff -r BEFORE AFTER

Names of the package's modules are in the code. Those that have moved are the only difference to expect.
"""

import argparse
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tests.offline.harness import CASES, Generated, generate

# A case is a public function of its module that returns one.
_CASE = re.compile(r"^def ([a-z]\w*)\(\) -> Case:", re.MULTILINE)
# What Inductor writes differently at each run, or for each folder.
_PASSING = re.compile(r"/tmp/\S*|# kernel path: \S*|'(?:kernel_name|backend_hash|autotune_local_cache)': [^,]*")


def cases(globs: list[str]) -> Iterator[str]:
    for path in sorted(CASES.glob("*.py")):
        yield from (name for name in _CASE.findall(path.read_text()) if any(fnmatch(name, glob) for glob in globs))


def write(made: Generated, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for place, source in enumerate(made.sources):
        (folder / f"{place}.py").write_text(_PASSING.sub("…", source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 100])
    parser.add_argument("--cases", nargs="+", default=["*"], help="globs of names")
    options = parser.parse_args()
    for case in cases(options.cases):
        for arch in options.arch:
            try:
                write(generate(case, arch), options.out / f"{case}_{arch}")
            except AssertionError as error:  # such as a case that is for one architecture
                print(f"{case} {arch}: {str(error).strip().splitlines()[-1:]}", flush=True)


if __name__ == "__main__":
    main()
