"""Has GEMM kernels built into shared libraries, by a process of its own (builder.py), and waits for them.

A library is a file of Inductor's cache folder, named by a hash of the kernel, of the packages it is built with and of
the sources of this folder and of kernels/cutlass_tiles.py, so that any process that finds it may use it. A GPU is not
needed to build it."""

import atexit
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

from te_inductor.kernels import cutlass_packages, cutlass_tiles
from te_inductor.kernels.cutlass_tiles import Kernel

FUNCTION = "func"
POLL = 0.01  # seconds between two looks for a library


@dataclass(frozen=True, eq=False)
class _Builder:
    """A process of builder.py."""

    process: subprocess.Popen[bytes]
    log: Path  # what it wrote before it came to a kernel

    def ended(self) -> bool:
        return self.process.poll() is not None

    def build(self, wanted: dict[Path, Kernel]) -> bool:
        """Whether it takes more."""
        jobs = [
            {"kernel": asdict(kernel), "path": str(path), "log": str(_log(path))} for path, kernel in wanted.items()
        ]
        try:
            self.process.stdin.write(f"{json.dumps(jobs)}\n".encode())  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        except (BrokenPipeError, ValueError):  # it has ended; it was told of `no_more`
            return False
        _builders.update(dict.fromkeys(wanted, self))
        return True

    def no_more(self) -> None:
        """Tells it to end when it has built what it was given: a process forked meanwhile has the pipe open."""
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(b"\n")  # type: ignore[union-attr]
            self.process.stdin.close()  # type: ignore[union-attr]


# The builders by the library that each is to build.
_builders: dict[Path, _Builder] = {}
# The builders by architecture that wait for more kernels; None outside of `kept_open`.
_open: ContextVar[dict[str, _Builder] | None] = ContextVar("open builders", default=None)


@contextmanager
def kept_open() -> Iterator[None]:
    """Keeps builders open: in here one builder of an architecture, which imports the compiler once, takes whatever is
    begun."""
    builders: dict[str, _Builder] = {}
    token = _open.set(builders)
    try:
        yield
    finally:
        _open.reset(token)
        for builder in builders.values():
            builder.no_more()


def start(kernels: Iterable[Kernel]) -> None:
    """Begin to build those that no process has built; `library` waits for one."""
    missing: dict[str, dict[Path, Kernel]] = {}
    for kernel in kernels:
        path = _path(kernel)
        if not path.exists() and path not in _builders:
            missing.setdefault(kernel.arch, {})[path] = kernel
    waiting = _open.get()
    for arch, wanted in missing.items():
        builder = waiting.get(arch) if waiting else None
        if builder is None or not builder.build(wanted):
            builder = _start(arch, _log(next(iter(wanted)).with_suffix(".builder")))
            builder.build(wanted)
        if waiting is None:
            builder.no_more()
        else:
            waiting[arch] = builder


def _start(arch: str, log: Path) -> _Builder:
    from torch._inductor.cpp_builder import get_cpp_compiler

    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", f"{__package__}.builder", get_cpp_compiler()]
    with log.open("wb") as file:
        # A session of its own, so that it can be stopped together with the processes that it forks.
        process = subprocess.Popen(
            command, env=environment(arch), stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True
        )
    return _Builder(process, log)


@atexit.register
def _stop() -> None:
    """What is still being built when this process ends, nobody waits for."""
    for builder in {*_builders.values()}:
        if not builder.ended():
            os.killpg(builder.process.pid, signal.SIGTERM)


def environment(arch: str) -> dict[str, str]:
    """The environment of a process that builds for this architecture, which quack and the compiler read once."""
    return {
        **os.environ,
        "QUACK_ARCH": arch,
        "CUTE_DSL_ARCH": f"sm_{arch}a",
        "QUACK_CACHE_ENABLED": "0",
        # Without devices: what looks for one would make a CUDA context, for seconds and half a GiB of the GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def library(kernel: Kernel) -> Path:
    """The built kernel.

    Raises:
        RuntimeError: it could not be built; with what the compiler said.
    """
    path = _path(kernel)
    start([kernel])
    builder = _builders.pop(path, None)
    if builder is not None:
        builder.no_more()  # so that it ends also where it fails
    while not path.exists():
        if (builder is None or builder.ended()) and not path.exists():
            raise RuntimeError(_said(path, builder))
        time.sleep(POLL)
    return path


def _said(path: Path, builder: _Builder | None) -> str:
    """The last lines of who failed to make a library."""
    for log in (_log(path), builder and builder.log):
        text = log.read_text(errors="replace").strip() if log and log.exists() else ""
        if text:
            return "\n".join(text.splitlines()[-20:])
    return f"the building process ended with {builder and builder.process.returncode}"


def _path(kernel: Kernel) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    key = hashlib.sha256(f"{kernel.to_json()} {_sources()}".encode()).hexdigest()
    return Path(cache_dir()) / "te_inductor" / "cutlass" / f"{key[:32]}.so"


def _log(path: Path) -> Path:
    """What is written while this process waits for `path`."""
    return path.with_suffix(f"{path.suffix}.{os.getpid()}.log")


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256(repr(cutlass_packages.versions()).encode())
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(cutlass_tiles.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
