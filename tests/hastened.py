"""What torch does for its logs, for speed, or again and again, left out of the tests' processes: half of what tests that
compile C++ cost, a fourth of those that generate code.

Generated C++ is compiled without optimization, which takes a third of the time: a test's tensors are small. Inductor
allows the compiler no arithmetic but IEEE's, so that results have the same bits. It is written without vectors, whose
headers and tails take half of what is left; tests that want them take the fixture `vectors`. `--whole`, as in `make
test-all`, has C++ as users do: a fault of the compiler's own shows there (docs/ledger/tests.md has one).

The compiler is taken to know the processor's instructions. Inductor would compile a probe for some sets of them in each
folder of caches, and load them by a process each in every process that compiles. Kernels without vectors call nothing
of torch's libraries, which the linker would read. Those of a graph are one file (tests/one_file.py).

Guards are timed with the processor's caches flushed, 24 ms a graph, and each says which line made it. Each graph is
printed several times, and each fake mode reads the sources of its stack. So does each seed, for three kinds of devices
that are not there, which was most of what an empty test cost. Each compile writes all options down as JSON, and Dynamo reads
each file that it traces once more, for the names of its functions. Who sets TORCH_LOGS or TORCH_TRACE gets all of that.

Dynamo has the garbage collector look through what is young behind each compile, 2% of a round. A compile makes a million
objects, most of which go by themselves.

Inductor makes its one handler of dtypes anew for each op that it writes. For C++ it asks sympy to simplify each index,
50 ms of it, also the sums of products in which nothing is to be simplified.
"""

import functools
import gc
import os
import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock

WHOLE = "WHOLE_TESTS"  # is set under `--whole`, also for the processes of tests

OPTIONS = ("get_dynamo_config", "scrubbed_inductor_config", "compiler_config", "functorch_config")


def collect_seldom() -> None:
    """Has the collector leave out what is there by now, modules above all, and look less often than Python has it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def patches() -> list[Any]:
    """Patches of torch, in the processes of tests."""
    chosen = [] if WHOLE in os.environ else _of_compiles()
    return chosen if "TORCH_LOGS" in os.environ or "TORCH_TRACE" in os.environ else [*chosen, *_without_logs()]


def _without_optimization() -> Any:
    from torch._inductor.cpp_builder import BuildOptionsBase

    given = BuildOptionsBase.get_cflags

    def get_cflags(options: Any) -> list[str]:
        return ["O0" if flag in ("O1", "O2", "O3") else flag for flag in given(options) if flag != "g1"]

    return mock.patch.object(BuildOptionsBase, "get_cflags", get_cflags)


def _without_vectors() -> Any:
    from torch._inductor import config

    return mock.patch.object(config.cpp, "simdlen", 1)  # bits of a vector


def _without_probes() -> Any:
    from torch._inductor.cpu_vec_isa import VecISA

    return mock.patch.object(VecISA, "check_build", lambda *_: True)


def _without_libraries() -> Any:
    from torch._inductor import config
    from torch._inductor.cpp_builder import BuildOptionsBase

    given = BuildOptionsBase.get_libraries

    def get_libraries(options: Any) -> list[str]:
        called = options.get_aot_mode() or config.cpp_wrapper or config.cpp.simdlen != 1  # by functions of vectors
        return given(options) if called else []

    return mock.patch.object(BuildOptionsBase, "get_libraries", get_libraries)


def _of_compiles() -> list[Any]:
    from tests import one_file

    single = _without_optimization(), _without_vectors(), _without_probes(), _without_libraries()
    return [*single, *one_file.patches()]


def _without_logs() -> list[Any]:
    from torch import cuda, fx, mtia, xpu
    from torch._dynamo import config, guards, symbolic_convert, utils
    from torch._inductor import sizevars
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._subclasses import fake_tensor

    def printed(readable: Any) -> Any:
        def print_readable(graph: fx.GraphModule, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
            return readable(graph, True, *args, **kwargs) if print_output else ""

        return print_readable

    def once(handler: Any) -> Any:
        return lambda self: None if vars(self) else handler(self)

    def only_quotients(simplified: Any) -> Any:
        @functools.lru_cache
        def simplify_index_in_vec_range(index: Any, var: Any, vec_length: int) -> Any:
            return index if index.is_polynomial(*index.free_symbols) else simplified(index, var, vec_length)

        return simplify_index_in_vec_range

    def unwritten(_: Any) -> Any:
        return lambda: None

    without_stacks = SimpleNamespace(
        extract_stack=traceback.StackSummary, format_list=traceback.format_list, format_stack=list
    )
    replacements: list[tuple[Any, str, Any]] = [
        *((device, "traceback", lambda _: without_stacks) for device in (cuda, mtia, xpu)),
        *((utils, f"_{name}_for_logging", unwritten) for name in OPTIONS),
        (config, "run_gc_after_compile", lambda _: False),
        (symbolic_convert, "get_funcname", lambda _: lambda filename, lineno: None),
        (guards, "get_verbose_code_part", lambda _: lambda code_part, guard: code_part),
        (guards, "profile_guard_manager", lambda _: lambda *arguments: 0.0),
        (fx.GraphModule, "print_readable", printed),
        (fake_tensor, "traceback", lambda _: without_stacks),
        (DtypePropagationOpsHandler, "__init__", once),
        (sizevars, "simplify_index_in_vec_range", only_quotients),
    ]
    return [  # each is of some versions of torch
        mock.patch.object(owner, name, make(getattr(owner, name)))
        for owner, name, make in replacements
        if hasattr(owner, name)
    ]


def main() -> None:
    """Compiles the headers of generated C++, as tests want them: while pip works, on a core that it leaves idle."""
    import torch
    from torch._inductor import config

    for patch in patches():
        patch.start()
    torch.compile(torch.sin)(torch.ones(64))
    with config.patch({"cpp.simdlen": None}):  # as under the fixture `vectors`
        torch.compile(torch.cos)(torch.ones(64))


if __name__ == "__main__":
    main()
