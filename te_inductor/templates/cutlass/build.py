"""Builds GEMM kernels into shared libraries, each in a process of its own.

    python -m te_inductor.templates.cutlass.build KERNEL.json LIBRARY.so

The library is a file of Inductor's cache folder, named by a hash of the kernel, of the packages it is built with and of this
folder's sources, so that any process that finds it may use it. A GPU is not needed to build it.
"""

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from te_inductor.recipes.formats import E2M1, E4M3, E5M2, ROW, SCOPES, TENSOR
from te_inductor.templates import cutlass
from te_inductor.templates.cutlass.scaled_mm import Kernel

FUNCTION = "func"

_running: dict[Path, subprocess.Popen[bytes]] = {}


def start(kernel: Kernel) -> None:
    """Begin to build a kernel if no process has; `library` waits for it."""
    path = _path(kernel)
    if path.exists() or path in _running:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", __name__, kernel.to_json(), str(path)]
    with _log(path).open("wb") as log:
        _running[path] = subprocess.Popen(command, env=environment(kernel.arch), stdout=log, stderr=log)


def environment(arch: str) -> dict[str, str]:
    """Of a process that builds for this architecture, which quack and the compiler read once."""
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
        plan(kernel).compiled_fn.export_to_c(object_file_path=str(compiled), function_name=FUNCTION)
        where = [f"-Wl,-rpath,{found.parent}" for found in libraries]
        subprocess.run([get_cpp_compiler(), "-shared", "-o", linked, compiled, *libraries, *where], check=True)
        os.replace(linked, path)


def plan(kernel: Kernel):  # type: ignore[no-untyped-def]
    """quack's plan of a launch, which holds the compiled kernel."""
    from unittest.mock import patch

    import quack.gemm_runtime.host as host

    from te_inductor.templates.cutlass.epilogues import EPILOGUES

    m, n, k = 1024, 768, 512  # read for strides and to tell rows from columns: every size is symbolic in the kernel
    operands = [empty((rows, k), getattr(torch, name)) for rows, name in ((m, kernel.a), (n, kernel.b))]
    out = torch.empty(m, n, dtype=getattr(torch, kernel.out))
    microscaled = SCOPES[kernel.scope].microscaled
    # It asks the device, where this process has none; the number is an argument of the launch.
    with patch.object(host, "get_max_active_clusters", lambda *_: 1):
        return EPILOGUES[kernel.scope, kernel.bias].gemm(
            *operands,
            out,
            tile_M=kernel.tile_m,
            tile_N=kernel.tile_n,
            cluster_M=kernel.cluster_m,
            cluster_N=kernel.cluster_n,
            pingpong=kernel.pingpong,
            **_epilogue(kernel, m, n),
            **(_block_scales(kernel, m, n, k) if microscaled else _accumulation(kernel)),
            _launch=False,
        )


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of so many values."""
    packed = E2M1.packed if dtype == E2M1.library else 1
    return torch.empty(*shape[:-1], shape[-1] // packed, dtype=torch.uint8).view(dtype)


def _epilogue(kernel: Kernel, m: int, n: int) -> dict[str, Any]:
    """What epilogues.py's functions are given: one number is a pointer, as its value is known on the GPU alone."""
    from cutlass import Float32

    one = {"alpha": torch.ones(1)} if SCOPES[kernel.scope].two_level else {}
    many = {}
    if kernel.scope == TENSOR.name:
        one = {"a_scale": torch.ones(1), "b_scale": torch.ones(1)}
    elif kernel.scope == ROW.name:
        many = {"a_scale": torch.ones(1, m), "b_scale": torch.ones(1, n)}
    if kernel.bias:
        many["bias"] = torch.zeros(1, n, dtype=getattr(torch, kernel.out))
    return {"epi_args": {**one, **many}, "epi_key_overrides": dict.fromkeys(one, ("pointer", Float32))}


def _accumulation(kernel: Kernel) -> dict[str, Any]:
    return {"post_init_attrs": (("fp8_slow_accum", not kernel.fast_accum),)}


def _block_scales(kernel: Kernel, m: int, n: int, k: int) -> dict[str, Any]:
    """Scales as `launch.py` views those of Note [Swizzled scales], and the formats by quack's names. The hardware hands out
    tiles (cluster launch control), as quack's own defaults have it."""
    scope = SCOPES[kernel.scope]
    scales = (empty((rows // 128, k // scope.block[1] // 4, 32, 4, 4), scope.scale.library) for rows in (m, n))
    names = {E4M3.library: "mxfp8_e4m3", E5M2.library: "mxfp8_e5m2", E2M1.library: "nvfp4"}
    a, b = (names[getattr(torch, name)] for name in (kernel.a, kernel.b))
    given = dict(zip(("SFA", "SFB"), scales, strict=True))
    return {**given, "bs_format_a": a, "bs_format_b": b, "is_dynamic_persistent": True}


if __name__ == "__main__":
    import json

    main(Kernel(**json.loads(sys.argv[1])), Path(sys.argv[2]))
