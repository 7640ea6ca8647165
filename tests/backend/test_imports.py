"""What importing the package costs, and which module may import which."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

import te_inductor
from tests import house

PACKAGE = Path(te_inductor.__file__).parent
# A module may import from its own row and from rows above; the longest name that fits a module is its row's.
ORDER = [
    {"errors", "config", "diagnostics", "compat", "presentation", "tensor_tables"},
    {"recipes", "targets"},
    {"numerics"},
    {"distributed"},
    {"runtime"},
    {"kernels"},
    {"templates"},
    {"ops", "eager_layers"},
    {"passes.graph"},
    {"lowerings"},
    {"fused"},
    {"passes.joint", "passes.post_grad"},
    {"passes.pre_grad.sites"},
    {"passes.pre_grad.plan", "passes.pre_grad.attention", "passes.pre_grad.loss"},
    {"passes.pre_grad.match"},
    {"passes.pre_grad.decide"},
    {"passes.pre_grad.rewrite"},
    {"passes"},
    {"backend"},
    {"api"},
    {"distributed.fsdp", "distributed.__init__"},
    {"integrations"},
    {"command"},
    {"__init__", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def run(code: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)


IMPORT = """
import sys, time, torch
known, begun = set(sys.modules), time.process_time()
import te_inductor
took, own = time.process_time() - begun, set(sys.modules) - known
heavy = [m for m in ("triton", "cutlass", "torch._inductor", "torch._dynamo", "sympy") if m in sys.modules]
assert not heavy and len(own) < 40, (heavy, own)
assert took < 0.15, took
from te_inductor import Report, recipes
assert "te_inductor.ops" not in sys.modules
for name in "layers", "exported_linears", "fp8_weight", "exit_region":
    print(getattr(torch.ops.te_inductor, name).default)
assert not hasattr(torch.ops.te_inductor, "no_such_op")
"""


def test_an_import_is_light_and_ops_are_known_by_name():
    done = run(IMPORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        f"te_inductor.{name}.default" for name in ("layers", "exported_linears", "fp8_weight", "exit_region")
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("initialized", [True, False])
def test_the_backend_starts_inductors_workers_where_a_gpu_is_in_use(initialized):
    code = (
        f"import torch; torch.cuda.is_initialized = lambda: {initialized}; import te_inductor.backend;"
        "from torch._inductor.async_compile import AsyncCompile; print(AsyncCompile.process_pool.cache_info().currsize)"
    )
    assert run(code).stdout.strip() == str(int(initialized))


def test_threads_that_ask_for_the_backend_at_once():
    """Both look, find that it is not registered, load it and register it."""
    from torch._dynamo.backends import registry

    barrier = threading.Barrier(2)

    class EntryPoint:
        def load(self):
            barrier.wait(60)
            return te_inductor.te

    registry.list_backends()  # torch registers its own once a process: not where they would be taken back below
    registered = registry._COMPILER_FNS
    with mock.patch.dict(registry._BACKENDS, te=EntryPoint()), mock.patch.dict(registered):
        registered.pop("te", None)
        with ThreadPoolExecutor(2) as threads:
            found = [threads.submit(registry.lookup_backend, "te") for _ in range(2)]
        assert [one.result() for one in found] == [te_inductor.te] * 2
        with pytest.raises(AssertionError, match="duplicate name: te"):
            registry.register_backend(lambda gm, inputs: gm, name="te")


FIRST_USES = """
import threading, traceback, torch
from torch import nn

def compiled():
    torch.compile(nn.Linear(32, 32), backend="te")(x).sum().backward()

def explained():
    import te_inductor
    te_inductor.explain(nn.Linear(32, 32), x)

def stored():
    import te_inductor
    te_inductor.quantize_(nn.Linear(32, 32), "rowwise")(x)

def in_a_region():
    from te_inductor import autocast
    with autocast(recipe="current"):
        compiled()

def by_name():
    import te_inductor
    torch.ops.te_inductor.tensor_amax(x)

def of_its_state():
    import te_inductor
    te_inductor.state_dict(nn.Linear(32, 32))

def used(use):
    barrier.wait()
    try:
        use()
    except BaseException:
        print(use.__name__, traceback.format_exc())

x = torch.randn(16, 32)
uses = [compiled, compiled, compiled, explained, stored, in_a_region, by_name, of_its_state]
barrier = threading.Barrier(len(uses))
threads = [threading.Thread(target=used, args=(use,)) for use in uses]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.thorough
def test_first_uses_in_threads():
    done = run(FIRST_USES)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


@pytest.mark.thorough
def test_the_backend_needs_no_import_of_ours():
    """What `torch.compile` makes has the backend before it is called."""
    code = (
        "import sys, torch; f = torch.compile(torch.nn.Linear(32, 32), backend='te');"
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
    """The row of a dotted name below te_inductor."""
    while module not in RANK:
        module = module.rpartition(".")[0]
    return RANK[module]


def test_imports_point_one_way():
    for path, tree in house.trees().items():
        own = path.removesuffix(".py").replace("/", ".")
        for name in (name.replace("/", ".") for name in house.imported(tree)):
            known = name.partition(".")[0] in RANK or name.partition(".")[0] == "passes"
            if known and own != "__init__":
                assert row_of(name) <= row_of(own), f"{path} imports {name}"


def test_the_package_does_not_import_the_oracle():
    assert not [path for path in PACKAGE.rglob("*.py") if "oracle" in path.read_text()]


def test_one_module_refers_weakly_to_tensors():
    """Note [References to tensors]: torch swaps no tensor that another reference is left to."""
    others = [path for path in PACKAGE.rglob("*.py") if "torch.utils.weak" in path.read_text()]
    assert not others, "tensor_tables.py has tables and references"


def test_the_root_stays_small():
    """There are at most nine modules in the package's root, and none of the package over 500 lines."""
    assert len(list(PACKAGE.glob("*.py"))) <= 9
    assert not [path for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 500]


def test_no_file_imports_from_a_test_file():
    """What several files of tests use stands in tests/support."""
    imported = re.compile(r"from tests[\w.]*(\.test_\w* import| import (\([^)]*|[^(\n]*)\btest_\w+)")
    paths = [path for path in Path(__file__).parents[1].rglob("*.py") if path != Path(__file__)]
    assert not [f"{path.name}: {one[0]}" for path in paths for one in imported.finditer(path.read_text())]
