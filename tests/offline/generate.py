"""Write the code that Inductor would generate for a CUDA device, on a machine without one.

Runs as a program of its own (see `harness.py`), because the shim must be in the process before torch is::

    python -m tests.offline.generate SHIM ARCH module:function OUT

`module:function` returns a model and its inputs, made on the device "cuda", under a FakeTensorMode: no storage exists.
OUT is a folder; each graph that Inductor lowers becomes a file there: 0.py (forward), 1.py (backward).
"""

import ast
import contextlib
import ctypes
import importlib
import itertools
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

PREFIX = "te_inductor_"  # of the names of constants in generated code


class GenerationDone(Exception):
    """Raised where the generated code would run."""


NAMES = {90: "h200", 100: "b200"}  # of the device of a compute capability, as `targets.PROPERTIES` has it


def device_properties(arch: int) -> SimpleNamespace:
    from te_inductor.targets import properties_of

    return SimpleNamespace(
        **vars(properties_of(NAMES[arch])),
        total_memory=140 << 30,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472,
        warp_size=32,
        clock_rate=1_980_000,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
        gcnArchName="",
    )


def pretend(arch: int) -> list[Any]:
    """Patches under which torch believes in one CUDA device of compute capability `arch`."""
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import utils
    from torch._inductor.codecache import CacheBase
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    properties = device_properties(arch)
    target = GPUTarget("cuda", arch, 32)
    system = {"device": {"name": properties.name}, "hash": "offline"}
    patches: list[Any] = [
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch.__config__, "show", lambda: "USE_MSLK=ON"),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(arch, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        mock.patch.object(torch.cuda, "_get_device_properties", lambda *_: properties, create=True),
        mock.patch.object(torch.cuda, "get_device_name", lambda *_: properties.name),
        mock.patch.object(torch.cuda, "_lazy_init", lambda: None),
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda *_: None, create=True),
        mock.patch.object(torch.cuda, "synchronize", lambda *_: None),
        mock.patch.object(torch.cuda, "_exchange_device", lambda *_: 0),
        mock.patch.object(torch.cuda, "_maybe_exchange_device", lambda *_: 0),
        mock.patch.object(torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu")),
        mock.patch.object(torch.cuda, "set_rng_state", lambda *_: None),
        mock.patch.object(CudaInterface, "is_available", staticmethod(lambda: True)),
        mock.patch.object(CudaInterface, "get_compute_capability", staticmethod(lambda *_: arch)),
        mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties)),
        mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        mock.patch.object(_triton, "has_triton", lambda: True),
        mock.patch.object(_triton, "triton_hash_with_backend", lambda: "offline"),
        mock.patch.object(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: target)),
        mock.patch.object(CacheBase, "get_system", staticmethod(lambda: system)),
    ]
    patches.append(mock.patch.object(utils, "is_big_gpu", lambda *_: True))
    # These trace example tensors on the device to build patterns that none of our graphs contain.
    for name in ("fuse_attention._sfdp_init", "misc_patterns._misc_patterns_init", "pad_mm._pad_mm_init"):
        patches.append(mock.patch(f"torch._inductor.fx_passes.{name}", lambda *_, **__: None))
    return patches


def check_constants(source: str, names: dict[str, Any], written: dict[str, Any]) -> None:
    """Checks that each constant of ours in generated code is rebuilt from its source, with the names that the module is
    given, as the constant that it was written for.

    Raises:
        AssertionError: a name stands for something else, or for nothing.
    """
    outermost: list[ast.expr] = []

    def visit(node: ast.AST) -> None:
        name = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.expr) and isinstance(name, ast.Name) and name.id.startswith(PREFIX):
            outermost.append(node)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(source))
    expected = {ast.unparse(ast.parse(text, mode="eval")): value for text, value in written.items()}
    for node in outermost:
        text = ast.unparse(node)
        assert text in expected, f"{text} was written by no constant"
        rebuilt = eval(text, dict(names))
        assert rebuilt == expected[text], f"{text} became {rebuilt!r}, a {type(rebuilt)}"


def main(shim: str, arch: int, case: str, out: Path) -> None:
    if shim:  # a CUDA build of torch has guards and hooks of its own
        ctypes.CDLL(shim, mode=ctypes.RTLD_GLOBAL)
    with contextlib.ExitStack() as stack:
        write(arch, case, out, stack)


def warm() -> None:
    """Writes a case in the process that programs are forked from: a fifth of what each of them would take goes into what a
    first compile imports, into sympy's caches and patterns of graphs. The case has no backward, as no process is forked
    from one whose autograd has run."""
    import torch
    from torch._functorch import aot_autograd

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write(90, "tests.offline.cases.layers:mlp_inference_block", Path(folder), stack)
    torch._dynamo.reset()
    aot_autograd.AOT_COUNTER = itertools.count()  # which numbers graphs in generated code


def write(arch: int, case: str, out: Path, stack: contextlib.ExitStack) -> None:
    """Writes the code of a case, with torch patched until the stack is closed."""
    import torch
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    from te_inductor.recipes.constants import Constant

    sources: list[str] = []
    written: dict[str, Any] = {}
    represent = Constant.__fx_repr__

    def recorded(self: Constant) -> tuple[str, dict[str, Any]]:
        source, names = represent(self)
        written[source] = self
        return source, names

    def keep(self: Any, code: Any) -> ModuleType:
        # The names that the module is given, whatever torch calls the dictionary that holds them.
        tables = [table for table in vars(self).values() if isinstance(table, dict)]
        names = {
            name: one
            for table in tables
            for name, one in table.items()
            if isinstance(name, str) and name.startswith(PREFIX)
        }
        # Kernels for CUDA are called directly; as ops they can be called where there is none. Constants have names, for
        # which stands what makes them.
        source = re.sub(r"extern_kernels\.te_inductor_cuda\.(\w+)\(", r"torch.ops.te_inductor.\1.default(", code.value)
        for name, one in list(names.items()):
            if isinstance(one, Constant):
                text, parts = represent(one)
                source, names = source.replace(name, text), names | parts
        check_constants(source, names, written)
        (out / f"{len(sources)}.py").write_text(source)
        sources.append(source)
        stub = ModuleType("stub")
        stub.__file__ = str(out / f"{len(sources) - 1}.py")

        def call(*_: Any) -> Any:
            raise GenerationDone

        stub.call = call  # type: ignore[attr-defined]
        return stub

    torch.autograd.set_multithreading_enabled(False)
    module, _, function = case.partition(":")
    # CUTLASS's kernels stand in the code of cases that are called so, whether it is installed or not, and are not
    # built.
    chosen = function.startswith("cutlass")
    small = [mock.patch("te_inductor.kernels.cutlass_tables.SAME", 2.0)] if chosen else []  # cases to be interpreted
    patches = [
        *pretend(arch),
        *small,
        mock.patch.object(GraphLowering, "_compile_to_module_lines", keep),
        mock.patch.object(Constant, "__fx_repr__", recorded),
        # The graph is that of later steps under delayed scaling, and not of a first one.
        mock.patch("te_inductor.runtime.state.state_inputs.StateInputs.may_lack_history", lambda *_: False),
        mock.patch("te_inductor.kernels.cutlass_tiles.architecture", lambda problem: str(arch) if chosen else None),
        mock.patch("te_inductor.templates.cutlass.build.start", lambda kernels: None),
        # Nothing can be measured: the last choice, which is CUTLASS's, is taken for the fastest.
        mock.patch("te_inductor.compat.autotune", lambda name, choices, nodes, layout: choices[-1].output_node()),
    ]
    for patch in patches:
        stack.enter_context(patch)
    settings = {
        "compile_threads": 1,
        "fx_graph_cache": False,
        "force_disable_caches": True,
        "joint_graph_constant_folding": False,
    }
    eager_backward = functorch.patch(force_non_lazy_backward_lowering=True)
    with FakeTensorMode(allow_non_fake_inputs=True), config.patch(settings), eager_backward:
        compiled, inputs = getattr(importlib.import_module(module), function)()
        try:
            compiled(*inputs)
        except GenerationDone:
            return
    raise SystemExit("the case ran without reaching generated code")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
