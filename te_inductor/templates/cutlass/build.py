"""Builds GEMM kernels into shared libraries, each in a process of its own.

    python -m te_inductor.templates.cutlass.build KERNEL.json LIBRARY.so

The library is a file of Inductor's cache folder, named by a hash of the kernel, of the packages it is built with and of this
folder's sources, so that any process that finds it may use it. It holds sm_90a code; a GPU is not needed to build it.
"""

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from te_inductor.templates import cutlass
from te_inductor.templates.cutlass.scaled_mm import Kernel

ARCH = "90"
FUNCTION = "func"

_running: dict[Path, subprocess.Popen[bytes]] = {}


def start(kernel: Kernel) -> None:
    """Begin to build a kernel if no process has; `library` waits for it."""
    path = _path(kernel)
    if path.exists() or path in _running:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    architecture = {"QUACK_ARCH": ARCH, "CUTE_DSL_ARCH": f"sm_{ARCH}a", "QUACK_CACHE_ENABLED": "0"}
    # Without devices: what looks for one would make a CUDA context, for seconds and half a GiB of the GPU.
    env = {
        **os.environ,
        **architecture,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with _log(path).open("wb") as log:
        _running[path] = subprocess.Popen(
            [sys.executable, "-m", __name__, kernel.to_json(), str(path)], env=env, stdout=log, stderr=log
        )


def library(kernel: Kernel) -> Path:
    """The built kernel.

    Raises:
        RuntimeError: it could not be built; with what the compiler said.
    """
    path = _path(kernel)
    start(kernel)
    process = _running.pop(path, None)
    if process is not None and process.wait() != 0:
        raise RuntimeError("\n".join(_log(path).read_text(errors="replace").splitlines()[-20:]))
    return path


def _path(kernel: Kernel) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    key = hashlib.sha256(f"{kernel.to_json()} {_sources()}".encode()).hexdigest()
    return Path(cache_dir()) / "te_inductor" / "cutlass" / f"{key[:32]}.so"


def _log(path: Path) -> Path:
    """What the building process wrote."""
    return path.with_suffix(f".{os.getpid()}.log")


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256(repr(cutlass.versions()).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main(kernel: Kernel, path: Path) -> None:
    """Compile, link, and put the library in place at once. Of several ranks that ask for one kernel, one builds it."""
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            _build(kernel, path)


def _build(kernel: Kernel, path: Path) -> None:
    from cutlass.runtime import find_runtime_libraries
    from torch._inductor.cpp_builder import get_cpp_compiler

    libraries = [Path(found) for found in find_runtime_libraries()]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        _compile(kernel).export_to_c(object_file_path=str(compiled), function_name=FUNCTION)
        where = [f"-Wl,-rpath,{found.parent}" for found in libraries]
        subprocess.run([get_cpp_compiler(), "-shared", "-o", linked, compiled, *libraries, *where], check=True)
        os.replace(linked, path)


def _compile(kernel: Kernel):  # type: ignore[no-untyped-def]
    from unittest.mock import patch

    import quack.gemm_runtime.host as host
    import torch
    from cutlass import Float32

    from te_inductor.templates.cutlass.epilogues import EPILOGUES

    m, n, k = 1024, 768, 512  # read for strides and to tell rows from columns: every size is symbolic in the kernel
    a, b = (torch.empty(s, k, dtype=getattr(torch, name)) for s, name in ((m, kernel.a), (n, kernel.b)))
    out = torch.empty(m, n, dtype=getattr(torch, kernel.out))
    values = {"a_scale": torch.ones(1, m), "b_scale": torch.ones(1, n), "bias": torch.zeros(1, n, dtype=out.dtype)}
    pointers = {}
    if not kernel.by_row:
        values.update(a_scale=torch.ones(1), b_scale=torch.ones(1))
        pointers = dict.fromkeys(("a_scale", "b_scale"), ("pointer", Float32))
    if not kernel.bias:
        del values["bias"]
    # It asks the device, where this process has none; the number is an argument of the launch.
    with patch.object(host, "get_max_active_clusters", lambda *_: 1):
        plan = EPILOGUES[kernel.by_row, kernel.bias].gemm(
            a,
            b,
            out,
            epi_args=values,
            epi_key_overrides=pointers,
            tile_M=kernel.tile_m,
            tile_N=kernel.tile_n,
            cluster_M=kernel.cluster_m,
            cluster_N=kernel.cluster_n,
            pingpong=kernel.pingpong,
            post_init_attrs=(("fp8_slow_accum", not kernel.fast_accum),),
            _launch=False,
        )
    return plan.compiled_fn


if __name__ == "__main__":
    import json

    main(Kernel(**json.loads(sys.argv[1])), Path(sys.argv[2]))
