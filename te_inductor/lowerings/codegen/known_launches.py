"""Launches of Inductor's kernels by generated code, which repeat what the first launch of each has found.

# Note [Launches that are known]
Before 2.13 Inductor's kernel asks at each call whether it is compiled, tuned and to be dumped, gives Triton an allocator
that it never needs, and puts its arguments together three times; for each pointer torch then asks the driver whose it
is. The first call of a kernel answers all of that. So generated code of ours runs the first one as torch does, and
from then on launches by itself, with addresses. Where somebody looks on, a profiler or a debug mode, and where a kernel
is launched in another way than torch's own static one, calls are torch's. From 2.13 on torch does the same."""

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.virtualized import V
from torch.autograd import profiler
from torch.utils._debug_mode import get_active_debug_mode

from te_inductor import compat


class KnownKernel:
    """A kernel as generated code calls it."""

    __slots__ = ("_kernel", "_launch")

    def __init__(self, kernel: CachingAutotuner) -> None:
        self._kernel = kernel
        self._launch: Callable[..., Any] | None = None

    def run(self, *args: Any, stream: int) -> None:
        launch = self._launch
        if launch is None or profiler._is_profiler_enabled or get_active_debug_mode() is not None:
            self._kernel.run(*args, stream=stream)
            if launch is None:
                self._launch = _launch_of(self._kernel, args)
        else:
            launch(*args, stream=stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def _launch_of(kernel: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """How a kernel is launched that has run with such arguments."""
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel

    [launcher] = kernel.launchers
    static = getattr(launcher.__globals__.get("runner"), "__self__", None)
    searches = kernel.inductor_meta.get("coordinate_descent_tuning", False)
    if (
        not isinstance(static, StaticallyLaunchedCudaKernel)
        or kernel.dump_launch_params
        or kernel.dump_launch_tensors
        or launcher.store_cubin
        or (searches and not getattr(launcher.config, "found_by_coordesc", False))
        or not all(one.is_cuda for one in args if isinstance(one, Tensor))
    ):
        return kernel.run  # type: ignore[no-any-return]
    names = {**launcher.__globals__, "runner": _runner(static)}
    return types.FunctionType(launcher.__code__, names, launcher.__name__)  # which finds the grid


def _runner(static: Any) -> Callable[..., None]:
    """Does what the kernel's own `run` does, written out for its arguments, as a loop over them takes as long again."""
    names = [f"a{place}" for place in range(len(static.arg_tys))]
    given = [
        f"{name} if {name} is None else {name}.data_ptr()" if kind == "O" else name
        for name, kind in zip(names, static.arg_tys, strict=True)
    ]
    scratch = static.has_global_scratch + static.has_profile_scratch  # pointers that are never used
    facts = {
        "launch": static.C_impl._launch_kernel,
        "function": static.function,
        "warps": static.num_warps,
        "shared": static.shared,
        "kinds": static.arg_tys + "O" * scratch,
    }
    all_given = "".join(f"{one}, " for one in [*given, *["None"] * scratch])
    arguments = f"function, x, y, z, warps, shared, kinds, ({all_given}), stream"
    return eval(f"lambda {', '.join(['x, y, z, stream', *names])}: launch({arguments})", facts)  # type: ignore[no-any-return]


def know(names: dict[str, Any]) -> None:
    """Called by generated code with its names, once Inductor's kernels stand there."""
    for name, one in names.items():
        if type(one) is CachingAutotuner:
            names[name] = KnownKernel(one)


extern_kernels.te_inductor_know_launches = know  # type: ignore[attr-defined]  # also for code that a cache returns


def launches_known() -> AbstractContextManager[None]:
    """Have code launch so where it is generated while this context holds."""
    if hasattr(CachingAutotuner, "_build_fast_launcher"):
        return nullcontext()
    original = PythonWrapperCodegen.write_async_compile_wait

    def write_async_compile_wait(self: Any) -> None:
        original(self)
        if not V.graph.cpp_wrapper:
            self.prefix.writeline("extern_kernels.te_inductor_know_launches(globals())")

    return compat.patch(
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.write_async_compile_wait", write_async_compile_wait
    )
