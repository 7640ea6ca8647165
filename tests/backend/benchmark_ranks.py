"""A case of the benchmark of ranks, for test_benchmark_ranks.py."""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import ranks_works
from benchmarks.ranks_job import Job
from benchmarks.ranks_measure import measure
from tests.ranks import Rank, how


@how(group=False)
def measures(rank: Rank, number: str, fields: str) -> Any:
    """What a rank tells of a job, whose fields are JSON without spaces and with semicolons for commas."""
    job = Job(device="cpu", world=rank.world, model="tiny", warmup=1, **json.loads(fields.replace(";", ",")))
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(ranks_works, "HIGH", "aot_eager"):
        measure(rank.rank, job, f"file://{rank.folder}/job{number}", folder)
        return json.loads(Path(folder, f"{rank.rank}.json").read_text())
