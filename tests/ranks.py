"""Cases that run on several ranks: one driver for every module of them, each rank a fork of one process.

A module of cases, beside its tests, has functions of a rank and of words, which return what JSON can hold::

    def sums(rank: Rank, recipe: str) -> Any: ...

A test names the cases that it wants, with their words, and gets by case what each of the ranks has told::

    told = told_by("tests.backend.sums_ranks", 2, "sums current,compiled sums delayed")  # a fixture

    def test_sums(told):
        for found in told["sums current"]: ...

Each case has a process group and warnings of its own. Graphs are not compiled (tests/uncompiled.py), except those of
"compiled CASE"; they go through AOTAutograd where the module's ranks see them, or as the case asks for it, and under
`--whole`. Where a rank fails the others are ended, as they may wait for it."""

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from tests.forked import PROGRAMS, work
from tests.support.once import made_once


class Told:
    """What ranks have told: `told[case]` lists what each of them returned, `told.said(case)` the package's warnings."""

    def __init__(self, of_ranks: list[Any]) -> None:
        self.of_ranks = of_ranks

    def __getitem__(self, case: str) -> list[Any]:
        return [rank[case]["told"] for rank in self.of_ranks]

    def said(self, case: str) -> list[list[str]]:
        return [rank[case]["said"] for rank in self.of_ranks]


def ranks(module: str, world: int, cases: str, *, timeout: int = 300) -> Told:
    """Runs `cases`, with commas in between, in forks of a process that has imported torch."""
    done = PROGRAMS.run("tests.ranks", module, str(world), "cpu", cases, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return Told(json.loads(done.stdout.splitlines()[-1]))


def told_by(module: str, world: int, cases: str, *, timeout: int = 300) -> Any:
    """A fixture of a module of tests, which runs the cases once for all workers of a run of pytest."""
    import pytest  # not in each rank

    def run(folder: Path) -> None:
        (folder / "told.json").write_text(json.dumps(ranks(module, world, cases, timeout=timeout).of_ranks))

    @pytest.fixture(scope="module")
    def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
        name = hashlib.sha256(repr((module, world, cases)).encode()).hexdigest()[:16]
        return Told(json.loads((made_once(tmp_path_factory, name, run) / "told.json").read_text()))

    return told


def ranks_on_gpus(module: str, world: int, cases: str, *, timeout: int = 300) -> Told:
    """The same in new processes, one a GPU, as a fork of a process that has asked for devices cannot use CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder, f"{rank}.{name}") for name in ("stdout", "stderr")] for rank in range(world)]
        running = []
        for rank, files in enumerate(outputs):
            command = [sys.executable, "-m", "tests.ranks", module, str(world), "cuda", cases, str(rank), folder]
            stdout, stderr = (file.open("w") for file in files)
            running.append(subprocess.Popen(command, stdout=stdout, stderr=stderr))
        end = time.monotonic() + timeout
        while any(each.poll() is None for each in running) and not any(each.poll() for each in running):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        codes = [each.poll() for each in running]
        for each in running:
            each.kill()
            each.wait()
        texts = [[file.read_text() for file in files] for files in outputs]
        assert codes == [0] * world, "\n".join(
            f"rank {rank}, {code}:\n{texts[rank][1][-3000:]}" for rank, code in enumerate(codes) if code != 0
        )
        return Told([json.loads(stdout.splitlines()[-1]) for stdout, _ in texts])


# In the processes of the ranks.


@dataclass(frozen=True)
class How:
    """How a case runs: how many seconds a rank waits for another one, whether its graphs go through AOTAutograd (None:
    where the module's ranks see graphs), whether it has a process group, and whether that is lost behind the case, which
    then is the last one."""

    patience: int = 120
    traced: bool | None = None
    group: bool = True
    loses_group: bool = False


def how(**fields: Any) -> Callable[[Any], Any]:
    """Marks a case that does not run as most do."""

    def marked(function: Any) -> Any:
        function.how = How(**fields)
        return function

    return marked


class Rank:
    """One of the ranks, as a case gets it. A module of cases may have a `Rank` of its own, derived from this one."""

    device = "cpu"

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self.rank, self.world, self.folder = rank, world, folder  # a folder that all ranks and cases share

    @functools.cached_property
    def mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device, (self.world,))

    def see(self, graph: Any) -> None:
        """Is shown each graph that is not compiled, the forward's and the backward's."""

    def patches(self) -> list[Any]:
        """Contexts in which cases of this module run."""
        return []


def of_the_first_rank(function: Callable[[], Any]) -> Any:
    """Returns on all ranks what the function returns on the first, where alone it is called."""
    import torch.distributed as dist

    box = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def one(module: str, world: int, device: str, cases: str, rank: int, folder: str) -> None:
    """Runs the cases as one rank, and prints what they tell."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}  # as torch's launchers do
    of_module = importlib.import_module(module)
    make = getattr(of_module, "Rank", Rank)
    assert issubclass(make, Rank), "this module is not the one that cases import"
    make.device = device
    if device == "cuda":
        torch.cuda.set_device(rank)
    found = {}
    for number, each in enumerate(cases.split(",")):
        print(each, file=sys.stderr)
        name, *words = each.removeprefix("compiled ").split(" ")
        case = getattr(of_module, name)
        asked = getattr(case, "how", How())
        if asked.group:
            dist.init_process_group(
                "gloo" if device == "cpu" else "nccl",
                init_method=f"file://{folder}/store{number}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=asked.patience if device == "cpu" else 600),  # of kernels that compile
            )
        torch._dynamo.reset()
        torch.manual_seed(0)
        counters.clear()
        compiled = device == "cuda" or each.startswith("compiled ")
        found[each] = _told(make(rank, world, folder), compiled, asked.traced, case, words)
        if asked.loses_group:
            break
        if asked.group:
            dist.barrier()
        # DDP's reducers go first: the last to hold a gloo group waits for its threads, and they for the interpreter's lock.
        torch._dynamo.reset()
        gc.collect()
        if asked.group:
            dist.destroy_process_group()
    print(json.dumps(found), flush=True)
    if dist.is_initialized():
        os._exit(0)


def _told(
    rank: Rank, compiled: bool, traced: bool | None, case: Callable[..., Any], words: list[str]
) -> dict[str, Any]:
    from te_inductor import compat
    from tests import hastened, uncompiled

    traced = type(rank).see is not Rank.see if traced is None else traced
    traced = traced or hastened.WHOLE in os.environ
    of_graphs = functools.partial(uncompiled.compile_fx, see=rank.see) if traced else uncompiled.run_rewritten
    compile_fx = compat.compile_fx if compiled else of_graphs
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compat, "compile_fx", compile_fx))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for patch in rank.patches():
            stack.enter_context(patch)
        told = case(rank, *words)
        return {"told": told, "said": [str(one.message) for one in caught if "te_inductor" in str(one.message)]}


def every(module: str, world: int, device: str, cases: str) -> int:
    """Forks the ranks, and prints the list of what they print."""
    timeout = signal.alarm(0)  # the ranks' own comes first, so that it is known which of them it was
    signal.alarm(timeout)
    with tempfile.TemporaryDirectory() as folder:
        children: dict[int, int] = {}
        for rank in range(world):
            outputs = [str(Path(folder, f"{rank}.{name}")) for name in ("stdout", "stderr")]
            arguments = [module, str(world), device, cases, str(rank), folder]
            asked = {"module": "tests.ranks", "arguments": arguments, "outputs": outputs}
            child = os.fork()
            if child == 0:
                work({**asked, "timeout": max(timeout - 5, 1), "cwd": os.getcwd(), "environment": {}})
            children[child] = rank
        failed = []
        while children:
            child, status = os.wait()
            rank = children.pop(child)
            if status and not failed:
                failed.append(rank)
                for other in children:
                    os.kill(other, signal.SIGKILL)
        for rank in failed:
            print(f"rank {rank}:\n{Path(folder, f'{rank}.stderr').read_text()}", file=sys.stderr)
        if not failed:
            texts = [Path(folder, f"{rank}.stdout").read_text() for rank in range(world)]
            print(json.dumps([json.loads(text.splitlines()[-1]) for text in texts]))
        return len(failed)


def main(module: str, world: str, device: str, cases: str, *of_one: str) -> int:
    if not of_one:
        return every(module, int(world), device, cases)
    rank, folder = of_one
    one(module, int(world), device, cases, int(rank), folder)
    return 0


if __name__ == "__main__":
    from tests import ranks as imported  # modules of cases derive their ranks from its `Rank`, not from this one's

    sys.exit(imported.main(*sys.argv[1:]))
