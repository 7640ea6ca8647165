"""One rank of the benchmark of ranks: `python -m tests.backend.benchmark_ranks RANK WORLD FILE JOBS`.

JOBS is JSON: of each job, fields of `benchmarks.ranks_job.Job` and "compiled". Prints one line of JSON: what this rank
tells of each job. Graphs are not compiled unless asked (tests/uncompiled.py)."""

import gc
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

from benchmarks import ranks_works
from benchmarks.ranks_job import Job
from benchmarks.ranks_measure import measure
from tests import uncompiled


def main(rank: int, world: int, file: str, jobs: str) -> None:
    found = []
    for number, fields in enumerate(json.loads(jobs)):
        compiled = fields.pop("compiled", False)
        job = Job(device="cpu", world=world, model="tiny", warmup=1, **fields)
        torch._dynamo.reset()
        high = mock.patch.object(ranks_works, "HIGH", "inductor" if compiled else "aot_eager")
        with tempfile.TemporaryDirectory() as folder, uncompiled.patched(not compiled), high:
            measure(rank, job, f"file://{file}-{number}", folder)
            found.append(json.loads(Path(folder, f"{rank}.json").read_text()))
        torch._dynamo.reset()
        gc.collect()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
