"""What importing the package costs, and which module may import which."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import te_inductor

PACKAGE = Path(te_inductor.__file__).parent
# A module may import from its own row and from rows above; the longest name that fits a module is its row's.
ORDER = [
    {"errors", "config", "diagnostics", "compat", "presentation"},
    {"recipes", "targets"},
    {"runtime"},
    {"ops", "operations"},
    {"templates"},
    {"ops.stored_weight", "ops.stored_experts"},
    {"passes.graph"},
    {"lowerings"},
    {"fused"},
    {"passes"},
    {"backend"},
    {"api"},
    {"distributed"},
    {"integrations"},
    {"command"},
    {"__init__", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def run(code: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)


def test_importing_imports_no_compiler():
    code = (
        "import sys, te_inductor; print([m for m in ('triton', 'cutlass', 'torch._inductor') if m in sys.modules]);"
        "from te_inductor import recipes; print([m for m in ('triton', 'cutlass') if m in sys.modules])"
    )
    assert run(code).stdout.split() == ["[]", "[]"]


@pytest.mark.quick("True")
@pytest.mark.parametrize("initialized", [True, False])
def test_the_backend_starts_inductors_workers_where_a_gpu_is_in_use(initialized):
    code = (
        f"import torch; torch.cuda.is_initialized = lambda: {initialized}; import te_inductor.backend;"
        "from torch._inductor.async_compile import AsyncCompile; print(AsyncCompile.process_pool.cache_info().currsize)"
    )
    assert run(code).stdout.strip() == str(int(initialized))


def test_the_backend_needs_no_import_of_ours():
    code = (
        "import sys, torch; f = torch.compile(torch.nn.Linear(32, 32), backend='te'); f(torch.randn(4, 32));"
        "print('te_inductor.backend' in sys.modules)"
    )
    done = run(code)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


@pytest.mark.parametrize("folder", ["lowerings", "templates", "runtime"])
def test_folders_refuse_their_bare_names(folder):
    root = PACKAGE.parent
    assert (root / folder).resolve() == PACKAGE / folder
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=root, capture_output=True, text=True)
    assert f"import te_inductor.{folder}" in done.stderr


def row_of(module: str) -> int:
    """Of a dotted name below te_inductor."""
    while module not in RANK:
        module = module.rpartition(".")[0]
    return RANK[module]


def imports(path: Path) -> set[str]:
    """Modules below te_inductor that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "te_inductor":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    found = {name.removeprefix("te_inductor.") for name in names if name.startswith("te_inductor.")}
    return {name for name in found if name.partition(".")[0] in RANK or name.partition(".")[0] == "passes"}


def test_imports_point_one_way():
    for path in PACKAGE.rglob("*.py"):
        own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if own == "__init__":
            continue
        for name in imports(path):
            assert row_of(name) <= row_of(own), f"{path.relative_to(PACKAGE)} imports {name}"


def test_the_package_does_not_import_the_oracle():
    assert not [path for path in PACKAGE.rglob("*.py") if "oracle" in path.read_text()]


def test_the_root_stays_small():
    """At most nine modules in the package's root, and none of the package over 500 lines."""
    assert len(list(PACKAGE.glob("*.py"))) <= 9
    assert not [path for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 500]
