"""The generated C++ of a graph in one file: what a compiler takes for it, half a second, goes into headers, and not into
the three or four kernels that a graph has. They are called by ctypes, as Python's headers would be a fifth of it."""

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest import mock

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache
from torch._inductor.utils import clear_on_fresh_cache

NUMBERS = {"int64_t": ctypes.c_int64, "uintptr_t": ctypes.c_uint64, "float": ctypes.c_float}
CALL = """
extern "C" const char* call{number}({declared}) {{
    static thread_local std::string said;
    try {{ kernel{number}({given}); }}
    catch (std::exception const& error) {{ said = error.what(); return said.c_str(); }}
    return nullptr;
}}
"""


@clear_on_fresh_cache
class Library(CppCodeCache):
    """Compiled, and kept, as Inductor does it with one kernel."""

    cache: ClassVar[dict[str, Callable[[], Any]]] = {}
    cache_clear = staticmethod(cache.clear)
    cpp_compile_command_flags = CppPythonBindingsCodeCache.cpp_compile_command_flags
    _get_uncompiled_header = CppPythonBindingsCodeCache._get_uncompiled_header


class Kernel:
    """What a graph's module calls, once all of its kernels are compiled."""

    def __init__(self, types: Sequence[str], text: str) -> None:
        self.types, self.text = types, text
        self.call: Any = None

    def written(self, number: int) -> str:
        given = [f"a{place}" for place in range(len(self.types))]
        declared = [f"{one} {name}" for one, name in zip(self.types, given, strict=True)]
        call = CALL.format(number=number, declared=", ".join(declared), given=", ".join(given))
        return re.sub(r"\bkernel\(", f"kernel{number}(", self.text) + call

    def load(self, call: Any) -> None:
        call.restype = ctypes.c_char_p
        call.argtypes = [NUMBERS.get(one.removeprefix("const "), ctypes.c_void_p) for one in self.types]
        self.call = call

    def __call__(self, *given: Any) -> None:
        said = self.call(*(one.data_ptr() if hasattr(one, "data_ptr") else one for one in given))
        if said is not None:
            raise RuntimeError(said.decode())


def patches() -> list[Any]:
    wait = AsyncCompile.wait

    def cpp_pybinding(self: Any, argtypes: Sequence[str], source_code: str) -> Kernel:
        kernel = Kernel(argtypes, source_code)
        vars(self).setdefault("kernels", []).append(kernel)
        return kernel

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        kernels = vars(self).pop("kernels", [])
        if kernels:
            library = Library.load("#include <string>\n" + "".join(one.written(i) for i, one in enumerate(kernels)))
            for i, one in enumerate(kernels):
                one.load(getattr(library, f"call{i}"))
        wait(self, scope)

    return [
        mock.patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding),
        mock.patch.object(AsyncCompile, "wait", wait_for_all),
    ]
