"""The process that builds kernels: as many side by side as there are cores, whatever is asked of it."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("filelock")

PROGRAM = """
import time
from pathlib import Path
from te_inductor.templates.cutlass import builder

def build(linker, job):
    start, path = time.monotonic(), Path(job["path"])
    path.with_suffix(".begun").touch()
    while len(list(path.parent.glob("*.begun"))) < 2:  # on a busy machine the second begins late
        time.sleep(0.01)
    time.sleep(0.05)
    path.write_text(f"{start} {time.monotonic()}")

builder.import_compiler, builder._run, builder.SIDE_BY_SIDE = (lambda: None), build, 2
builder.main("ld")
"""


@pytest.mark.quick("the end")
@pytest.mark.parametrize("end", [b"\n", b""], ids=["an empty line", "the end"])
def test_builds_side_by_side(end, tmp_path):
    paths = [tmp_path / str(number) for number in range(7)]
    lines = [json.dumps([{"path": str(path)} for path in some]) for some in (paths[:5], [], paths[5:])]
    given = "".join(f"{line}\n" for line in lines).encode() + end
    subprocess.run([sys.executable, "-c", PROGRAM], input=given, check=True, timeout=60)
    times = [tuple(map(float, path.read_text().split())) for path in paths]
    at_work = [sum(begin <= start < end for begin, end in times) for start, _ in times]
    assert max(at_work) == 2
