"""Shared by all tests: every test starts with empty Dynamo caches and a known random state (`--seed`, default 0).

Imports nothing large: so pytest-xdist's first process, which runs no test, does not import torch either."""

import contextlib
import gc
import os

# Workers of pytest-xdist share the cores: one thread each, for tensors and for Inductor's compiles.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.pop("COLUMNS", None)  # of the terminal that the tests run in: reports are as wide as it says
# What the processor has, the compiler is taken to know: Inductor would compile and load a probe for each set of
# instructions, ten seconds for each empty cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

from collections import defaultdict
from importlib import metadata

import pytest

from tests import hastened
from tests.rounds import sample


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="random seed of every test; other seeds are other data")
    parser.addoption(
        "--whole", action="store_true", help="AOTAutograd where make test goes without, and C++ as users have it"
    )
    parser.addoption("--cases", type=int, default=100, help="how many random models tests/backend/test_fuzz.py checks")
    parser.addoption("--compiled", type=int, default=0, help="and how many with generated code, half a minute each")


def pytest_configure(config):
    if config.getoption("--whole"):
        os.environ[hastened.WHOLE] = "1"


def pytest_report_header(config):
    return f"seed: {config.getoption('--seed')}, torch {metadata.version('torch')}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks `thorough`, of tests marked `quick`, the cases that it does not name; of tests marked `sample` those that
    are not in the sample, which is drawn from cases that are not marked so yet."""
    of_one_test = defaultdict(list)
    for item in items:
        named = item.get_closest_marker("quick")
        if named is not None and item.callspec.id not in named.args:
            item.add_marker("thorough")
        marker = item.get_closest_marker("sample")
        if marker is not None and item.get_closest_marker("thorough") is None:
            of_one_test[item.parent.nodeid, item.originalname, marker.args[0]].append(item)
    for (_, _, together), cases in of_one_test.items():
        # A value is one object in all cases.
        values = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
        chosen = sample(values, together)
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay to the end: the garbage collector need not look through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        hastened.collect_seldom()


@pytest.fixture(autouse=True, scope="session")
def hastened_torch():
    with contextlib.ExitStack() as stack:
        for patch in hastened.patches():
            stack.enter_context(patch)
        yield


@pytest.fixture(autouse=True)
def fresh_state(request):
    import torch

    torch._dynamo.reset()
    torch.manual_seed(request.config.getoption("--seed"))
    collections = gc.get_stats()[2]["collections"]
    yield
    torch._dynamo.reset()
    if gc.get_stats()[2]["collections"] > collections:
        gc.freeze()  # what has survived stays: the next test that collects would take a second and more to look through it


@pytest.fixture
def no_caches():
    """Serves tests that change the code behind a traced op: the compile caches do not see such a change.

    What a compiler made of generated C++ is found by that text, and kept. (`force_disable_caches` compiles it anew for
    each graph, most of a minute for some tests.)"""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    none = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with inductor.patch(none), functorch.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        yield


@pytest.fixture
def vectors():
    """C++ that computes with vectors, as users have it, where tests/hastened.py has it written without. Compiled without
    optimization they have 256 bits at most, as code of GCC 12 for transposed tiles of 512 is wrong then, and right with it
    (seen on an AMD EPYC)."""
    import torch
    from torch._inductor import config

    from te_inductor import compat

    compat.width_of_right_vectors.cache_clear()  # where there are none, none are wrong
    narrow = hastened.WHOLE not in os.environ and torch.backends.cpu.get_cpu_capability() == "AVX512"
    with config.patch({"cpp.simdlen": 256 if narrow else None}):
        yield
    compat.width_of_right_vectors.cache_clear()


@pytest.fixture
def without_cpp(monkeypatch, no_caches):
    """Graphs are lowered and written as code, whose C++ is not compiled: what it would compute is left out, for tests of
    how often, and with what warnings, code is generated."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *tensors: None)


@pytest.fixture
def one_seed(monkeypatch):
    """Stochastic rounding has the same bits at every call, so that runs that draw in another order are comparable."""
    import torch

    from te_inductor.ops import casts

    monkeypatch.setattr(casts, "new_seed", lambda device: torch.full((), 5, dtype=torch.int64, device=device))


@pytest.fixture
def without_codegen(request, monkeypatch):
    """Graphs run as AOTAutograd made them, each op by its eager kernel: what passes and state do to programs, without
    minutes of C++. A test marked `codegen` is compiled all the same."""
    from te_inductor import compat
    from tests import uncompiled

    if request.node.get_closest_marker("codegen") is None:
        monkeypatch.setattr(compat, "compile_fx", uncompiled.compile_fx)


@pytest.fixture
def without_tracing(request, without_codegen, monkeypatch):
    """Dynamo's graphs run as the package's passes rewrote them, each op by its eager kernel, the backward by autograd:
    without AOTAutograd, which is most of what an uncompiled test costs. Tests marked `traced`, and with `--whole` all,
    run as under `without_codegen`; so do those marked `codegen`."""
    from te_inductor import compat
    from tests import uncompiled

    marked = any(request.node.get_closest_marker(name) for name in ("codegen", "traced"))
    if not marked and not request.config.getoption("--whole"):
        monkeypatch.setattr(compat, "compile_fx", uncompiled.run_rewritten)
