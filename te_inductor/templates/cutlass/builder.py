"""The process that builds GEMM kernels into shared libraries.

    python -m te_inductor.templates.cutlass.builder LINKER

Each line of its input is JSON, a list of ``{"kernel": the fields of a Kernel, "path": of the library, "log": of what
the compiler says}``. The compiler is imported once, then each kernel is built in a fork, as many side by side as there
are cores; after an empty line, or the end of its input, it ends when all are built. The environment is
`build.environment`'s."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import deque
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from filelock import FileLock

from te_inductor import compat
from te_inductor.kernels.cutlass_tiles import ROUNDED, Kernel
from te_inductor.kernels.problem import ANOTHER, OUTPUT
from te_inductor.recipes.formats import E2M1, E4M3, E5M2, ROW, SCOPES, TENSOR
from te_inductor.templates.cutlass.build import FUNCTION

SIDE_BY_SIDE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # builds


def main(linker: str) -> None:
    import_compiler()
    fork, stdin = multiprocessing.get_context("fork"), sys.stdin.fileno()
    jobs: deque[dict[str, Any]] = deque()
    running: list[Any] = []
    rest, more = b"", True
    while more or jobs or running:
        while jobs and len(running) < SIDE_BY_SIDE:
            running.append(fork.Process(target=_run, args=(linker, jobs.popleft()), daemon=True))
            running[-1].start()
        # Input is read while kernels are built, or whoever writes it would wait.
        if stdin in wait([*[stdin][:more], *(build.sentinel for build in running)]):
            read = os.read(stdin, 1 << 16)
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                jobs.extend(json.loads(line or b"[]"))
            more = bool(read) and b"" not in lines
        running = [build for build in running if build.is_alive()]


def import_compiler() -> None:
    """quack decorates functions that no build calls; that would import Dynamo and Inductor, which take longer than
    quack and CUTLASS together."""
    with compat.patch("torch.compile", _as_it_is), compat.patch("torch.compiler.disable", _as_it_is):
        import quack.gemm_runtime.host  # noqa: F401

        from te_inductor.templates.cutlass import block_scaled, epilogues, gated_dgrad  # noqa: F401


def _as_it_is(function: Any = None, *, recompile_limit: Any = None, **_: Any) -> Any:
    """quack looks for `recompile_limit`, and where there is none for Dynamo's config."""
    return _as_it_is if function is None else function


def _run(linker: str, job: dict[str, Any]) -> None:
    with Path(job["log"]).open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    build(Kernel(**job["kernel"]), Path(job["path"]), linker)


def build(kernel: Kernel, path: Path, linker: str) -> None:
    """Compile, link, and put the library in place at once. Of several ranks that ask for one kernel, one builds it."""
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            _build(kernel, path, linker)


def _build(kernel: Kernel, path: Path, linker: str) -> None:
    from cutlass.runtime import find_runtime_libraries

    libraries = [Path(found) for found in find_runtime_libraries()]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        compiled_function(kernel).export_to_c(object_file_path=str(compiled), function_name=FUNCTION)
        where = [f"-Wl,-rpath,{found.parent}" for found in libraries]
        subprocess.run([linker, "-shared", "-o", linked, compiled, *libraries, *where], check=True)
        os.replace(linked, path)


def compiled_function(kernel: Kernel):  # type: ignore[no-untyped-def]
    from te_inductor.templates.cutlass import block_scaled, gated_dgrad

    if kernel.gating is not None:
        return gated_dgrad.compiled(kernel)
    scope = SCOPES[kernel.scope]
    return block_scaled.compiled(kernel) if scope.blocked and not scope.microscaled else plan(kernel).compiled_fn


def plan(kernel: Kernel):  # type: ignore[no-untyped-def]
    """quack's plan of a launch, which holds the compiled kernel."""
    import quack.gemm_runtime.host as host

    from te_inductor.templates.cutlass.epilogues import quantized, unquantized

    m, n, k = 1024, 768, 512  # read for strides and to tell rows from columns: every size is symbolic in the kernel
    operands = [empty((rows, k), getattr(torch, name)) for rows, name in ((m, kernel.a), (n, kernel.b))]
    out = torch.empty(m, n, dtype=getattr(torch, kernel.out))
    c = torch.empty_like(out) if kernel.added == ANOTHER else None
    microscaled = SCOPES[kernel.scope].microscaled
    if kernel.activation is None:
        epilogue = unquantized(kernel.scope, kernel.bias, c is not None)
    else:
        epilogue = quantized(kernel.activation, kernel.bias)
    # It asks the device, where this process has none; the number is an argument of the launch.
    with patch.object(host, "get_max_active_clusters", lambda *_: 1):
        return epilogue.gemm(
            *operands,
            out,
            c,
            tile_M=kernel.tile_m,
            tile_N=kernel.tile_n,
            cluster_M=kernel.cluster_m,
            cluster_N=kernel.cluster_n,
            pingpong=kernel.pingpong,
            add_to_output=kernel.added == OUTPUT,
            **_epilogue(kernel, m, n),
            **(_block_scales(kernel, m, n, k) if microscaled else _accumulation(kernel)),
            _launch=False,
        )


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of so many values."""
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
    if kernel.activation is not None:
        one["scale"] = torch.ones(1)
    if kernel.bias:
        dtype = getattr(torch, kernel.out) if kernel.activation is None else ROUNDED
        many["bias"] = torch.zeros(1, n, dtype=dtype)
    return {"epi_args": {**one, **many}, "epi_key_overrides": dict.fromkeys(one, ("pointer", Float32))}


def _accumulation(kernel: Kernel) -> dict[str, Any]:
    return {"post_init_attrs": (("fp8_slow_accum", not kernel.fast_accum),)}


def _block_scales(kernel: Kernel, m: int, n: int, k: int) -> dict[str, Any]:
    """Scales as `launch.py` views those of Note [Swizzled scales], and the formats by quack's names. The hardware hands
    out tiles (cluster launch control), as quack's own defaults have it."""
    scope = SCOPES[kernel.scope]
    scales = (empty((rows // 128, k // scope.block[1] // 4, 32, 4, 4), scope.scale.library) for rows in (m, n))
    names = {E4M3.library: "mxfp8_e4m3", E5M2.library: "mxfp8_e5m2", E2M1.library: "nvfp4"}
    a, b = (names[getattr(torch, name)] for name in (kernel.a, kernel.b))
    given = dict(zip(("SFA", "SFB"), scales, strict=True))
    return {**given, "bs_format_a": a, "bs_format_b": b, "is_dynamic_persistent": True}


if __name__ == "__main__":
    main(sys.argv[1])
