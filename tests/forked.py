"""Programs of the tests, each in a process of its own that starts with torch imported.

Most of what such a program costs is imports: torch, Inductor and Triton take four seconds, the program itself one. A
server imports them once and forks itself for each program::

    SERVER.run("tests.offline.interpret", "graph.py", "inputs.pt", "outputs.pt")

The server imports, leaves out of torch what tests/hastened.py does and does nothing else, so that a program finds what it
would find in a new process: no compiled graph, no cache, no CUDA, no thread. Tests of the start of a process itself
(imports, an edited package) start one.
"""

import fcntl
import gc
import hashlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TORCH = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "te_inductor", "te_inductor.backend"),
    # What a first compile imports, an eighth of a second.
    *("torch.utils.cpp_extension", "torch.distributed.tensor.experimental", "torch._inductor.runtime.caching"),
    *("te_inductor.lowerings.choices", "te_inductor.passes.joint", "te_inductor.passes.post_grad"),
    *("torch._inductor.compiler_bisector", "torch._dynamo.repro.after_dynamo", "sympy.tensor.tensor"),
    "sympy.physics.units",  # which sympy asks about what it simplifies
)
RANKS = (*TORCH, "torch.distributed.fsdp", "torch.distributed.device_mesh", "pytest")
TRITON = (*TORCH, "triton", "triton.backends.compiler", "torch._inductor.runtime.triton_heuristics")
# Threads do not survive a fork; generated code, and so the keys of caches, know how many there are.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


class Server:
    """Runs programs in forks of one process, which starts with the first of them. All workers of a run of pytest share it,
    each by a connection of its own; it ends with the last of them.

    `libraries` are loaded before any module, as torch has to find them; `environment` is what modules read at import.
    The function `warm` of the module that is named so is called before the first fork.
    """

    def __init__(
        self, modules: tuple[str, ...], libraries: tuple[str, ...] = (), warm: str = "", **environment: str
    ) -> None:
        self.given = {"modules": modules, "libraries": libraries, "warm": warm}
        self.environment = environment
        self.channel: Any = None
        self.owner = 0

    def run(
        self, module: str, *arguments: str, timeout: int = 300, cwd: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs what `python -m module arguments` would; with "-c" for the module, the first argument is the program."""
        channel = self._connected()
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder, name) for name in ("stdout", "stderr")]
            asked = {"module": module, "arguments": arguments, "cwd": str(cwd), "environment": environment}
            channel.write(json.dumps({**asked, "outputs": list(map(str, outputs)), "timeout": timeout}) + "\n")
            channel.flush()
            answer = channel.readline()
            assert answer, "the server of forked programs is gone"
            return subprocess.CompletedProcess(
                [module, *arguments], int(answer), *(file.read_text() for file in outputs)
            )

    def _connected(self) -> Any:
        if self.channel is None or self.owner != os.getpid():
            run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
            key = hashlib.sha256(repr((run, self.given, self.environment)).encode()).hexdigest()[:16]
            path = f"{tempfile.gettempdir()}/te_inductor_{os.getuid()}_{key}"
            connection = socket.socket(socket.AF_UNIX)
            with open(f"{path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    connection.connect(path)
                except OSError:  # nobody has started it
                    Path(path).unlink(missing_ok=True)
                    self._start(path)
                    connection.connect(path)
            self.channel, self.owner = connection.makefile("rw"), os.getpid()
        return self.channel

    def _start(self, path: str) -> None:
        """Starts the process. Connections wait for it until it has imported."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.set_inheritable(True)
            given = json.dumps({**self.given, "listening": listener.fileno(), "path": path})
            paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "tests.forked", given],
                {**os.environ, "PYTHONPATH": paths, **ONE_THREAD, **self.environment},
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            )


PROGRAMS = Server(RANKS, warm="tests.forked")  # for programs that want torch and the package
PLAIN = Server(("torch",))  # for those about what is imported behind torch


def warm() -> None:
    """Compiles a function, imports what generates code, and reads sources for the keys of caches: a second of what each
    program that compiles would take. No process is forked from one whose autograd has run, so that this function has no
    gradient, or that has asked for a GPU, as a trace does on a build of torch that could use one."""
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import CacheBase, torch_key
    from torch._inductor.codegen.common import init_backend_registration

    from te_inductor.passes.graph.custom_pass import package_hash

    init_backend_registration()
    torch_key()
    package_hash()
    if torch.version.cuda is None:
        torch.compile(torch.sin)(torch.ones(1))
        torch._dynamo.reset()
        counters.clear()
        CacheBase.get_system()


def serve(modules: list[str], libraries: list[str], warm: str, listening: int, path: str) -> None:
    import ctypes
    import importlib

    from tests import hastened

    gc.disable()
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)  # it was where the test that came first is
    os.dup2(2, 1)  # whatever an import prints
    for library in libraries:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    for name in modules:
        importlib.import_module(name)
    if modules != ["torch"]:  # patches import what they patch
        for patch in hastened.patches():
            patch.start()
    if warm:
        importlib.import_module(warm).warm()
    hastened.collect_seldom()  # in the programs too, whose collectors then copy no memory of the modules
    listener, connected = socket.socket(fileno=listening), 0
    while True:
        if select.select([listener], [], [], 0.2 if connected else 0)[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(connection)
            connection.close()
            connected += 1
        elif connected:
            connected -= os.waitpid(-1, os.WNOHANG)[0] != 0
        elif os.path.exists(path):
            os.unlink(path)  # and looks once more for who has come before that
            os.unlink(f"{path}.lock")
        else:
            break


def answer(connection: socket.socket) -> None:
    """Forks itself for each program that is asked for, and ends with the connection."""
    with connection.makefile("rw") as channel:
        for line in channel:
            child = os.fork()
            if child == 0:
                work(json.loads(line))
            channel.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
            channel.flush()
    os._exit(0)


def work(asked: dict[str, Any]) -> None:
    """Run one program, and end."""
    status = 1
    try:
        for place, path in enumerate(asked["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), place)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.alarm(asked["timeout"])  # which ends the process
        os.chdir(asked["cwd"])
        os.environ.update(asked["environment"])
        sys.argv = [asked["module"], *asked["arguments"]]
        if sys.argv[0] == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(**given)
