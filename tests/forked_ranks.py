"""The ranks of a distributed program, each a fork of one process: `python -m tests.forked_ranks MODULE WORLD ARGUMENT…`
runs `python -m MODULE RANK WORLD ARGUMENT…` for each rank and prints one line of JSON, the list of what the ranks
printed last. Where one of them fails the others are ended, as they may wait for it.

    ranks("tests.backend.ranks", 2, store)      # from a test
"""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.forked import PROGRAMS, work


def ranks(module: str, world: int, *arguments: str, timeout: int = 300, **environment: str) -> list[Any]:
    """What each rank tells: the last line of what it prints, read as JSON."""
    command = ("tests.forked_ranks", module, str(world), *arguments)
    done = PROGRAMS.run(*command, timeout=timeout, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


def ranks_once(factory: Any, module: str, world: int, *arguments: str, timeout: int = 300) -> list[Any]:
    """What `ranks` gives, run once for all workers of a run of pytest, whose `tmp_path_factory` this takes. The program's
    first argument is a path for its store."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    name = hashlib.sha256(repr((module, world, arguments)).encode()).hexdigest()[:16]
    kept = base / f"{name}.json"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            store = str(factory.mktemp("ranks") / "store")
            kept.write_text(json.dumps(ranks(module, world, store, *arguments, timeout=timeout)))
    return list(json.loads(kept.read_text()))


def spawned_ranks(module: str, world: int, *arguments: str, timeout: int = 300) -> list[Any]:
    """The same in new processes, for CUDA, which a fork of a process that has asked for devices cannot use."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder, f"{rank}.{name}") for name in ("stdout", "stderr")] for rank in range(world)]
        running = []
        for rank, files in enumerate(outputs):
            command = [sys.executable, "-m", module, str(rank), str(world), *arguments]
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
        said = [[file.read_text() for file in files] for files in outputs]
        assert codes == [0] * world, "\n".join(
            f"rank {rank}, {code}:\n{said[rank][1][-3000:]}" for rank, code in enumerate(codes) if code != 0
        )
        return [json.loads(stdout.splitlines()[-1]) for stdout, _ in said]


def main(module: str, world: int, arguments: list[str]) -> int:
    timeout = signal.alarm(0)  # the ranks' own comes first, so that it is known which of them it was
    signal.alarm(timeout)
    with tempfile.TemporaryDirectory() as folder:
        children: dict[int, int] = {}
        for rank in range(world):
            outputs = [str(Path(folder, f"{rank}.{name}")) for name in ("stdout", "stderr")]
            asked = {"module": module, "arguments": [str(rank), str(world), *arguments], "outputs": outputs}
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
            said = [Path(folder, f"{rank}.stdout").read_text() for rank in range(world)]
            print(json.dumps([json.loads(text.splitlines()[-1]) for text in said]))
        return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
