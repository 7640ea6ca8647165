"""CUDA code without a GPU: generate it in a process of its own, read it, and compile its Triton kernels to cubin."""

import ast
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import ROOT, TRITON, Server

HERE = Path(__file__).parent
CASES = HERE / "cases"
DAYS_KEPT = 7  # of generated code whose sources have changed
# Tile sizes for kernels whose tile Inductor leaves to its autotuner; XBLOCK 1, as a persistent reduction holds whole
# rows.
DEFAULT_TILE = {"XBLOCK": 1, "YBLOCK": 32, "R0_BLOCK": 1024, "RSPLIT_SIZE": 64, "NUM_STAGES": 1, "num_warps": 8}

# For programs that run kernels in Triton's interpreter, with what they import besides.
INTERPRETER = Server((*TRITON, "triton.experimental.gluon.nvidia.hopper", "pytest"), TRITON_INTERPRET="1")


@dataclass(frozen=True)
class Kernel:
    """One Triton kernel of a generated graph."""

    name: str
    source: str  # of the jitted function alone, with its imports
    meta: dict[str, Any]  # Inductor's triton_meta: the signature, the constants
    tile: dict[str, int] | None  # where Inductor fixed it

    @property
    def body(self) -> str:
        return self.source[self.source.index("def " + self.name) :]


@dataclass(frozen=True)
class Generated:
    """What Inductor wrote for one case: the wrapper of the forward and of the backward, and their kernels."""

    sources: tuple[str, ...]

    @property
    def kernels(self) -> list[Kernel]:
        return [kernel for source in self.sources for kernel in _kernels(source)]

    def kernel(self, *fragments: str) -> Kernel:
        """The one kernel whose name holds all fragments."""
        found = [kernel for kernel in self.kernels if all(part in kernel.name for part in fragments)]
        assert len(found) == 1, f"{fragments} match {[kernel.name for kernel in found]}"
        return found[0]


@functools.cache
def shim() -> str:
    """Path of the compiled `fake_cuda.cpp`; kept by the hash of its source, and of torch's version and place."""
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of torch brings device guards that need a driver; the offline tests want a CPU build")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = HERE / "fake_cuda.cpp"
    # The libraries that it is linked to count, too: another environment has others.
    key = hashlib.sha256(source.read_bytes() + f"{torch.__version__} {torch.__file__}".encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"te_inductor_fake_cuda_{os.getuid()}_{key}.so"
    if not built.exists():
        root = Path(torch.__file__).parent
        partial = built.with_suffix(f".{os.getpid()}")
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        command = [compiler, "-O0", "-fPIC", "-shared", "-std=c++20", abi, str(source), "-o", str(partial)]
        subprocess.run([*command, *includes, *libraries], check=True)
        partial.rename(built)
    return str(built)


@functools.cache
def server(warm: bool = False) -> Server:
    """The process in which cases are generated; a warm one has generated one for compute capability 90."""
    return Server(TRITON, libraries=(shim(),), warm="tests.offline.generate" if warm else "")


@functools.cache
def generate(case: str, arch: int) -> Generated:
    """The code for a case (tests/offline/cases) on compute capability `arch` (90, 100).

    It is kept in a temporary folder, for other tests, workers and runs with the same sources."""
    shim()
    kept = results() / f"{case}_{arch}"
    with locked(kept.with_suffix(".lock")):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
                made = Path(folder, "made")
                made.mkdir()
                program = ("tests.offline.generate", "", str(arch), f"{module_of(case)}:{case}", str(made))
                done = server(warm=arch == 90).run(*program)
                assert done.returncode == 0, done.stderr[-4000:]
                for failure in ("lowering failed", "a pass of ours failed"):
                    assert failure not in done.stderr, done.stderr[-4000:]
                made.rename(kept)
    return Generated(tuple(path.read_text() for path in sorted(kept.glob("*.py"))))


@functools.cache
def module_of(case: str) -> str:
    """The module that has it, by its name."""
    found = [path for path in CASES.glob("*.py") if f"\ndef {case}(" in path.read_text()]
    assert len(found) == 1, f"{case} is in {len(found)} modules of {CASES}, expected one"
    return f"tests.offline.cases.{found[0].stem}"


@functools.cache
def results() -> Path:
    """The folder of what was generated from the sources as they are, by these versions of what they import."""
    files = [path for folder in ("te_inductor", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    files += [path for folder in (HERE, CASES, HERE.parent) for path in folder.glob("*.py")]
    key = hashlib.sha256()
    for path in sorted(files):
        if path.suffix in (".py", ".json"):
            key.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    versions = {name: metadata.version(name) for name in ("torch", "triton", "sympy")}
    settings = {name: value for name, value in os.environ.items() if name.startswith(("TORCH", "TRITON", "TE_"))}
    key.update(repr((sys.version, versions, sorted(settings.items()))).encode())
    all_of_them = Path(tempfile.gettempdir()) / f"te_inductor_offline_{os.getuid()}"
    folder = all_of_them / key.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    folder.touch()
    for other in all_of_them.iterdir():
        if other.stat().st_mtime < time.time() - DAYS_KEPT * 86400:
            shutil.rmtree(other, ignore_errors=True)
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _kernels(source: str) -> list[Kernel]:
    """The kernels of one wrapper, each written there as ``name = async_compile.triton('name', '''source''')``."""
    kernels = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr == "triton":
                kernels.append(_kernel(*(ast.literal_eval(argument) for argument in node.value.args[:2])))
    return kernels


def _kernel(name: str, source: str) -> Kernel:
    """Keep the imports and the jitted function; take the launch facts out of Inductor's decorator."""
    tree = ast.parse(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    [function] = [node for node in functions if node.name.startswith("triton_")]
    helpers = [node for node in functions if node is not function]  # of a scan
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)] + helpers
    facts: dict[str, Any] = {}
    scope: dict[str, Any] = {}
    exec("from torch._inductor.runtime.hints import *", scope)  # DeviceProperties and the hint enums
    for decorator in function.decorator_list:
        for keyword in getattr(decorator, "keywords", []):
            if keyword.arg in ("triton_meta", "config"):
                facts[keyword.arg] = eval(ast.unparse(keyword.value), scope)
    function.decorator_list = [node for node in function.decorator_list if ast.unparse(node).startswith("triton.jit")]
    text = "\n".join(ast.unparse(node) for node in [*imports, function])
    return Kernel(name, text, facts["triton_meta"], facts.get("config"))


def compile_to_cubin(kernel: Kernel, arch: int, folder: Path) -> Any:
    """Compile one kernel with Triton's own ptxas; returns Triton's compiled kernel (`.asm["ptx"]`, `.asm["cubin"]`)."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(kernel.name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, kernel.name)
    tile = dict(kernel.tile or DEFAULT_TILE)
    options = {"num_warps": tile.pop("num_warps", 4)}
    signature = dict(kernel.meta["signature"])
    constants = dict(kernel.meta["constants"])
    constants.update({name: tile[name] for name, kind in signature.items() if kind == "constexpr" and name in tile})
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    [attributes] = kernel.meta["configs"]  # what Inductor says of arguments: multiples of 16
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert_words(compiled.asm["ptx"], kernel.name)
    # What a reduction leaves may be less than a word of casts, with tiles that Inductor chooses.
    assert "r0_numel" not in kernel.meta["signature"] or "satfinite" not in kernel.body, kernel.name
    return compiled


def assert_words(ptx: str, name: str) -> None:
    """Pairs of FP8 values that become a word are used nowhere else: Note [Casts in PTX]."""
    for pair in re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+(%\w+),", ptx):
        uses = re.findall(rf"^\s*(\S+).*{pair}\b.*$", ptx, re.MULTILINE)
        assert "mov.b32" not in uses or len(uses) == 2, (name, pair, uses)
